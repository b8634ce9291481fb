"""Whether a cached plan still holds on every rank: decided by each rank alone, and alike, from the same bytes.

Owns the offer a rank makes and the decision over all offers. Pure; the exchange itself is ``comm``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from robust_dcp.comm import Offer
from robust_dcp.plan.cache import CachedPlan, GroupKey, PlanCache
from robust_dcp.plan.global_plan import combined_digest
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.structure import plan_id_of
from robust_dcp.plan.structure.signature import PLAN_ID_NBYTES

__all__ = ["Decision", "PlanOutcome", "decide", "is_settled", "leaders_among", "make_offer", "offer_of"]

PlanOutcome = Literal["built", "reused", "patched", "rebuilt"]

MATCHES = 1
"""Flag of an offer: the structure is the one that the offered plan was made for."""

HAS_GLOBAL_PLAN = 2
"""Flag of an offer: this rank was the coordinator of the offered plan, and has all of it."""

LEADS = 4
"""Flag of an offer: whoever called the save made this rank its coordinator."""

_NO_PLAN = bytes(PLAN_ID_NBYTES)


@dataclass(frozen=True)
class Decision:
    """What to do about the plan.

    Attributes:
        outcome: ``reused`` (nothing changed anywhere), ``patched`` (some ranks changed: only they send their
            structure), ``rebuilt`` (all ranks changed) or ``built`` (the coordinator has no plan to start from).
        senders: the ranks that send their structure.
        base: the plan that holds, or from which the change is told; ``None`` when building from nothing.
        objects_differ: whether replicated objects have other contents on some ranks, as far as digests tell.
    """

    outcome: PlanOutcome
    senders: tuple[int, ...]
    base: bytes | None
    objects_differ: bool = False


def make_offer(
    cache: PlanCache, group: GroupKey, rank: int, local: LocalStructure, *, leads: bool
) -> tuple[Offer, CachedPlan | None]:
    """What this rank says of itself, and the cached plan that it offers (not necessarily one that fits)."""
    plan = None
    if local.files is not None:
        # Nothing tells us whether another storage writer committed its checkpoint, so no plan is ever kept for it.
        plan = cache.find(group, local.signature.value, rank) or cache.latest(group)
    return offer_of(plan, rank, local, leads=leads), plan


def offer_of(plan: CachedPlan | None, rank: int, local: LocalStructure, *, leads: bool) -> Offer:
    """What this rank says of itself and of ``plan``."""
    signature = local.signature.value
    flags = LEADS if leads else 0
    if plan is None:
        return Offer(signature=signature, plan_id=_NO_PLAN, flags=flags)
    digest = 0
    if plan.signatures[rank] == signature:
        flags |= MATCHES
        digest = combined_digest(local.digests_of(plan.rank_plan.common_objects))
    if plan.coordinator is not None:
        flags |= HAS_GLOBAL_PLAN
    return Offer(signature=signature, plan_id=plan.plan_id, value=digest, flags=flags)


def is_settled(decision: Decision, offers: Sequence[Offer]) -> bool:
    """Whether ``decision`` stands: the plan holds, or no rank has any that could be of another kind.

    Else ranks have to agree on the kind first: one that holds the same in two kinds, or nothing, cannot tell them
    apart by itself.
    """
    return decision.outcome == "reused" or all(offer.plan_id == _NO_PLAN for offer in offers)


def leaders_among(offers: Sequence[Offer]) -> list[int]:
    """The ranks that were told that they are the coordinator.

    Stock ``save`` tells one rank, not always rank 0; with ``no_dist=True`` it tells all.
    """
    return [rank for rank, offer in enumerate(offers) if offer.flags & LEADS]


def decide(offers: Sequence[Offer], coordinator: int) -> Decision:
    """Compare all offers with the coordinator's.

    A plan is reused only if every rank offers it, says that its structure matches, and the plan's identity is the
    hash of exactly the signatures that were just shown.
    """
    everyone = tuple(range(len(offers)))
    base = offers[coordinator].plan_id
    if base == _NO_PLAN or not offers[coordinator].flags & HAS_GLOBAL_PLAN:
        return Decision("built", everyone, None)
    changed = tuple(rank for rank, offer in enumerate(offers) if offer.plan_id != base or not offer.flags & MATCHES)
    if changed == everyone:
        return Decision("rebuilt", everyone, base)
    if changed:
        return Decision("patched", changed, base)
    if plan_id_of([offer.signature for offer in offers]) != base:
        return Decision("rebuilt", everyone, base)
    return Decision("reused", (), base, objects_differ=len({offer.value for offer in offers} - {0}) > 1)
