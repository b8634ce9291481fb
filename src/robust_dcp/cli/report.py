"""``robust-dcp report``: the reports that saves have left, as one HTML page."""

from __future__ import annotations

import os
import secrets
from typing import Any

import msgspec

from robust_dcp.cli.output import CommandFailed, Output, age, size
from robust_dcp.report_page import NoReports, Reports, read_reports, render_page

__all__ = ["run"]


def run(path: str, *, output: str) -> None:
    """Write the page of the reports that saves have left."""
    try:
        reports = read_reports(path)
    except NoReports as error:
        raise CommandFailed(str(error)) from None
    if Output.as_json:
        Output.put(_as_json(reports))
        return
    _write(output, render_page(reports))
    Output.table(
        ("checkpoint", "saved", "seconds", "size", "rate", "plan", "ranks"),
        [
            (
                *(each.name, age(each.report.saved_at_seconds), f"{each.report.seconds:.2f}"),
                size(each.report.total_nbytes),
                f"{size(each.report.total_nbytes / max(each.report.seconds, 1e-9))}/s",
                *(each.report.plan.outcome, each.report.world_size),
            )
            for each in reports.found
        ],
        right=("seconds", "size", "rate", "ranks"),
    )
    for skipped in reports.skipped:
        Output.say(f"Skipped {skipped.name}: {skipped.reason}")
    Output.say(f"The page is {output}")


def _write(path: str, page: str) -> None:
    """Replace the page in one step."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        raise CommandFailed(f"the page cannot be written to {path}: {error.strerror}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _as_json(reports: Reports) -> dict[str, Any]:
    return {
        "path": reports.path,
        "reports": [{"name": each.name, **msgspec.to_builtins(each.report)} for each in reports.found],
        "skipped": [{"name": each.name, "reason": each.reason} for each in reports.skipped],
    }
