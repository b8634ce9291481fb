"""torchao, unmodified: quantized weights, and the 8-bit Adam under FSDP2, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.both_sides import check_both_sides
from tests.frameworks.jobs import require, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    require("torchao")


def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(tmp_path: Path) -> None:
    check_both_sides("ao", "sync", directory=tmp_path, equal=["sync"])


def test_an_async_save_holds_what_a_save_holds(tmp_path: Path) -> None:
    """Stock's own async save writes NaN in place of 8-bit states, so it is not compared with."""
    run_job("ao", "save", "async", tmp_path, robust=True)
    for robust in (True, False):
        assert run_job("ao", "load", "async", tmp_path, robust=robust).equal == ["async"]
