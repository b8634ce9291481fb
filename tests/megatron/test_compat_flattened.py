"""The distributed optimizer as Megatron-Core 0.14 saves it by default, with ``--ckpt-fully-parallel-save``.

Each rank's part of the flat buffer is flattened ranges of tensors, whose true shapes stand in ``Metadata.mcore_data``.
``make test-compat`` puts 0.14.0 on ``PYTHONPATH``; from 0.16 on there are no such ranges.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from demo.megatron_model import Layout
from tests.megatron.both_ways import Case, check_both_ways

pytestmark = [pytest.mark.compat, pytest.mark.slow]

_FLAT = "fully_sharded_model_space"
_DENSE = Case(
    4, Layout(tensor=2, pipeline=2), (Layout(tensor=2, pipeline=2), Layout(pipeline=2)), optimizer_format=_FLAT
)
_DENSE_IN_PARALLEL = Case(4, Layout(tensor=2), (Layout(tensor=2), Layout()), is_parallel=True, optimizer_format=_FLAT)
_MOE = Case(
    4,
    Layout(pipeline=2, expert=2),
    (Layout(pipeline=2, expert=2), Layout(expert=4)),
    experts=4,
    is_parallel=True,
    optimizer_format=_FLAT,
)
_IN_ONE_PIECE = Case(
    4, Layout(tensor=2), (Layout(tensor=2),), is_parallel=True, optimizer_format="dp_zero_gather_scatter"
)
"""Without ``--ckpt-fully-parallel-save``."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(_DENSE, id="dense"),
        pytest.param(_DENSE_IN_PARALLEL, id="dense-in-parallel"),
        pytest.param(_MOE, id="moe"),
        pytest.param(_IN_ONE_PIECE, id="in-one-piece"),
    ],
)
def test_ours_and_stock_load_each_others_flattened_optimizers_bit_for_bit(tmp_path: Path, case: Case) -> None:
    check_both_ways(case, tmp_path)
