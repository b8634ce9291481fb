"""Which replicas may be written where the state dicts say that one of them counts: Megatron's rule, on columns.

Stock Megatron writes the main replica of a shard (``replica_id`` 0). Its fully parallel save first moves the write to
one of the ranks of the data parallel group in which the main replica lies. Copies in other groups have drifted from it
in real jobs, so a checkpoint that mixed them would be none that any rank ever held. Called by ``writers``; decides
nothing where replicas are equal by contract, as in plain DCP.
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
    """The same groups with only the rows that may be written.

    Of a chunk with one main replica these are the rows of the ranks that are peers of the main replica's rank
    (``StructureTable.peers``), itself among them. Of several main replicas the one of the lowest rank counts. Without
    a main replica every row is left: whoever holds the chunk may save it, and so it is not lost.

    Returns:
        (the groups, for each whether it has a main replica).
    """
    replica = columns.replica[groups.order]
    if not replica.any():
        return groups, np.zeros(len(groups), dtype=np.bool_)
    group = groups.of
    mains = np.flatnonzero(replica == Replica.MAIN)
    n_mains = np.bincount(group[mains], minlength=len(groups))
    main = np.full(len(groups), -1, dtype=np.intp)
    main[group[mains[::-1]]] = mains[::-1]  # the first of each: rows of a group ascend by rank
    team = _teams(columns)[columns.rank[groups.order]]
    is_kept: Mask = team == team[main[group]]
    is_kept[n_mains[group] > 1] = False
    is_kept[main[n_mains > 1]] = True
    is_kept[n_mains[group] == 0] = True
    sizes = np.bincount(group[is_kept], minlength=len(groups))
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
    return Replicas(order=groups.order[is_kept], starts=starts), n_mains > 0


def _teams(columns: GlobalColumns) -> npt.NDArray[np.intp]:
    """For each rank a number that it shares with its peers. A rank without peers has one of its own."""
    numbers: dict[tuple[int, ...], int] = {}
    teams = [numbers.setdefault(table.peers or (-1 - rank,), len(numbers)) for rank, table in enumerate(columns.tables)]
    return np.array(teams, dtype=np.intp)


def contested_rows(columns: GlobalColumns, groups: Replicas) -> Rows:
    """Rows of main replicas of chunks that have more than one."""
    group = groups.of
    is_main = columns.replica[groups.order] == Replica.MAIN
    n_mains = np.bincount(group[is_main], minlength=len(groups))
    rows: Rows = groups.order[is_main & (n_mains[group] > 1)]
    return rows


def unclaimed_groups(columns: GlobalColumns, groups: Replicas) -> Rows:
    """Groups whose ranks all say that the main replica is elsewhere."""
    is_copy = columns.replica[groups.order] == Replica.COPY
    n_copies = np.bincount(groups.of[is_copy], minlength=len(groups))
    return np.flatnonzero((n_copies > 0) & (n_copies == np.diff(groups.starts)))


def deal_as_megatron(columns: GlobalColumns, groups: Replicas, dealt: Rows) -> Rows:
    """The row of each of some groups that ``FullyParallelSaveStrategyWrapper`` of Megatron-Core would write.

    This is ``distribute_shards_to_ranks`` of its ``exchange_utils``, for all parallelization groups at once: chunks
    that the fewest ranks hold come first, of these the largest, of these the first by key and offset; each goes to the
    rank that has the fewest bytes so far, of these to the lowest. The same rule, and not just any fair one, so that
    the very copies are saved that stock would save.

    Args:
        groups: as :func:`may_write` leaves them.
        dealt: numbers of the groups, ascending.
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
    """For each row of ``holders`` the column of the rank that gets it; ``load`` is brought up to date.

    Args:
        holders: int32 ``[n, count]``, ranks ascending in each row.
        weights: bytes of each row.
        load: bytes of each rank so far.
    """
    count = holders.shape[1]
    if count == 1:
        for rank, weight in zip(holders[:, 0].tolist(), weights, strict=True):
            load[rank] += weight
        return [0] * len(weights)
    first, which = unique_rows(*holders.T)
    sets = holders[first]
    if len(np.unique(sets)) < sets.size:  # a rank is in several of them, so their turns matter to each other
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
