"""One answer to whether boxes fill their tensors, compared with a count of each element."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.coverage import Box, Coverage, columns_of

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[tuple[int, ...], Boxes]]:
    """Tensors with boxes that fill them, or nearly do: some are moved, cut, left out or there twice."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        boxes: Boxes = [((0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 5)) if shape else 0):  # cut one of them in two
            offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(0, size[dim]))
            boxes.append((offset, (*size[:dim], at, *size[dim + 1 :])))
            boxes.append(
                ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :]))
            )
        for place in range(len(boxes)):
            if draw(st.integers(0, 9)) == 0:
                offset, size = (tuple(draw(st.integers(-1, 7)) for _ in shape) for _ in range(2))
                boxes[place] = offset, size
        if draw(st.integers(0, 5)) == 0:
            boxes.pop()
        if boxes and draw(st.integers(0, 5)) == 0:
            boxes.append(boxes[0])
        found.append((shape, draw(st.permutations(boxes))))
    return found


def elements(box: tuple[tuple[int, ...], tuple[int, ...]]) -> set[tuple[int, ...]]:
    return set(product(*(range(begin, begin + length) for begin, length in zip(*box, strict=True))))


def is_outside(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> bool:
    sides = zip(shape, offset, size, strict=True)
    return any(begin < 0 or length < 0 or begin + length > whole for whole, begin, length in sides)


@settings(max_examples=600, deadline=None)
@given(tensors())
def test_overlaps_gaps_and_what_is_outside_are_found_exactly(each: list[tuple[tuple[int, ...], Boxes]]) -> None:
    rows = [(number, box) for number, (_, boxes) in enumerate(each) for box in boxes]
    ndim = max(len(shape) for shape, _ in each)
    offset, size = (columns_of([box[side] for _, box in rows], side, ndim) for side in (0, 1))
    whole = columns_of([shape for shape, _ in each], 1, ndim)
    coverage = Coverage(np.array([number for number, _ in rows], dtype=np.intp), offset, size, whole)

    outside = [place for place, (number, box) in enumerate(rows) if is_outside(each[number][0], *box)]
    assert coverage.outside.tolist() == outside
    with_overlaps, with_gaps = set(), set()
    for number, (shape, boxes) in enumerate(each):
        inside = [elements(box) for box in boxes if not is_outside(shape, *box)]
        together = set().union(*inside)
        if sum(map(len, inside)) > len(together):
            with_overlaps.add(number)
        if together != elements(((0,) * len(shape), shape)):
            with_gaps.add(number)
            gap = coverage.gap(number, len(shape))
            assert gap is not None and elements(gap)
            assert not elements(gap) & together and elements(gap) <= elements(((0,) * len(shape), shape))
        else:
            assert coverage.gap(number) is None
    assert set(coverage.overlaps) == with_overlaps
    assert set(coverage.with_gaps.tolist()) == with_gaps
    for number, pair in coverage.overlaps.items():
        first, second = (rows[place] for place in pair)
        assert first[0] == second[0] == number and pair[0] != pair[1]
        assert elements(first[1]) & elements(second[1])


def test_tensors_of_more_elements_than_an_integer_has_are_decided_exactly() -> None:
    whole = np.array([[1 << 40, 1 << 40]])
    halves = np.array([[1 << 39, 1 << 40]] * 2)
    offset = np.array([[0, 0], [1 << 39, 0]])
    tensor = np.zeros(2, dtype=np.intp)
    assert not len(Coverage(tensor, offset, halves, whole).with_gaps)
    coverage = Coverage(tensor, offset, halves - [[0, 1], [0, 0]], whole)
    assert coverage.with_gaps.tolist() == [0]
    assert coverage.gap(0) == Box((0, (1 << 40) - 1), (1 << 39, 1))


def test_a_gap_among_many_overlapping_boxes_is_found_in_bounded_time() -> None:
    n, dice = 3000, np.random.default_rng(1)
    offset, size = dice.integers(0, 1000, (n, 3)), dice.integers(1, 400, (n, 3))
    coverage = Coverage(np.zeros(n, dtype=np.intp), offset, size, np.array([[1400, 1400, 1400]]))
    assert coverage.with_gaps.tolist() == [0]


def test_one_overlap_among_very_many_boxes_is_found_soon() -> None:
    side = 200
    offset = np.array(list(product(range(side), range(side))))
    size = np.ones_like(offset)
    size[-2, 1] = 2
    coverage = Coverage(np.zeros(len(offset), dtype=np.intp), offset, size, np.array([[side, side]]))
    assert coverage.overlaps == {0: (side * side - 2, side * side - 1)}
