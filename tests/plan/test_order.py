"""The items of all ranks are sorted by name, offsets and rank, however large their tensors are."""

from __future__ import annotations

import pytest

from robust_dcp.plan.global_plan.columns import merge_tables
from robust_dcp.plan.global_plan.order import order_of
from tests.plan.structures import Item, chunk, table, tensor

_HALF = 2**30


def _halves(name: str, extent: int) -> list[Item]:
    """A square tensor, cut along both dimensions."""
    cuts = (0, extent // 2)
    return [chunk(name, (extent, extent), (row, column), (extent // 2, extent // 2)) for row in cuts for column in cuts]


@pytest.mark.parametrize(
    "extent",
    [
        pytest.param(8, id="one number holds name and position"),
        pytest.param(_HALF, id="one number holds the position alone"),
        pytest.param(2 * _HALF, id="no number holds the position"),
    ],
)
def test_rows_are_in_the_order_of_name_offsets_and_rank(extent: int) -> None:
    everything = [item for name in "dbca" for item in _halves(name, extent)]
    tables = [table(*everything[::2], tensor("e")), table(*everything), table(*everything[1::3], tensor("e"))]
    columns = merge_tables(tables)
    rows = range(len(columns))
    expected = sorted(rows, key=lambda row: (columns.name[row], *columns.offset[row].tolist(), int(columns.rank[row])))
    assert order_of(columns).tolist() == expected
