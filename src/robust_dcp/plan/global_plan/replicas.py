"""Who holds the same: items of all ranks that name one chunk, in groups.

Runs on the coordinator, on columns; which of a group is written is ``writers``'s.
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
        order: int64 ``[K]``, rows sorted by (name, offsets, rank); rows that are left out, as those of dropped empty
            chunks, are not there.
        starts: int64 ``[G + 1]``, group ``g`` is ``order[starts[g]:starts[g + 1]]``; its first row has the lowest rank.
    """

    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def of(self) -> npt.NDArray[np.intp]:
        """int64 ``[K]``: the number of the group of each row of ``order``."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def first(self) -> npt.NDArray[np.intp]:
        """The row of the lowest rank of each group."""
        return self.order[self.starts[:-1]]


def find_replicas(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> Replicas:
    """Group the items that name the same chunk.

    DCP keys a chunk by (FQN, offsets), ``MetadataIndex``. An empty chunk may share its offsets with one that is not
    empty (uneven shards); it holds nothing, so it is left out.

    Args:
        order: the rows sorted by (name, offsets, rank).

    Raises:
        PlanConflict: if two chunks that are not empty begin at the same offsets but have different sizes.
    """
    order = order[~_shadowed_empties(columns, order)]
    starts = np.flatnonzero(_differs_from_previous(columns, order))
    groups = Replicas(order=order, starts=np.append(starts, len(order)))
    _refuse_other_sizes(columns, groups)
    return groups


def _differs_from_previous(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Whether each row of ``order`` has another (name, offsets) than the row before it."""
    differs = np.ones(len(order), dtype=np.bool_)
    differs[1:] = False
    for column in (columns.name, *columns.offset.T):
        values = column[order]  # each is looked up once: `order` jumps from rank to rank
        differs[1:] |= values[1:] != values[:-1]
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
