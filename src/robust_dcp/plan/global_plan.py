"""Makes the global plan on the coordinator: which rank writes which of its items.

The checks that ranks do not contradict each other come first, then one item of each group of replicas is chosen, so
that bytes are spread over the ranks that hold them. The result follows from the items of the ranks alone, so every
coordinator makes the same plan of them. All of it runs on columns. Groups that the same ranks hold (a data parallel
group's share of the model) are distributed together, so the work does not grow with groups times ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.items import ItemKind, Items, Replica, distinct, merged
from robust_dcp.plan.conflicts import (
    SMALL_NBYTES,
    check_bounds,
    check_coverage,
    differs_from_previous,
    overlap,
    refuse_contradictions,
)
from robust_dcp.storage.layouts.places import deal

Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_OBJECT_WEIGHT: Final = 1
"""How many bytes an object counts for. Its size is not known when the plan is made."""


class GlobalPlan(msgspec.Struct, frozen=True, eq=False):
    """Which rank writes what.

    Attributes:
        ranks: the items of each rank.
        items: those of all ranks, sorted by (name, offsets, rank).
        written: the rows of ``items`` that are written, ascending.
        place: intp ``[G]``, for each of ``written`` its place if they come rank after rank.
        kept: for each rank bool ``[n]``, which of its items it writes.
        contested: the rows that several ranks claim as their main replica.
        unclaimed: names with a chunk that has copies but no main replica.
    """

    ranks: tuple[Items, ...]
    items: Items
    written: Rows
    place: Rows
    kept: tuple[Mask, ...]
    contested: Rows
    unclaimed: tuple[str, ...] = ()


def make_global_plan(ranks: Sequence[Items], *, lowest_rank: bool = False) -> GlobalPlan:
    """Deduplicate replicas, balance the rest, and check that every tensor is saved exactly once.

    Args:
        ranks: the items of each rank, in rank order.
        lowest_rank: give every replica to the lowest rank that holds it (``dedup_save_to_lowest_rank``).

    Raises:
        PlanConflict: the ranks contradict each other. The error names the key and the ranks.
    """
    check_bounds(ranks)
    items = merged(ranks)
    order = order_of(items)
    items = items.take(order)
    refuse_contradictions(items)
    claims = _claims_of(items, _find_replicas(items), ranks)
    written = _choose_writers(items, claims, len(ranks), lowest_rank=lowest_rank)
    check_coverage(items, written, complete=len(ranks) > 1)
    is_written = np.zeros(len(items), dtype=np.bool_)  # rank after rank, each in the order of its items
    is_written[order[written]] = True
    return GlobalPlan(
        ranks=tuple(ranks),
        items=items,
        written=written,
        place=(np.cumsum(is_written) - 1)[order[written]],
        kept=tuple(np.split(is_written, np.cumsum([len(each) for each in ranks])[:-1])),
        contested=claims.contested,
        unclaimed=tuple(items.names[name] for name in sorted(set(items.name[claims.unclaimed].tolist()))),
    )


def order_of(items: Items) -> Rows:
    """The order of the items of all ranks, which come rank after rank, by (name, offsets, rank).

    Offsets are in one sorted table, so the sort has one key for any number of dimensions.
    """
    key = items.name.astype(np.int64) * len(items.sizes) + items.offset
    return np.argsort(key, kind="stable")  # rows are in the order of ranks


class _Replicas(msgspec.Struct, frozen=True, eq=False):
    """Rows of :class:`Items` in groups that hold the same chunk.

    Attributes:
        order: int64 ``[K]``, rows sorted by (name, offsets, rank). Some rows are left out, for example those of empty
            chunks.
        starts: int64 ``[G + 1]``, group ``g`` is ``order[starts[g]:starts[g + 1]]``; its first row has the lowest rank.
    """

    order: Rows
    starts: Rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def first(self) -> Rows:
        """The row of the lowest rank of each group."""
        return self.order[self.starts[:-1]]


def _find_replicas(items: Items) -> _Replicas:
    """Group the items that hold the same chunk.

    DCP identifies a chunk by (FQN, offsets), ``MetadataIndex``. With uneven shards an empty chunk may have the same
    offsets as a chunk that is not empty. It holds nothing, so it is left out.

    Raises:
        PlanConflict: two chunks that are not empty begin at the same offsets but have different sizes.
    """
    order = np.arange(len(items))
    is_empty = (items.numel == 0) & (items.kind != ItemKind.BYTES)
    if is_empty.any():
        group = np.cumsum(differs_from_previous(items, order)) - 1
        is_filled = np.zeros(int(group[-1]) + 1, dtype=np.bool_)
        is_filled[group[~is_empty]] = True
        order = order[~(is_empty & is_filled[group])]
    is_first = differs_from_previous(items, order)
    groups = _Replicas(order=order, starts=np.append(np.flatnonzero(is_first), len(order)))
    others, first = order[~is_first], np.repeat(groups.first, np.diff(groups.starts) - 1)
    differs = (items.size[others] != items.size[first]) & (items.numel[others] != 0)
    if differs.any():
        place = int(np.flatnonzero(differs)[0])
        raise overlap(items, int(first[place]), int(others[place]))
    return groups


class _Claims(msgspec.Struct, frozen=True, eq=False):
    """Which rows may be written, where state dicts say which replica counts.

    Stock Megatron writes the main replica of a shard (``replica_id`` 0). Its fully parallel save first moves the write
    to one of the ranks in the main replica's data parallel group. In real jobs, copies in other groups have drifted
    from it. A checkpoint that mixed them would be one that no rank ever held.

    Attributes:
        groups: the groups, with only the rows that may be written. If a chunk has one main replica, these are the rows
            of that replica's rank and of its peers (``Items.peers``). If it has several main replicas, only that of the
            lowest rank is left. If it has none, every row is left: any rank that holds the chunk may save it, so that
            it is not lost.
        has_main: for each group, whether it has a main replica.
        contested: the rows of main replicas in groups that have more than one.
        unclaimed: the first row of each group in which every rank says that the main replica is elsewhere.
    """

    groups: _Replicas
    has_main: Mask
    contested: Rows
    unclaimed: Rows


def _claims_of(items: Items, groups: _Replicas, ranks: Sequence[Items]) -> _Claims:
    replica = items.replica[groups.order]
    if not replica.any():
        none = np.empty(0, dtype=np.intp)
        return _Claims(groups, np.zeros(len(groups), dtype=np.bool_), none, none)
    # Each rank has a number that it shares with its peers. A rank without peers has a number of its own.
    numbers: dict[tuple[int, ...], int] = {}
    teams = [numbers.setdefault(each.peers or (-1 - rank,), len(numbers)) for rank, each in enumerate(ranks)]
    group = np.repeat(np.arange(len(groups)), np.diff(groups.starts))
    mains = np.flatnonzero(replica == Replica.MAIN)
    n_mains = np.bincount(group[mains], minlength=len(groups))
    n_copies = np.bincount(group[replica == Replica.COPY], minlength=len(groups))
    main = np.full(len(groups), -1, dtype=np.intp)
    main[group[mains[::-1]]] = mains[::-1]  # this leaves the first of each group, since its rows ascend by rank
    team = np.array(teams, dtype=np.intp)[items.rank[groups.order]]
    is_kept: Mask = team == team[main[group]]
    is_kept[n_mains[group] > 1] = False
    is_kept[main[n_mains > 1]] = True
    is_kept[n_mains[group] == 0] = True
    sizes = np.bincount(group[is_kept], minlength=len(groups))
    return _Claims(
        groups=_Replicas(groups.order[is_kept], np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)),
        has_main=n_mains > 0,
        contested=groups.order[mains[n_mains[group[mains]] > 1]],
        unclaimed=groups.first[(n_copies > 0) & (n_copies == np.diff(groups.starts))],
    )


def _choose_writers(items: Items, claims: _Claims, n_ranks: int, *, lowest_rank: bool) -> Rows:
    """The row of each group that is written: int64 ``[G]``, in the order of the groups.

    A chunk goes to one of the least loaded ranks that hold it (in bytes of chunks). Objects and small chunks go to the
    lowest rank that holds them, so that of values that differ between ranks it is known which one is saved. With
    ``lowest_rank`` everything does. Chunks that few ranks hold are assigned first; chunks that many ranks hold then
    fill the gaps. If the state dicts say which replica counts, Megatron's rule decides (:func:`_deal_as_megatron`).
    """
    groups, has_main = claims.groups, claims.has_main
    first = groups.first
    chosen, counts = first.copy(), np.diff(groups.starts)
    is_object, nbytes = items.kind[first] == ItemKind.BYTES, items.nbytes[first]
    is_small = is_object | (nbytes <= SMALL_NBYTES)
    fixed = (counts == 1) | is_small | lowest_rank
    load = np.zeros(n_ranks, dtype=np.int64)
    weight = np.where(is_object, _OBJECT_WEIGHT, nbytes)
    if has_main.any() and not lowest_rank:
        dealt = np.flatnonzero(has_main & ~is_object)
        chosen[dealt] = _deal_as_megatron(items, groups, dealt, n_ranks)
        fixed[dealt] = True
    np.add.at(load, items.rank[chosen[fixed]], weight[fixed])
    for members, ranks in by_holders(items.rank[groups.order], groups.starts, np.flatnonzero(~fixed)):
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
    counts, n_ranks = np.diff(starts)[groups], int(ranks.max(initial=0)) + 1
    for count in np.flatnonzero(np.bincount(counts)).tolist():
        members = groups[counts == count]
        holders = ranks[starts[members][:, None] + np.arange(count)]
        # Ranks ascend within a group, so equal rows are equal sets. Sets are numbered in the order of their ranks.
        n_sets, which = 1, np.zeros(len(members), dtype=np.intp)
        for column in holders.T:
            sets, which = distinct(which * n_ranks + column, n_sets * n_ranks)
            n_sets = len(sets)
        for same in np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1]):
            yield members[same], holders[same[0]]


def _deal_as_megatron(items: Items, groups: _Replicas, dealt: Rows, n_ranks: int) -> Rows:
    """For each of some groups, the row that Megatron-Core's ``FullyParallelSaveStrategyWrapper`` would write.

    This is ``distribute_shards_to_ranks`` of its ``exchange_utils``, for all parallelization groups at once. Chunks
    that the fewest ranks hold come first, among these the largest, among these the first by key and offset. Each chunk
    goes to the rank with the fewest bytes so far, or to the lowest of several. We use this rule, and not just any fair
    one, so that the same copies are saved as by stock Megatron.

    Args:
        groups: with only the rows that may be written.
        dealt: the numbers of the wanted groups, ascending.
    """
    chosen = groups.first
    weights, counts = items.nbytes[chosen[dealt]], np.diff(groups.starts)[dealt]
    alone = counts == 1
    of_alone = np.zeros(n_ranks, dtype=np.int64)
    np.add.at(of_alone, items.rank[chosen[dealt[alone]]], weights[alone])
    load, starts, rank_of_row = of_alone.tolist(), groups.starts.tolist(), items.rank[groups.order].tolist()
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    order = np.lexsort((-weights, counts))[int(alone.sum()) :]
    for group, weight in zip(dealt[order].tolist(), weights[order].tolist(), strict=True):
        ranks = tuple(rank_of_row[starts[group] : starts[group + 1]])
        heap = heaps.get(ranks)
        if heap is None:
            heap = heaps[ranks] = [(load[rank], column) for column, rank in enumerate(ranks)]
            heapq.heapify(heap)
        filled, column = heap[0]
        while filled != load[ranks[column]]:  # another set, which has this rank too, has filled it meanwhile
            heapq.heapreplace(heap, (load[ranks[column]], column))
            filled, column = heap[0]
        load[ranks[column]] += weight
        heapq.heapreplace(heap, (load[ranks[column]], column))
        chosen[group] = groups.order[starts[group] + column]
    return chosen[dealt]
