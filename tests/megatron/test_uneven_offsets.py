"""The arithmetic of the keyed exchange: offsets of any cut, and no wrong cut passes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp import PlanConflict
from robust_dcp.megatron.uneven.uneven_offsets import solve
from robust_dcp.megatron.uneven.uneven_shards import LocalPart, ShardColumns, Spread, columns_of

_SPREADS = [
    Spread((4,), (0, 1, 2, 3), (0,), (0,), 2),
    Spread((2, 2), (0, 1, 2, 3), (0, 1), (0, 1), 2),
    Spread((2, 2), (0, 1, 2, 3), (0, 0), (0, 1), 2),
    Spread((2, 2), (0, 1, 2, 3), (0, 0), (1, 0), 2),
    Spread((2, 2), (0, 1, 2, 3), (-1, 1), (1,), 2),
]


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[list[LocalPart], list[tuple[int, ...]]]:
    """The parts of one tensor on four ranks, and where each begins, by edges that are drawn along each dimension."""
    spread = draw(st.sampled_from(_SPREADS))
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    edges = []
    for dim, size in enumerate(shape):
        count = int(np.prod([n for n, cut in zip(spread.mesh_shape, spread.shard_dims, strict=True) if cut == dim]))
        inner = draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1))
        edges.append([0, *sorted(inner), size])
    parts, begins = [], []
    for place in itertools.product(*map(range, spread.mesh_shape)):
        cuts = []
        for dim in range(len(shape)):
            nth, weight = 0, 1
            for mesh_dim in spread.order:  # the innermost first
                if spread.shard_dims[mesh_dim] == dim:
                    nth += place[mesh_dim] * weight
                    weight *= spread.mesh_shape[mesh_dim]
            cuts.append((edges[dim][nth], edges[dim][nth + 1]))
        parts.append(LocalPart(spread, place, shape, tuple(end - begin for begin, end in cuts)))
        begins.append(tuple(begin for begin, _ in cuts))
    return parts, begins


def _columns(parts: list[LocalPart], key: str = "weight") -> list[ShardColumns | None]:
    return [columns_of({key: part}) for part in parts]


@given(_cuts())
def test_parts_begin_where_they_were_cut(cut: tuple[list[LocalPart], list[tuple[int, ...]]]) -> None:
    parts, begins = cut
    found = [np.frombuffer(rank.spreads[0], dtype="<i8").tolist() for rank in solve(_columns(parts), range(4))]
    assert found == [list(begin) for begin in begins]


@given(_cuts(), st.integers(0, 3), st.integers(0, 1), st.sampled_from([-2, -1, 1, 2]))
def test_a_part_of_another_size_is_refused(
    cut: tuple[list[LocalPart], list[tuple[int, ...]]], rank: int, dim: int, by: int
) -> None:
    parts, _ = cut
    sizes = list(parts[rank].local_shape)
    sizes[dim] = max(0, sizes[dim] + by)
    if np.prod(sizes) == np.prod(parts[rank].local_shape):
        return  # another shape of nothing
    parts[rank] = replace(parts[rank], local_shape=tuple(sizes))
    with pytest.raises(PlanConflict, match="'weight'") as caught:
        solve(_columns(parts), range(4))
    assert caught.value.key == "weight"
    assert caught.value.ranks == [0, 1, 2, 3]


@given(_cuts(), st.integers(0, 3))
def test_a_key_may_be_missing_where_nothing_is_missing(
    cut: tuple[list[LocalPart], list[tuple[int, ...]]], rank: int
) -> None:
    parts, begins = cut
    columns = _columns(parts)
    columns[rank] = None
    if np.prod(parts[rank].local_shape):
        with pytest.raises(PlanConflict, match=rf"ranks \[{rank}\] do not hold this key"):
            solve(columns, range(4))
        return
    found = solve(columns, range(4))
    for other, part in enumerate(parts):
        if other != rank and np.prod(part.local_shape):
            assert np.frombuffer(found[other].spreads[0], dtype="<i8").tolist() == list(begins[other])


@given(_cuts())
def test_columns_do_not_depend_on_the_order_of_keys(cut: tuple[list[LocalPart], list[tuple[int, ...]]]) -> None:
    parts = {str(nth): part for nth, part in enumerate(cut[0])}
    assert columns_of(parts) == columns_of(dict(reversed(parts.items())))


def test_two_ranks_at_one_place_are_named() -> None:
    spread = Spread((2,), (0, 1), (0,), (0,), 1)
    parts = [LocalPart(spread, (0,), (4,), (2,)), LocalPart(spread, (0,), (4,), (2,))]
    with pytest.raises(PlanConflict, match="two of them are at one place") as caught:
        solve(_columns(parts), (0, 1))
    assert caught.value.ranks == [0, 1]


def test_many_conflicts_are_counted_and_some_are_told() -> None:
    spread = Spread((2,), (5, 7), (0,), (0,), 1)
    part = LocalPart(spread, (0,), (4,), (2,))
    columns: list[ShardColumns | None] = [columns_of({f"layer.{nth:02}": part for nth in range(20)}), None]
    with pytest.raises(PlanConflict) as caught:
        solve(columns, (5, 6))
    message = str(caught.value)
    assert "the parts of 20 uneven DTensor(s)" in message
    assert "ranks [7] do not hold this key (ranks [7] are not in the group that saves)" in message
    assert "and 12 more keys" in message
