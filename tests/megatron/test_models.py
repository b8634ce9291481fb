"""Megatron models on CPU: ours and stock load each other's checkpoints, into other layouts, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from demo.megatron_model import Layout
from tests.megatron.both_ways import Case, check_both_ways

_MOE = Case(
    4,
    Layout(pipeline=2, expert=2),
    (Layout(pipeline=2, expert=2), Layout(tensor=2, expert=2)),
    experts=4,
    is_parallel=True,
)
_DENSE = Case(4, Layout(tensor=2, pipeline=2), (Layout(tensor=2, pipeline=2), Layout(pipeline=2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(_MOE, id="moe"),
        pytest.param(_DENSE, id="dense"),
    ],
)
def test_ours_and_stock_load_each_others_checkpoints_bit_for_bit_into_any_layout(tmp_path: Path, case: Case) -> None:
    check_both_ways(case, tmp_path)
