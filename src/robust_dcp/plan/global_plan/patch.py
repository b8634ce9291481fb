"""Makes a global plan from the previous one if little has changed: only the names that changed are planned again.

This module finds the items of these names, updates the shares of all ranks, and decides when it is better to plan
everything. It uses the checks and choices of ``make`` on tables with only the changed names. That works because each
check is about one name at a time. ``plan.planning`` calls it on the coordinator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.global_plan.columns import merge_tables
from robust_dcp.plan.global_plan.make import GlobalPlan, Places, make_global_plan, replicated_groups
from robust_dcp.plan.global_plan.order import order_of
from robust_dcp.plan.global_plan.replicas import find_replicas
from robust_dcp.plan.global_plan.writers import load_of
from robust_dcp.plan.structure import StructureTable

__all__ = ["Patch", "Shares", "patch_plan", "shares_of"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
OfRanks = tuple[Places, ...]

_MOST = 4
"""Everything is planned again if more than one in this many items has changed since everything was planned."""

_LEAST = 256
"""A patch counts as at least one in this many items, because what it leaves behind takes memory and time to write."""

_DRIFT = 1.1
"""By which factor the imbalance (largest load over mean load) may grow before everything is planned again."""


@dataclass(frozen=True, eq=False)
class Shares:
    """What is kept of a global plan: the share of each rank, and what is needed to make the next plan from it.

    Attributes:
        tables, kept, common_objects, replicated, n_replicated, nbytes: as in :class:`GlobalPlan`.
        numbers: a number for each name. A plan made from this one has the same numbers, and more for new names.
        names: int32, for each rank the numbers of the names of its table. Ranks with the same names share it.
        load: int64, the load of each rank (:func:`~robust_dcp.plan.global_plan.writers.load_of`).
        imbalance: the largest load divided by the mean, when everything was planned.
        n_patched: how many items were planned since then.
    """

    tables: tuple[StructureTable, ...]
    kept: OfRanks
    common_objects: OfRanks
    replicated: OfRanks
    n_replicated: int
    nbytes: int
    numbers: dict[str, int]
    names: tuple[Int32, ...]
    load: Int64
    imbalance: float
    n_patched: int = 0


@dataclass(frozen=True, eq=False)
class Patch:
    """What a patch has changed.

    Attributes:
        shares: the whole plan.
        names: the names that have changed.
        changed: the plan of these names alone.
        moved: the ranks with items that may be in other places than before, ascending.
    """

    shares: Shares
    names: frozenset[str]
    changed: GlobalPlan
    moved: tuple[int, ...]


def shares_of(plan: GlobalPlan) -> Shares:
    """What is kept of a plan of all names."""
    columns = plan.columns
    load = load_of(columns, plan.written)
    return Shares(
        tables=columns.tables,
        kept=plan.kept,
        common_objects=plan.common_objects,
        replicated=plan.replicated,
        n_replicated=plan.n_replicated,
        nbytes=plan.nbytes,
        numbers={name: number for number, name in enumerate(columns.names)},
        names=columns.name_places,
        load=load,
        imbalance=_imbalance(load),
    )


def patch_plan(
    before: Shares, tables: Sequence[StructureTable], changed: Collection[str], *, lowest_rank: bool
) -> Patch | None:
    """Make the plan for ``tables``. For names that have not changed, it keeps the decisions of ``before``.

    The function returns ``None``, and the caller plans everything again, if one of these holds:

    * More than a quarter of the items has changed since everything was planned.
    * The imbalance (largest load over mean load) has grown by more than 10 % since then, and replicas could be moved.
    * Attributes of the metadata have changed, or the peers of a rank.
    * State dicts say which replica of a changed chunk counts. Megatron's rule needs all chunks together.
    * Some ranks flatten their state dicts and others do not.
    * The ranks contradict each other. Then planning everything raises the error.

    Args:
        before: the previous plan.
        tables: the table of each rank. A rank that has not changed has the same object as in ``before``.
        changed: the names with other items than before on some rank, more, or fewer.
        lowest_rank: as for :func:`make_global_plan`.

    Returns:
        ``None`` if everything has to be planned.
    """
    senders = [rank for rank, table in enumerate(tables) if table is not before.tables[rank]]
    if any(_is_beyond_names(before.tables[rank], tables[rank]) for rank in senders):
        return None
    if len({table.paths is None for table in (*before.tables, *tables) if table.names}) > 1:
        return None
    numbers = dict(before.numbers)
    which = [numbers.setdefault(name, len(numbers)) for name in changed]
    is_changed = np.zeros(len(numbers), dtype=np.bool_)
    is_changed[which] = True
    names = list(before.names)
    for rank in senders:
        own = tables[rank].names
        names[rank] = np.fromiter(map(numbers.__getitem__, own), dtype=np.int32, count=len(own))
    was = _items_called(is_changed, before.tables, before.names)
    now = _items_called(is_changed, tables, names)
    n_items = sum(map(len, tables))
    n_patched = before.n_patched + max(sum(map(len, now)), n_items // _LEAST, 1)
    if n_patched * _MOST > n_items:
        return None
    old = merge_tables([table.taken(items) for table, items in zip(before.tables, was, strict=True)])
    written = np.flatnonzero(
        np.concatenate([_are_kept(*each) for each in zip(was, before.tables, before.kept, strict=True)])
    )
    load = before.load - load_of(old, written)
    some = [table.taken(items) for table, items in zip(tables, now, strict=True)]
    try:
        plan = make_global_plan(some, lowest_rank=lowest_rank, load=load)
    except PlanConflict:  # planning everything raises it too, and its message names the ranks that would write then
        return None
    if old.replica.any() or plan.columns.replica.any():
        return None
    load = load + load_of(plan.columns, plan.written)
    n_replicated = before.n_replicated - int(replicated_groups(old, find_replicas(old, order_of(old))).sum())
    if n_replicated and not lowest_rank and _imbalance(load) > _DRIFT * before.imbalance:
        return None
    concerned = [r for r in range(len(tables)) if r in senders or len(was[r]) or len(now[r])]
    places = {r: _new_places(before.tables[r], was[r], tables[r], now[r]) for r in concerned}

    def carried(old_shares: OfRanks, shares: OfRanks) -> OfRanks:
        found = list(old_shares)
        for rank in concerned if old_shares else ():
            stays = places[rank][old_shares[rank]]
            share = np.sort(np.concatenate([stays[stays >= 0], now[rank][shares[rank]]]))
            if rank in senders or not np.array_equal(share, old_shares[rank]):
                found[rank] = share
        return tuple(found)

    kept = carried(before.kept, plan.kept)
    return Patch(
        shares=Shares(
            tables=tuple(tables),
            kept=kept,
            common_objects=carried(before.common_objects, plan.common_objects),
            replicated=carried(before.replicated, plan.replicated),
            n_replicated=n_replicated + plan.n_replicated,
            nbytes=before.nbytes - int(old.nbytes[written].sum()) + plan.nbytes,
            numbers=numbers,
            names=tuple(names),
            load=load,
            imbalance=before.imbalance,
            n_patched=n_patched,
        ),
        names=frozenset(changed),
        changed=plan,
        moved=tuple(rank for rank in concerned if kept[rank] is not before.kept[rank]),
    )


def _is_beyond_names(before: StructureTable, after: StructureTable) -> bool:
    """Whether anything besides the items of names differs."""
    return before.attributes != after.attributes or before.peers != after.peers


def _items_called(is_wanted: Mask, tables: Sequence[StructureTable], names: Sequence[Int32]) -> list[Places]:
    """For each rank the places of its items with names that are wanted, ascending. ``is_wanted`` is by name number."""
    none: Places = np.empty(0, dtype=np.intp)
    wanted = {id(numbers): is_wanted[numbers] for numbers in names}
    return [
        np.flatnonzero(wanted[id(numbers)][table.name_ids]) if wanted[id(numbers)].any() else none
        for table, numbers in zip(tables, names, strict=True)
    ]


def _are_kept(items: Places, table: StructureTable, kept: Places) -> Mask:
    """For each of ``items``, whether the rank writes it."""
    is_kept = np.zeros(len(table) if len(items) else 0, dtype=np.bool_)
    if len(items):
        is_kept[kept] = True
    return is_kept[items]


def _new_places(old: StructureTable, was: Places, new: StructureTable, now: Places) -> Places:
    """For each item of ``old`` its place in ``new``; -1 for items at ``was``, which are at ``now`` or gone."""
    stays_old, stays_new = np.ones(len(old), dtype=np.bool_), np.ones(len(new), dtype=np.bool_)
    stays_old[was] = stays_new[now] = False
    places: Places = np.full(len(old), -1, dtype=np.intp)
    places[stays_old] = np.flatnonzero(stays_new)
    return places


def _imbalance(load: Int64) -> float:
    return float(load.max(initial=0) / max(float(load.mean()), 1.0)) if len(load) else 1.0
