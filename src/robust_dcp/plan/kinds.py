"""Which plan a changed structure is compared with: the last one of the same kind.

Example: a job saves a model and a data loader in turn. They are two kinds. The model has not changed just because the
loader was saved in between. Plans are of one kind if the caller gave them one name (``kind=``), or if one was made from
the other. A structure is of the kind with which it has most names in common. This module owns what ranks say about that
and the coordinator's choice; ``agreed_plan`` exchanges it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.plan.cache import CachedPlan, GroupKey, PlanCache
from robust_dcp.plan.structure import StructureTable

__all__ = ["ChosenBase", "KindVote", "choose_base", "kind_of", "vote"]

_NAMED = "="
"""The prefix of kinds that the caller has named. Other kinds have the identity of their first plan as a name."""


class KindVote(msgspec.Struct, frozen=True):
    """What one rank knows of the last plan of each kind.

    Attributes:
        plans: the identities of these plans.
        in_common: for each plan, how many names this rank held in it and still holds.
        n_before: for each plan, how many names this rank held in it.
        n_now: how many names this rank holds now.
    """

    plans: tuple[bytes, ...]
    in_common: tuple[int, ...]
    n_before: tuple[int, ...]
    n_now: int


class ChosenBase(msgspec.Struct, frozen=True):
    """The coordinator's choice: the plan to compare with, and its kind. Both are empty if there is no plan of this
    kind."""

    plan_id: bytes = b""
    kind: str = ""


def kind_of(named: str | None, plan_id: bytes, base: str) -> str:
    """The kind of a plan: the caller's name for it, else the kind of the plan it was made from, else a new kind."""
    return f"{_NAMED}{named}" if named is not None else base or plan_id.hex()


def vote(cache: PlanCache, group: GroupKey, named: str | None, table: StructureTable) -> KindVote:
    """What this rank says. The coordinator only needs the sums over all ranks."""
    plans = {plan.plan_id: plan for plan in _candidates(cache, group, named).values()}
    names = set(table.names)
    return KindVote(
        plans=tuple(plans),
        in_common=tuple(len(names.intersection(plan.table.names)) for plan in plans.values()),
        n_before=tuple(len(plan.table.names) for plan in plans.values()),
        n_now=len(names),
    )


def choose_base(
    cache: PlanCache, group: GroupKey, named: str | None, votes: Sequence[KindVote | None]
) -> ChosenBase | None:
    """Choose the plan to compare with, among those that the coordinator has whole; ``None`` if none is of this kind.

    Without a name from the caller, it is the plan that has most names in common with the structure. They must be half
    of the names of the larger of the two, or nearly all of the smaller. So a structure that grew is still of its kind,
    and one that shares only a step counter is not. A name counts once for each rank that holds it. A rank that no
    longer knows a plan says nothing about it.
    """
    sums: dict[bytes, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(3, dtype=np.int64))
    for each in filter(None, votes):
        for plan_id, *counts in zip(each.plans, each.in_common, each.n_before, strict=True):
            sums[plan_id] += (*counts, each.n_now)
    best, most = None, 0
    for kind, plan in _candidates(cache, group, named).items():
        if plan.coordinator is None:
            continue
        if kind.startswith(_NAMED):
            return ChosenBase(plan.plan_id, kind)
        shared, n_before, n_now = sums[plan.plan_id].tolist()
        is_alike = 2 * shared >= max(n_before, n_now) or 10 * shared >= 9 * min(n_before, n_now)
        if shared > most and is_alike:
            best, most = ChosenBase(plan.plan_id, kind), shared
    return best


def _candidates(cache: PlanCache, group: GroupKey, named: str | None) -> dict[str, CachedPlan]:
    """The last plan of each kind, latest first. If the caller's kind has a plan, only that; else all unnamed kinds."""
    plans = cache.last_of_each_kind(group)
    kind = kind_of(named, b"", "")
    if named is not None and kind in plans:
        return {kind: plans[kind]}
    return {kind: plan for kind, plan in plans.items() if not kind.startswith(_NAMED)}
