"""The search for overlapping chunks finds just those that a comparison of all pairs finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from robust_dcp.plan.conflicts import first_overlap

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _overlap(one: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one[0], one[1], other[0], other[1], strict=True)
    )


def _overlapping_pairs(groups: list[Boxes]) -> set[tuple[int, int]]:
    pairs: set[tuple[int, int]] = set()
    first = 0
    for boxes in groups:
        for one, other in itertools.combinations(range(len(boxes)), 2):
            if _overlap(boxes[one], boxes[other]):
                pairs.add((first + one, first + other))
        first += len(boxes)
    return pairs


def _found(groups: list[Boxes], n_dims: int) -> tuple[int, int] | None:
    boxes = [box for group in groups for box in group]
    number = np.repeat(np.arange(len(groups), dtype=np.int32) * 3, [len(group) for group in groups])
    offset = np.array([box[0] for box in boxes], dtype=np.int64).reshape(len(boxes), n_dims)
    size = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), n_dims)
    return first_overlap(number.astype(np.int32), offset, size)


@st.composite
def _groups(draw: st.DrawFn) -> tuple[list[Boxes], int]:
    n_dims = draw(st.integers(1, 3))
    # Along some dimensions all boxes are alike: that is how most tensors are cut.
    extents = [draw(st.sampled_from([1, 4, 9])) for _ in range(n_dims)]
    offsets = st.tuples(*(st.integers(0, extent - 1) for extent in extents))
    sizes = st.tuples(*(st.integers(1, 3) if extent > 1 else st.just(2) for extent in extents))
    group = st.lists(st.tuples(offsets, sizes), max_size=5, unique_by=lambda box: box[0]).map(sorted)
    return draw(st.lists(group, max_size=4)), n_dims


@settings(max_examples=300)
@given(_groups())
@example(([[((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 3)), ((2, 2), (2, 2))]], 2))
def test_an_overlap_is_found_if_and_only_if_there_is_one(drawn: tuple[list[Boxes], int]) -> None:
    groups, n_dims = drawn
    pairs = _overlapping_pairs(groups)
    found = _found(groups, n_dims)
    assert (found is None) == (not pairs)
    if found is not None:
        assert (min(found), max(found)) in pairs


@pytest.mark.parametrize("extra", [0, 1])
def test_bricks_that_lie_on_no_grid_are_decided_exactly(extra: int) -> None:
    bricks: Boxes = [((0, 0), (2, 3)), ((0, 3), (1, 3)), ((1, 3), (3, 3 - extra)), ((2, 0), (2, 3 + extra))]
    assert (_found([sorted(bricks)], 2) is None) == (not extra)
