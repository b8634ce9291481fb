"""Checks that the chunks of each tensor fill it exactly: nothing twice, nothing missing, nothing outside.

Chunks cover a tensor exactly if they are inside its bounds, do not overlap, and their volumes add up to that of the
tensor. So overlap is the costly question. Tensors that are cut along one dimension are decided on the columns of all
tensors at once. So are tensors with chunks that lie between the lines of a grid. Only the others are swept, tensor by
tensor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict, ranks_in_words
from robust_dcp.plan.items import ItemKind, Items

__all__ = ["check_bounds", "check_coverage", "first_overlap"]

Rows = npt.NDArray[np.intp]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_NO_LINE = np.iinfo(np.int64).max


def check_bounds(items: Items) -> None:
    """Check that every chunk lies within its tensor.

    Raises:
        PlanConflict: a chunk does not. The error names key and rank of the first one.
    """
    outside = (items.offset < 0) | (items.size < 0) | (items.size > items.shape - items.offset)
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        key, rank = items.names[items.name[row]], int(items.rank[row])
        raise PlanConflict(
            f"a chunk of {key!r} on rank {rank} lies outside the tensor: {items.describe(row)}",
            key=key,
            ranks=[rank],
        )


def check_coverage(items: Items, kept: Rows, *, complete: bool) -> None:
    """Check the kept chunks (rows of ``items``, sorted by name and offsets, all within bounds).

    Args:
        complete: whether gaps are errors. Stock lets a single process save only its part of a sharded tensor.

    Raises:
        PlanConflict: chunks overlap or leave gaps. The error names key and ranks.
    """
    rows = kept[items.kind[kept] != ItemKind.BYTES]
    filled = rows[items.numel[rows] > 0]
    clash = first_overlap(items.name[filled], items.offset[filled], items.size[filled])
    if clash is not None:
        raise _overlap(items, int(filled[clash[0]]), int(filled[clash[1]]))
    if complete and len(rows):
        _check_gaps(items, rows)


def _check_gaps(items: Items, rows: Rows) -> None:
    starts = np.flatnonzero(np.diff(items.name[rows], prepend=-1))
    volumes = np.add.reduceat(items.numel[rows], starts)
    expected = items.shape[rows[starts]].prod(axis=1, dtype=np.int64)
    short = np.flatnonzero(volumes != expected)
    if not len(short):
        return
    worst = int(short[0])
    end = starts[worst + 1] if worst + 1 < len(starts) else len(rows)
    group = rows[starts[worst] : end]
    key, ranks = items.names[items.name[group[0]]], sorted(set(items.rank[group].tolist()))
    more = f" ({len(short) - 1} more tensors have gaps too)" if len(short) > 1 else ""
    raise PlanConflict(
        f"the chunks of {key!r} leave gaps: {volumes[worst]} of {expected[worst]} elements are there, from "
        f"{ranks_in_words(ranks)}{more}. A rank of the group did not pass its shard: pass it, or save with the "
        "process group that holds the whole tensor",
        key=key,
        ranks=ranks,
    )


def _overlap(items: Items, left: int, right: int) -> PlanConflict:
    key = items.names[items.name[left]]
    return PlanConflict(
        f"chunks of {key!r} overlap: rank {items.rank[left]} holds {items.describe(left)}, rank "
        f"{items.rank[right]} holds {items.describe(right)}; each element must be saved once",
        key=key,
        ranks=sorted({int(items.rank[left]), int(items.rank[right])}),
    )


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
