"""Chooses who saves what: one item of each group of replicas, so that bytes are spread over the ranks that hold them.

This module balances ranks if any of them may write; ``main_replicas`` decides the other cases. It runs on the
coordinator, on columns. Groups that the same ranks hold (a data parallel group's share of the model) are distributed
together, so the work does not grow with groups times ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.global_plan.differing import SMALL_NBYTES
from robust_dcp.plan.global_plan.main_replicas import deal_as_megatron, may_write
from robust_dcp.plan.global_plan.replicas import Replicas
from robust_dcp.plan.structure import ItemKind
from robust_dcp.storage.layouts.balance import deal

__all__ = ["by_holders", "choose_writers"]

_OBJECT_WEIGHT = 1
"""How many bytes an object counts for. Its size is not known when the plan is made."""

Rows = npt.NDArray[np.intp]


def choose_writers(columns: GlobalColumns, groups: Replicas, *, lowest_rank: bool) -> Rows:
    """The row of each group that is written: int64 ``[G]``, in the order of the groups.

    A chunk goes to one of the least loaded ranks that hold it (in bytes of chunks). Objects and small chunks go to the
    lowest rank that holds them, so that of values that differ between ranks it is known which one is saved. With
    ``lowest_rank`` everything does. Chunks that few ranks hold are assigned first; chunks that many ranks hold then
    fill the gaps. If the state dicts say which replica counts, Megatron's rule decides
    (:mod:`~robust_dcp.plan.global_plan.main_replicas`).
    """
    groups, has_main = may_write(columns, groups)
    chosen = groups.first.copy()
    counts = np.diff(groups.starts)
    is_object = columns.kind[groups.first] == ItemKind.BYTES
    is_small = is_object | (columns.nbytes[groups.first] <= SMALL_NBYTES)
    fixed = (counts == 1) | is_small | lowest_rank
    load = np.zeros(len(columns.tables), dtype=np.int64)
    weight = np.where(is_object, _OBJECT_WEIGHT, columns.nbytes[groups.first])
    if has_main.any() and not lowest_rank:
        dealt = np.flatnonzero(has_main & ~is_object)
        chosen[dealt] = deal_as_megatron(columns, groups, dealt)
        fixed[dealt] = True
    np.add.at(load, columns.rank[chosen[fixed]], weight[fixed])
    for members, ranks in by_holders(columns.rank[groups.order], groups.starts, np.flatnonzero(~fixed)):
        writer, load[ranks] = deal(weight[members], load[ranks])
        chosen[members] = groups.order[groups.starts[members] + writer]
    return chosen


def by_holders(
    ranks: npt.NDArray[np.int32], starts: Rows, groups: Rows
) -> Iterator[tuple[Rows, npt.NDArray[np.int32]]]:
    """Yield groups of replicas by the ranks that hold them: (groups, ranks ascending), the fewest ranks first.

    Args:
        ranks: int32 ``[K]``, the rank of each replica, ascending within a group.
        starts: int64 ``[G + 1]``, group ``g`` is ``ranks[starts[g]:starts[g + 1]]``.
        groups: the groups to yield.
    """
    counts = np.diff(starts)[groups]
    for count in np.unique(counts).tolist():
        members = groups[counts == count]
        holders = ranks[starts[members][:, None] + np.arange(count)]
        # Ranks ascend within a group, so equal rows are equal sets.
        order = np.lexsort(holders.T[::-1])
        cuts = np.flatnonzero((holders[order[1:]] != holders[order[:-1]]).any(axis=1)) + 1
        for same in np.split(order, cuts):
            yield members[same], holders[same[0]]
