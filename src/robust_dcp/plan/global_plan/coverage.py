"""Whether the chunks of each tensor fill it exactly: nothing twice, nothing missing, nothing outside.

Pure checks over the kept chunks. Chunks inside the bounds that do not overlap and whose volumes add up to that of
the tensor cover it exactly, so the costly question is overlap: tensors cut along one dimension and regular grids
are decided on columns, the rest by a sweep.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.global_plan.conflicts import ranks_in_words
from robust_dcp.plan.structure import ItemKind

__all__ = ["check_coverage"]

Rows = npt.NDArray[np.intp]


def check_coverage(columns: GlobalColumns, kept: Rows, *, complete: bool) -> None:
    """Check the kept chunks (rows of ``columns``, sorted by name).

    Args:
        complete: whether gaps are errors; a single process may save its part of a sharded tensor, as stock allows.

    Raises:
        PlanConflict: naming key and ranks, for a chunk out of bounds, for overlap, and for gaps.
    """
    rows = kept[columns.kind[kept] != ItemKind.BYTES]
    _check_bounds(columns, rows)
    rows = rows[columns.numel[rows] > 0]
    names = columns.name[rows]
    starts = np.flatnonzero(np.diff(names, prepend=-1))
    counts = np.diff(np.append(starts, len(rows)))
    for begin, count in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        _check_overlap(columns, rows[begin : begin + count])
    if complete:
        _check_gaps(columns, kept)


def _check_bounds(columns: GlobalColumns, rows: Rows) -> None:
    offset, size, shape = columns.offset[rows], columns.size[rows], columns.shape[rows]
    outside = ((offset < 0) | (size < 0) | (size > shape - offset)).any(axis=1)
    if outside.any():
        row = int(rows[np.flatnonzero(outside)[0]])
        key, rank = columns.names[columns.name[row]], int(columns.rank[row])
        raise PlanConflict(
            f"a chunk of {key!r} on rank {rank} lies outside the tensor: {columns.describe(row)}",
            key=key,
            ranks=[rank],
        )


def _check_gaps(columns: GlobalColumns, kept: Rows) -> None:
    rows = kept[columns.kind[kept] != ItemKind.BYTES]
    if not len(rows):
        return
    starts = np.flatnonzero(np.diff(columns.name[rows], prepend=-1))
    volumes = np.add.reduceat(columns.numel[rows], starts)
    expected = columns.shape[rows[starts]].prod(axis=1, dtype=np.int64)
    short = np.flatnonzero(volumes != expected)
    if not len(short):
        return
    worst = int(short[0])
    end = starts[worst + 1] if worst + 1 < len(starts) else len(rows)
    group = rows[starts[worst] : end]
    key, ranks = columns.names[columns.name[group[0]]], sorted(set(columns.rank[group].tolist()))
    more = f" ({len(short) - 1} more tensors have gaps too)" if len(short) > 1 else ""
    raise PlanConflict(
        f"the chunks of {key!r} leave gaps: {volumes[worst]} of {expected[worst]} elements are there, from "
        f"{ranks_in_words(ranks)}{more}. A rank of the group did not pass its shard: pass it, or save with the "
        "process group that holds the whole tensor",
        key=key,
        ranks=ranks,
    )


def _check_overlap(columns: GlobalColumns, rows: Rows) -> None:
    """``rows`` are the chunks of one tensor, none empty."""
    offset, size = columns.offset[rows], columns.size[rows]
    cut = np.flatnonzero((offset != offset[0]).any(axis=0) | (size != size[0]).any(axis=0))
    if len(cut) == 1:
        order = np.argsort(offset[:, cut[0]], kind="stable")
        ends = (offset + size)[order, cut[0]]
        clash = np.flatnonzero(offset[order[1:], cut[0]] < ends[:-1])
        if len(clash):
            raise _overlap(columns, int(rows[order[clash[0]]]), int(rows[order[clash[0] + 1]]))
        return
    if _is_grid(offset, size):
        return
    for left, right in _sweep(offset, size):
        raise _overlap(columns, int(rows[left]), int(rows[right]))


def _is_grid(offset: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> bool:
    """Whether chunks with distinct offsets are cells of one grid: then they cannot overlap."""
    for dim in range(offset.shape[1]):
        cuts, cell = np.unique(offset[:, dim], return_inverse=True)
        ends = np.append(cuts[1:], np.iinfo(np.int64).max)
        if (offset[:, dim] + size[:, dim] > ends[cell]).any():
            return False
    return True


def _sweep(offset: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Pairs of chunks that overlap, by a sweep along the dimension with the most cuts."""
    dim = int(np.argmax([len(np.unique(offset[:, d])) for d in range(offset.shape[1])]))
    order = np.argsort(offset[:, dim], kind="stable")
    active = order[:0]
    end = offset + size
    for current in order.tolist():
        active = active[end[active, dim] > offset[current, dim]]
        hit = ((offset[active] < end[current]) & (offset[current] < end[active])).all(axis=1)
        for other in active[hit].tolist():
            yield other, current
        active = np.append(active, current)


def _overlap(columns: GlobalColumns, left: int, right: int) -> PlanConflict:
    key = columns.names[columns.name[left]]
    return PlanConflict(
        f"chunks of {key!r} overlap: rank {columns.rank[left]} holds {columns.describe(left)}, rank "
        f"{columns.rank[right]} holds {columns.describe(right)}; each element must be saved once",
        key=key,
        ranks=sorted({int(columns.rank[left]), int(columns.rank[right])}),
    )
