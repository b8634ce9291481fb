"""Decides whether a cached plan still holds on every rank. Each rank decides alone, from the same bytes, so all agree.

This module makes the offer of a rank, and decides on the combination of all offers. It exchanges nothing itself; the
exchange is in ``comm``.
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
"""Flag of an offer: the rank's structure is the one that the offered plan was made for."""

HAS_GLOBAL_PLAN = 2
"""Flag of an offer: this rank was the coordinator of the offered plan and has the whole plan."""

LEADS = 4
"""Flag of an offer: the caller of the save made this rank the coordinator."""

_NO_PLAN = Offer().plan_id


@dataclass(frozen=True)
class Decision:
    """What to do about the plan.

    Attributes:
        reuse: whether to reuse the plan, because nothing has changed on any rank.
        base: the plan to reuse or to compare the new structures with; ``None`` if there is none.
        sends: whether this rank has to send its structure, because ``base`` was made for another one.
        objects_differ: whether digests show that replicated objects have different contents on some ranks.
    """

    reuse: bool
    base: bytes | None
    sends: bool
    objects_differ: bool = False


def make_offer(
    cache: PlanCache, group: GroupKey, local: LocalStructure, *, leads: bool
) -> tuple[Offer, CachedPlan | None]:
    """Return this rank's offer, and the cached plan that it offers. That plan need not fit the structure."""
    plan = None
    if local.files is not None:
        # Another storage writer does not tell us whether its checkpoint was committed, so its plans are never cached.
        plan = cache.find(group, local.signature.value) or cache.latest(group)
    return offer_of(plan, local, leads=leads), plan


def offer_of(plan: CachedPlan | None, local: LocalStructure, *, leads: bool) -> Offer:
    """This rank's offer of ``plan``."""
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
    """Whether ``decision`` is final: the plan holds, or no rank has any plan.

    Otherwise the ranks first have to agree on the kind of what they save (see :mod:`robust_dcp.plan.kinds`). A rank
    cannot tell the kind alone if it holds the same in two kinds, or nothing.
    """
    return decision.reuse or (agreement.same_plan_id and agreement.plan_id == _NO_PLAN)


def coordinator_of(agreement: Agreement, otherwise: int) -> int:
    """The rank that plans and commits. If the callers made exactly one rank the coordinator, it is that rank.

    Stock ``save`` makes one rank the coordinator, not always rank 0. With ``no_dist=True`` it makes every rank one.
    """
    leader = agreement.first_rank(LEADS)
    return leader if leader is not None and agreement.count(LEADS) == 1 else otherwise


def decide(agreement: Agreement, own: Offer, coordinator_rank: int) -> Decision:
    """Decide from the offers of all ranks.

    A plan is reused only if every rank offers it and says that its structure matches, and if the hash over the
    signatures shown in this exchange is the plan's identity. Otherwise the new structures are compared with the plan
    that rank 0 offers, if the coordinator has the whole of that plan.

    Args:
        agreement: the combined offers of all ranks, under a tree with rank 0 as its root.
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
