"""Which plan a changed structure is compared with: the last one of the same kind, where a job saves several in turn.

A model and a data loader are two kinds: neither has changed because the other was saved in between. Plans are of one
kind if the caller gave them one name (``kind=``), or if one was made from the other; a structure is of the kind with
which it has most names in common. Owns what ranks say of that and the coordinator's choice; ``session`` exchanges it.
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
"""Before a kind that the caller has named: the others are called after their first plan."""


class KindVote(msgspec.Struct, frozen=True):
    """What one rank knows of the last plan of each kind.

    Attributes:
        plans: their identities.
        in_common: for each the names that this rank held in it and holds now.
        n_before: for each the names that it held.
        n_now: the names that it holds.
    """

    plans: tuple[bytes, ...]
    in_common: tuple[int, ...]
    n_before: tuple[int, ...]
    n_now: int


class ChosenBase(msgspec.Struct, frozen=True):
    """The coordinator's choice: the plan to compare with, and its kind; both empty if there is none of this kind."""

    plan_id: bytes = b""
    kind: str = ""


def kind_of(named: str | None, plan_id: bytes, base: str) -> str:
    """The kind of a plan: as the caller named it, that of the plan that it was made from, or one of its own."""
    return f"{_NAMED}{named}" if named is not None else base or plan_id.hex()


def vote(cache: PlanCache, group: GroupKey, named: str | None, table: StructureTable) -> KindVote:
    """What this rank says; sums over ranks are all that is needed of it."""
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
    """The plan to compare with, of those that the coordinator has all of; ``None`` if there is none of this kind.

    By names, it is the plan with most in common, if that is half of the names of the larger of the two, or nearly all
    of the smaller: what grew is still the same, and what shares but a step counter is another. Names count once for
    each rank that holds them; a rank that does not know a plan any more says nothing of it.
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
    """By kind: the last plan of the one that is named; else those of all that nobody has named, the latest first."""
    plans = cache.last_of_each_kind(group)
    kind = kind_of(named, b"", "")
    if named is not None and kind in plans:
        return {kind: plans[kind]}
    return {kind: plan for kind, plan in plans.items() if not kind.startswith(_NAMED)}
