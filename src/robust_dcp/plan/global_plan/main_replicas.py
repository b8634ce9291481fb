"""Megatron's rule for which replica to write, on columns. It applies if the state dicts say which replica counts.

Stock Megatron writes the main replica of a shard (``replica_id`` 0). Its fully parallel save first moves the write to
one of the ranks in the main replica's data parallel group. In real jobs, copies in other groups have drifted from it. A
checkpoint that mixed them would be one that no rank ever held. ``writers`` calls this module. It decides nothing if
replicas are equal by contract, as in plain DCP.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.global_plan.replicas import Replicas
from robust_dcp.plan.structure import Replica
from robust_dcp.plan.structure.ragged import unique_rows

__all__ = ["contested_rows", "deal_as_megatron", "may_write", "unclaimed_groups"]

Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def may_write(columns: GlobalColumns, groups: Replicas) -> tuple[Replicas, Mask]:
    """The same groups, with only the rows that may be written.

    If a chunk has one main replica, these are the rows of that replica's rank and of its peers
    (``StructureTable.peers``). If it has several main replicas, only that of the lowest rank is left. If it has none,
    every row is left: any rank that holds the chunk may save it, so that it is not lost.

    Returns:
        The groups, and for each group whether it has a main replica.
    """
    replica = columns.replica[groups.order]
    if not replica.any():
        return groups, np.zeros(len(groups), dtype=np.bool_)
    group = groups.of
    mains = np.flatnonzero(replica == Replica.MAIN)
    n_mains = np.bincount(group[mains], minlength=len(groups))
    main = np.full(len(groups), -1, dtype=np.intp)
    main[group[mains[::-1]]] = mains[::-1]  # this leaves the first of each group, since its rows ascend by rank
    team = _teams(columns)[columns.rank[groups.order]]
    is_kept: Mask = team == team[main[group]]
    is_kept[n_mains[group] > 1] = False
    is_kept[main[n_mains > 1]] = True
    is_kept[n_mains[group] == 0] = True
    sizes = np.bincount(group[is_kept], minlength=len(groups))
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
    return Replicas(order=groups.order[is_kept], starts=starts), n_mains > 0


def _teams(columns: GlobalColumns) -> npt.NDArray[np.intp]:
    """For each rank a number that it shares with its peers. A rank without peers has a number of its own."""
    numbers: dict[tuple[int, ...], int] = {}
    teams = [numbers.setdefault(table.peers or (-1 - rank,), len(numbers)) for rank, table in enumerate(columns.tables)]
    return np.array(teams, dtype=np.intp)


def contested_rows(columns: GlobalColumns, groups: Replicas) -> Rows:
    """The rows of main replicas in groups that have more than one."""
    group = groups.of
    is_main = columns.replica[groups.order] == Replica.MAIN
    n_mains = np.bincount(group[is_main], minlength=len(groups))
    rows: Rows = groups.order[is_main & (n_mains[group] > 1)]
    return rows


def unclaimed_groups(columns: GlobalColumns, groups: Replicas) -> Rows:
    """Groups in which every rank says that the main replica is elsewhere."""
    is_copy = columns.replica[groups.order] == Replica.COPY
    n_copies = np.bincount(groups.of[is_copy], minlength=len(groups))
    return np.flatnonzero((n_copies > 0) & (n_copies == np.diff(groups.starts)))


def deal_as_megatron(columns: GlobalColumns, groups: Replicas, dealt: Rows) -> Rows:
    """For each of some groups, the row that Megatron-Core's ``FullyParallelSaveStrategyWrapper`` would write.

    This is ``distribute_shards_to_ranks`` of its ``exchange_utils``, for all parallelization groups at once. Chunks
    that the fewest ranks hold come first, among these the largest, among these the first by key and offset. Each chunk
    goes to the rank with the fewest bytes so far, or to the lowest of several. We use this rule, and not just any fair
    one, so that the same copies are saved as by stock Megatron.

    Args:
        groups: the groups that :func:`may_write` returned.
        dealt: the numbers of the wanted groups, ascending.
    """
    load = [0] * len(columns.tables)
    chosen = groups.first[dealt].copy()
    weights = columns.nbytes[groups.first[dealt]]
    counts = np.diff(groups.starts)[dealt]
    for count in np.unique(counts).tolist():
        members = np.flatnonzero(counts == count)
        members = members[np.argsort(-weights[members], kind="stable")]
        rows = groups.order[groups.starts[dealt[members]][:, None] + np.arange(count)]
        holders = columns.rank[rows]
        which = _assign(holders, weights[members].tolist(), load)
        chosen[members] = rows[np.arange(len(members)), which]
    return chosen


def _assign(holders: npt.NDArray[np.int32], weights: list[int], load: list[int]) -> list[int]:
    """For each row of ``holders``, the column of the rank that gets the chunk. ``load`` is updated.

    Args:
        holders: int32 ``[n, count]``, ranks ascending in each row.
        weights: the bytes of each row.
        load: the bytes of each rank so far.
    """
    count = holders.shape[1]
    if count == 1:
        for rank, weight in zip(holders[:, 0].tolist(), weights, strict=True):
            load[rank] += weight
        return [0] * len(weights)
    first, which = unique_rows(*holders.T)
    sets = holders[first]
    if len(np.unique(sets)) < sets.size:  # a rank is in several sets, so the order between sets matters
        return _assign_one_by_one(holders.tolist(), weights, load)
    ranks = sets.tolist()
    heaps = [[(load[rank], column) for column, rank in enumerate(row)] for row in ranks]
    for heap in heaps:
        heapq.heapify(heap)
    chosen = []
    for number, weight in zip(which.tolist(), weights, strict=True):
        filled, column = heaps[number][0]
        heapq.heapreplace(heaps[number], (filled + weight, column))
        chosen.append(column)
    for row, heap in zip(ranks, heaps, strict=True):
        for filled, column in heap:
            load[row[column]] = filled
    return chosen


def _assign_one_by_one(holders: list[list[int]], weights: list[int], load: list[int]) -> list[int]:
    chosen = []
    for row, weight in zip(holders, weights, strict=True):
        column = min(range(len(row)), key=lambda column: (load[row[column]], column))
        load[row[column]] += weight
        chosen.append(column)
    return chosen
