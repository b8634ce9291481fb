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
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.global_plan.overlap import first_overlap
from robust_dcp.plan.structure import ItemKind

__all__ = ["check_bounds", "check_coverage"]

Rows = npt.NDArray[np.intp]


def check_bounds(columns: GlobalColumns) -> None:
    """Check that every chunk lies within its tensor.

    Raises:
        PlanConflict: a chunk does not. The error names key and rank of the first one.
    """
    outside = (columns.offset < 0) | (columns.size < 0) | (columns.size > columns.shape - columns.offset)
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        key, rank = columns.names[columns.name[row]], int(columns.rank[row])
        raise PlanConflict(
            f"a chunk of {key!r} on rank {rank} lies outside the tensor: {columns.describe(row)}",
            key=key,
            ranks=[rank],
        )


def check_coverage(columns: GlobalColumns, kept: Rows, *, complete: bool) -> None:
    """Check the kept chunks (rows of ``columns``, sorted by name and offsets, all within bounds).

    Args:
        complete: whether gaps are errors. Stock lets a single process save only its part of a sharded tensor.

    Raises:
        PlanConflict: chunks overlap or leave gaps. The error names key and ranks.
    """
    rows = kept[columns.kind[kept] != ItemKind.BYTES]
    filled = rows[columns.numel[rows] > 0]
    clash = first_overlap(columns.name[filled], columns.offset[filled], columns.size[filled])
    if clash is not None:
        raise _overlap(columns, int(filled[clash[0]]), int(filled[clash[1]]))
    if complete and len(rows):
        _check_gaps(columns, rows)


def _check_gaps(columns: GlobalColumns, rows: Rows) -> None:
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


def _overlap(columns: GlobalColumns, left: int, right: int) -> PlanConflict:
    key = columns.names[columns.name[left]]
    return PlanConflict(
        f"chunks of {key!r} overlap: rank {columns.rank[left]} holds {columns.describe(left)}, rank "
        f"{columns.rank[right]} holds {columns.describe(right)}; each element must be saved once",
        key=key,
        ranks=sorted({int(columns.rank[left]), int(columns.rank[right])}),
    )
