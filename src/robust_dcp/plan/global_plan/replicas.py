"""Groups the items of all ranks that hold the same chunk.

It runs on the coordinator, on columns. ``writers`` decides which item of a group is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.structure import ItemKind

__all__ = ["Replicas", "find_replicas"]


@dataclass(frozen=True, eq=False)
class Replicas:
    """Rows of :class:`GlobalColumns` in groups that hold the same chunk.

    Attributes:
        order: int64 ``[K]``, rows sorted by (name, offsets, rank). Some rows are left out, for example those of empty
            chunks.
        starts: int64 ``[G + 1]``, group ``g`` is ``order[starts[g]:starts[g + 1]]``; its first row has the lowest rank.
    """

    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def of(self) -> npt.NDArray[np.intp]:
        """int64 ``[K]``: for each row of ``order`` the number of its group."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def first(self) -> npt.NDArray[np.intp]:
        """The row of the lowest rank of each group."""
        return self.order[self.starts[:-1]]


def find_replicas(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> Replicas:
    """Group the items that hold the same chunk.

    DCP identifies a chunk by (FQN, offsets), ``MetadataIndex``. With uneven shards an empty chunk may have the same
    offsets as a chunk that is not empty. It holds nothing, so it is left out.

    Args:
        order: the rows sorted by (name, offsets, rank).

    Raises:
        PlanConflict: two chunks that are not empty begin at the same offsets but have different sizes.
    """
    order = order[~_shadowed_empties(columns, order)]
    starts = np.flatnonzero(_differs_from_previous(columns, order))
    groups = Replicas(order=order, starts=np.append(starts, len(order)))
    _refuse_other_sizes(columns, groups)
    return groups


def _differs_from_previous(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """For each row of ``order``, whether its (name, offsets) differ from those of the row before it."""
    differs = np.ones(len(order), dtype=np.bool_)
    differs[1:] = False
    for column in (columns.name, *columns.offset.T):
        values = column[order]  # index only once, because `order` jumps from rank to rank
        differs[1:] |= values[1:] != values[:-1]
    return differs


def _shadowed_empties(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """For each row, whether it is an empty chunk with the (name, offsets) of a chunk that is not empty."""
    empty: npt.NDArray[np.bool_] = (columns.numel[order] == 0) & (columns.kind[order] != ItemKind.BYTES)
    if not empty.any():
        return empty
    group = np.cumsum(_differs_from_previous(columns, order)) - 1
    filled = np.zeros(int(group[-1]) + 1, dtype=np.bool_)
    filled[group[~empty]] = True
    shadowed: npt.NDArray[np.bool_] = empty & filled[group]
    return shadowed


def _refuse_other_sizes(columns: GlobalColumns, groups: Replicas) -> None:
    is_other = np.ones(len(groups.order), dtype=np.bool_)
    is_other[groups.starts[:-1]] = False
    others, first = groups.order[is_other], np.repeat(groups.first, np.diff(groups.starts) - 1)
    differs = (columns.size[others] != columns.size[first]).any(axis=1) & (columns.numel[others] != 0)
    if not differs.any():
        return
    place = int(np.flatnonzero(differs)[0])
    row, other = int(others[place]), int(first[place])
    key = columns.names[columns.name[row]]
    raise PlanConflict(
        f"chunks of {key!r} overlap: rank {columns.rank[other]} holds {columns.describe(other)}, rank "
        f"{columns.rank[row]} holds {columns.describe(row)}; both begin at the same offsets",
        key=key,
        ranks=sorted({int(columns.rank[other]), int(columns.rank[row])}),
    )
