"""Finds boxes of one group that overlap. It is exact, and needs no loop over groups for the usual shapes.

This is geometry on columns. For ``coverage`` the groups are tensors and the boxes their chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["first_overlap"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_NO_LINE = np.iinfo(np.int64).max


def first_overlap(group: Int32, offset: Int64, size: Int64) -> tuple[int, int] | None:
    """Two boxes of one group that overlap; ``None`` if there are none.

    Args:
        group: int32 ``[n]``, ascending.
        offset, size: int64 ``[n, D]``; no size is 0. Within each group they are sorted by offsets, and no two offsets
            are equal.

    Returns:
        The places of the two boxes, from the first group that has such boxes.
    """
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    counts = np.diff(np.append(starts, len(group)))
    several = counts > 1
    if not several.any():
        return None
    cut = _cut_dimensions(offset, size, starts)
    along_one = _overlap_along_one(group, offset, size, starts, counts, several & (cut.sum(axis=1) == 1), cut)
    in_plane = _overlap_in_several(group, offset, size, starts, counts, several & (cut.sum(axis=1) > 1))
    return min((found for found in (along_one, in_plane) if found is not None), default=None)


def _cut_dimensions(offset: Int64, size: Int64, starts: npt.NDArray[np.intp]) -> Bool:
    """bool ``[groups, D]``: in which dimensions the boxes of a group differ."""
    cut = np.zeros((len(starts), offset.shape[1]), dtype=np.bool_)
    for column in (offset, size):
        cut |= np.maximum.reduceat(column, starts) != np.minimum.reduceat(column, starts)
    return cut


def _overlap_along_one(
    group: Int32,
    offset: Int64,
    size: Int64,
    starts: npt.NDArray[np.intp],
    counts: npt.NDArray[np.intp],
    chosen: Bool,
    cut: Bool,
) -> tuple[int, int] | None:
    """Check groups that are cut along one dimension. In the order of offsets, each box must end before the next
    begins."""
    if not chosen.any():
        return None
    rows = np.flatnonzero(np.repeat(chosen, counts))
    dim = np.repeat(cut.argmax(axis=1), counts)[rows]
    begin, length = offset[rows, dim], size[rows, dim]
    clash = np.flatnonzero((group[rows[1:]] == group[rows[:-1]]) & (begin[1:] < begin[:-1] + length[:-1]))
    return (int(rows[clash[0]]), int(rows[clash[0] + 1])) if len(clash) else None


def _overlap_in_several(
    group: Int32,
    offset: Int64,
    size: Int64,
    starts: npt.NDArray[np.intp],
    counts: npt.NDArray[np.intp],
    chosen: Bool,
) -> tuple[int, int] | None:
    """Check groups that are cut along several dimensions. On a grid nothing overlaps; the others are swept."""
    if not chosen.any():
        return None
    rows = np.flatnonzero(np.repeat(chosen, counts))
    off_grid = _crosses_a_line(group[rows], offset[rows], size[rows])
    # Number the groups anew, because `group` may have gaps.
    number = np.repeat(np.arange(len(starts)), counts)[rows]
    for each in np.unique(number[off_grid]).tolist():
        begin, end = int(starts[each]), int(starts[each] + counts[each])
        found = _sweep(offset[begin:end], size[begin:end])
        if found is not None:
            return begin + found[0], begin + found[1]
    return None


def _crosses_a_line(group: Int32, offset: Int64, size: Int64) -> Bool:
    """For each box, whether in some dimension it reaches beyond the next offset at which a box of its group begins.

    Boxes that do not, and that have different offsets, cannot overlap. Each is a cell, or a part of a cell, of the grid
    that all offsets form.
    """
    crosses = np.zeros(len(group), dtype=np.bool_)
    for dim in range(offset.shape[1]):
        order = np.lexsort((offset[:, dim], group))
        of_group, begin = group[order], offset[order, dim]
        # For each box, find the next line of its group, by looking from the back.
        is_last_of_line = np.append((of_group[1:] != of_group[:-1]) | (begin[1:] != begin[:-1]), True)
        last = np.flatnonzero(is_last_of_line)
        following = np.append(begin[1:], _NO_LINE)
        following[np.append(of_group[1:] != of_group[:-1], True)] = _NO_LINE
        line = np.repeat(following[last], np.diff(np.append(-1, last)))
        crosses[order] |= begin + size[order, dim] > line
    return crosses


def _sweep(offset: Int64, size: Int64) -> tuple[int, int] | None:
    """Two boxes that overlap, found by a sweep along the dimension with the most lines."""
    dim = int(np.argmax([len(np.unique(offset[:, d])) for d in range(offset.shape[1])]))
    order = np.argsort(offset[:, dim], kind="stable")
    active = order[:0]
    end = offset + size
    for current in order.tolist():
        active = active[end[active, dim] > offset[current, dim]]
        hit = ((offset[active] < end[current]) & (offset[current] < end[active])).all(axis=1)
        if hit.any():
            return int(active[hit][0]), int(current)
        active = np.append(active, current)
    return None
