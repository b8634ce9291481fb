"""Who saves what: replicas are found, one of them is kept, and the bytes are spread over the ranks that hold them.

Owns deduplication and balance; runs on the coordinator, on columns, before coverage is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.structure import ItemKind

__all__ = ["Replicas", "choose_writers", "find_replicas"]

_OBJECT_WEIGHT = 1
"""Bytes that an object counts for: its size is not known when the plan is made."""


@dataclass(frozen=True, eq=False)
class Replicas:
    """Rows of :class:`GlobalColumns` in groups that hold the same chunk.

    Attributes:
        order: int64 ``[K]``, rows sorted by (name, offsets, rank); rows of dropped empty chunks are not there.
        starts: int64 ``[G + 1]``, group ``g`` is ``order[starts[g]:starts[g + 1]]``; its first row has the lowest rank.
    """

    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def first(self) -> npt.NDArray[np.intp]:
        """The row of the lowest rank of each group."""
        return self.order[self.starts[:-1]]


def find_replicas(columns: GlobalColumns) -> Replicas:
    """Group the items that name the same chunk.

    DCP keys a chunk by (FQN, offsets), ``MetadataIndex``. An empty chunk may share its offsets with one that is not
    empty (uneven shards); it holds nothing, so it is left out.

    Raises:
        PlanConflict: if two chunks that are not empty begin at the same offsets but have different sizes.
    """
    offsets = [columns.offset[:, dim] for dim in reversed(range(columns.offset.shape[1]))]
    keys: list[npt.NDArray[Any]] = [columns.rank, *offsets, columns.name]
    order = np.lexsort(keys)
    order = order[~_shadowed_empties(columns, order)]
    starts = np.flatnonzero(_differs_from_previous(columns, order))
    groups = Replicas(order=order, starts=np.append(starts, len(order)))
    _refuse_other_sizes(columns, groups)
    return groups


def _differs_from_previous(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Whether each row of ``order`` has another (name, offsets) than the row before it."""
    differs = np.ones(len(order), dtype=np.bool_)
    differs[1:] = columns.name[order[1:]] != columns.name[order[:-1]]
    differs[1:] |= (columns.offset[order[1:]] != columns.offset[order[:-1]]).any(axis=1)
    return differs


def _shadowed_empties(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Empty chunks whose (name, offsets) a chunk that is not empty has too."""
    empty: npt.NDArray[np.bool_] = (columns.numel[order] == 0) & (columns.kind[order] != ItemKind.BYTES)
    if not empty.any():
        return empty
    group = np.cumsum(_differs_from_previous(columns, order)) - 1
    filled = np.zeros(int(group[-1]) + 1, dtype=np.bool_)
    filled[group[~empty]] = True
    shadowed: npt.NDArray[np.bool_] = empty & filled[group]
    return shadowed


def _refuse_other_sizes(columns: GlobalColumns, groups: Replicas) -> None:
    first = np.repeat(groups.first, np.diff(groups.starts))
    differs = (columns.size[groups.order] != columns.size[first]).any(axis=1) & (columns.numel[groups.order] != 0)
    if not differs.any():
        return
    place = int(np.flatnonzero(differs)[0])
    row, other = int(groups.order[place]), int(first[place])
    key = columns.names[columns.name[row]]
    raise PlanConflict(
        f"chunks of {key!r} overlap: rank {columns.rank[other]} holds {columns.describe(other)}, rank "
        f"{columns.rank[row]} holds {columns.describe(row)}; both begin at the same offsets",
        key=key,
        ranks=sorted({int(columns.rank[other]), int(columns.rank[row])}),
    )


def choose_writers(columns: GlobalColumns, groups: Replicas, *, lowest_rank: bool) -> npt.NDArray[np.intp]:
    """The row of each group that is written: int64 ``[G]``, in the order of the groups.

    A chunk goes to the least loaded (in bytes of chunks) of the ranks that hold it, largest chunks first; an object,
    whose size nobody knows yet, and everything if ``lowest_rank``, to the lowest of them.
    """
    chosen = groups.first.copy()
    counts = np.diff(groups.starts)
    is_object = columns.kind[groups.first] == ItemKind.BYTES
    fixed = (counts == 1) | is_object | lowest_rank
    load = np.zeros(len(columns.tables), dtype=np.int64)
    weight = np.where(is_object, _OBJECT_WEIGHT, columns.nbytes[groups.first])
    np.add.at(load, columns.rank[chosen[fixed]], weight[fixed])
    free = np.flatnonzero(~fixed)
    for group in free[np.argsort(-weight[free], kind="stable")].tolist():
        rows = groups.order[groups.starts[group] : groups.starts[group + 1]]
        ranks = columns.rank[rows]
        best = int(load[ranks].argmin())
        chosen[group] = rows[best]
        load[ranks[best]] += weight[group]
    return chosen
