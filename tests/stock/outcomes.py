"""A plugin of pytest for ``make test-stock``: it writes down what came of each test, and what robust_dcp did in it.

What came of a test is a line in the file that ``STOCK_OUTCOMES`` names. Each save and each load of robust_dcp that ends
well, on whatever rank, is a line in the file that ``STOCK_CALLS`` names.
"""

from __future__ import annotations

import json
import os

import pytest

if os.environ.get("ROBUST_DCP") == "1":
    import robust_dcp

    def _count(event: robust_dcp.Event) -> None:
        if event.name == "ended":
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            _append("STOCK_CALLS", json.dumps([test, event.kind]))

    robust_dcp.on_event(_count)


def _append(variable: str, line: str) -> None:
    with open(os.environ[variable], "a") as file:
        file.write(f"{line}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what came of a test on this rank. What fails while it is set up or torn down has failed."""
    if report.when == "call" or report.outcome != "passed":
        rank = int(os.environ.get("RANK", "0"))
        _append("STOCK_OUTCOMES", json.dumps([report.nodeid, rank, report.outcome, str(report.longrepr or "")[-3000:]]))
