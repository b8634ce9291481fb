"""Whether a cached plan still holds on every rank: decided by each rank alone, and alike, from the same bytes.

Owns the offer a rank makes, and the decision over what all offers add up to. Pure; the exchange itself is ``comm``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from robust_dcp.comm import Agreement, Offer
from robust_dcp.plan.cache import CachedPlan, GroupKey, PlanCache
from robust_dcp.plan.global_plan import combined_digest
from robust_dcp.plan.local import LocalStructure

__all__ = ["Decision", "PlanOutcome", "coordinator_of", "decide", "is_settled", "make_offer", "offer_of"]

PlanOutcome = Literal["built", "reused", "patched", "rebuilt"]

MATCHES = 1
"""Flag of an offer: the structure is the one that the offered plan was made for."""

HAS_GLOBAL_PLAN = 2
"""Flag of an offer: this rank was the coordinator of the offered plan, and has all of it."""

LEADS = 4
"""Flag of an offer: whoever called the save made this rank its coordinator."""

_NO_PLAN = Offer().plan_id


@dataclass(frozen=True)
class Decision:
    """What to do about the plan.

    Attributes:
        reuse: nothing has changed anywhere.
        base: the plan that holds, or from which the change is told; ``None`` when building from nothing.
        sends: whether this rank has to send its structure: it is not the one that ``base`` was made for.
        objects_differ: whether replicated objects have other contents on some ranks, as far as digests tell.
    """

    reuse: bool
    base: bytes | None
    sends: bool
    objects_differ: bool = False


def make_offer(
    cache: PlanCache, group: GroupKey, local: LocalStructure, *, leads: bool
) -> tuple[Offer, CachedPlan | None]:
    """What this rank says of itself, and the cached plan that it offers (not necessarily one that fits)."""
    plan = None
    if local.files is not None:
        # Nothing tells us whether another storage writer committed its checkpoint, so no plan is ever kept for it.
        plan = cache.find(group, local.signature.value) or cache.latest(group)
    return offer_of(plan, local, leads=leads), plan


def offer_of(plan: CachedPlan | None, local: LocalStructure, *, leads: bool) -> Offer:
    """What this rank says of itself and of ``plan``."""
    signature = local.signature.value
    flags = LEADS if leads else 0
    if plan is None:
        return Offer(signature=signature, flags=flags)
    digest = 0
    if plan.signature == signature:
        flags |= MATCHES
        digest = combined_digest(local.digests_of(plan.rank_plan.common_objects))
    if plan.coordinator is not None:
        flags |= HAS_GLOBAL_PLAN
    return Offer(signature=signature, plan_id=plan.plan_id, value=digest, flags=flags)


def is_settled(decision: Decision, agreement: Agreement) -> bool:
    """Whether ``decision`` stands: the plan holds, or no rank has any that could be of another kind.

    Else ranks have to agree on the kind first: one that holds the same in two kinds, or nothing, cannot tell them
    apart by itself.
    """
    return decision.reuse or (agreement.same_plan_id and agreement.plan_id == _NO_PLAN)


def coordinator_of(agreement: Agreement, otherwise: int) -> int:
    """The rank that plans and commits: the one that was told so, if just one was.

    Stock ``save`` tells one rank, not always rank 0; with ``no_dist=True`` it tells all.
    """
    leader = agreement.first_rank(LEADS)
    return leader if leader is not None and agreement.count(LEADS) == 1 else otherwise


def decide(agreement: Agreement, own: Offer, coordinator_rank: int) -> Decision:
    """What follows from what all ranks offer.

    A plan is reused only if every rank offers it, says that its structure matches, and the plan's identity is the
    hash of exactly the signatures that were just shown. Otherwise what has changed is told from the plan that rank 0
    offers, if it is the coordinator and has all of it.

    Args:
        agreement: of all ranks, under a tree whose root is rank 0.
        own: what this rank offered.
    """
    base = agreement.plan_id
    is_known = agreement.same_plan_id or coordinator_rank == 0
    if base == _NO_PLAN or not is_known or agreement.first_rank(HAS_GLOBAL_PLAN) != coordinator_rank:
        return Decision(reuse=False, base=None, sends=True)
    if agreement.same_plan_id and agreement.all_have(MATCHES):
        if agreement.signature == base:
            return Decision(reuse=True, base=base, sends=False, objects_differ=not agreement.same_value)
        return Decision(reuse=False, base=base, sends=True)
    return Decision(reuse=False, base=base, sends=own.plan_id != base or not own.flags & MATCHES)
