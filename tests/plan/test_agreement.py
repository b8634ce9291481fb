"""A cached plan is used only if this very save proves that it holds on every rank; all decide alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from robust_dcp.comm import Agreement, Offer, combined_signature
from robust_dcp.plan.agreement import (
    HAS_GLOBAL_PLAN,
    LEADS,
    MATCHES,
    Decision,
    coordinator_of,
    decide,
    is_settled,
    make_offer,
)
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan, PlanCache
from robust_dcp.plan.global_plan import combined_digest
from robust_dcp.plan.rank_plan import RankPlan
from robust_dcp.plan.structure import ItemKind, StructureTable
from tests.plan.structures import agreement_of, local_of, obj, table, tensor

GROUP = (0, 1, 2)
EVERYONE = (0, 1, 2)
NO_PLAN = bytes(16)

_MODEL = [table(tensor("w", [n + 1]), obj("o")) for n in GROUP]
_EMA = [table(tensor("ema", [n + 1]), obj("o")) for n in GROUP]
_GROWN = [table(tensor("w", [n + 1]), tensor("new"), obj("o")) for n in GROUP]


@dataclass(frozen=True)
class _Verdict:
    """What all ranks decided: the same, but for who sends."""

    reuse: bool
    base: bytes | None
    senders: tuple[int, ...]
    objects_differ: bool


def _decided(offers: list[Offer], coordinator: int = 0) -> _Verdict:
    agreement = agreement_of(offers)
    decisions = [decide(agreement, own, coordinator) for own in offers]
    (alike,) = {replace(decision, sends=False) for decision in decisions}
    senders = tuple(rank for rank, decision in enumerate(decisions) if decision.sends)
    return _Verdict(alike.reuse, alike.base, senders, alike.objects_differ)


@dataclass
class _Job:
    """Three ranks with a cache each; ``save`` is a save that commits."""

    caches: list[PlanCache] = field(default_factory=lambda: [PlanCache() for _ in GROUP])
    coordinator: int = 0

    def offers(self, tables: list[StructureTable], digests: list[int] | None = None) -> list[Offer]:
        return [
            make_offer(
                cache,
                GROUP,
                local_of(tables[rank], digests and [digests[rank]], ranks=GROUP),
                leads=rank == self.coordinator,
            )[0]
            for rank, cache in enumerate(self.caches)
        ]

    def save(self, tables: list[StructureTable]) -> _Verdict:
        offers = self.offers(tables)
        verdict = _decided(offers, coordinator_of(agreement_of(offers), otherwise=0))
        signatures = tuple(offer.signature for offer in offers)
        for rank, (structure, cache) in enumerate(zip(tables, self.caches, strict=True)):
            objects = np.flatnonzero(structure.kinds == ItemKind.BYTES)
            plan = RankPlan(np.arange(len(structure)), objects, None)
            kept = CoordinatorPlan((), signatures, (), (), 0, b"", None) if rank == self.coordinator else None
            plan_id = combined_signature(signatures)
            cache.put(GROUP, CachedPlan(plan_id, signatures[rank], structure, plan, None, kept))
        return verdict


def test_the_first_save_builds_and_the_second_reuses() -> None:
    job = _Job()
    assert job.save(_MODEL) == _Verdict(reuse=False, base=None, senders=EVERYONE, objects_differ=False)
    verdict = job.save(_MODEL)
    assert (verdict.reuse, verdict.senders) == (True, ())
    assert verdict.base == job.offers(_MODEL)[0].plan_id


def test_models_that_alternate_are_both_reused() -> None:
    job = _Job()
    for tables in (_MODEL, _EMA):
        job.save(tables)
    assert all(job.save(tables).reuse for tables in (_MODEL, _EMA, _MODEL, _EMA))


@pytest.mark.parametrize("changed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_ranks_that_changed_send_and_the_others_do_not(changed: tuple[int, ...]) -> None:
    job = _Job()
    job.save(_MODEL)
    base = job.offers(_MODEL)[0].plan_id
    tables = [(_GROWN if rank in changed else _MODEL)[rank] for rank in GROUP]
    verdict = job.save(tables)
    assert (verdict.reuse, verdict.base, verdict.senders) == (False, base, changed)
    assert job.save(tables).reuse


def test_if_all_ranks_changed_all_send_and_the_change_is_told_from_the_last_plan() -> None:
    job = _Job()
    job.save(_MODEL)
    base = job.offers(_MODEL)[0].plan_id
    verdict = job.save(_GROWN)
    assert (verdict.reuse, verdict.base, verdict.senders) == (False, base, EVERYONE)
    assert job.save(_GROWN).reuse


def test_a_coordinator_that_lost_its_cache_builds_anew() -> None:
    job = _Job()
    job.save(_MODEL)
    job.caches[0].clear()
    verdict = job.save(_MODEL)
    assert (verdict.reuse, verdict.base, verdict.senders) == (False, None, EVERYONE)
    assert job.save(_MODEL).reuse


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_lost_its_cache_sends_its_structure_again(lost: int) -> None:
    job = _Job()
    job.save(_MODEL)
    job.caches[lost].clear()
    verdict = job.save(_MODEL)
    assert not verdict.reuse
    assert verdict.base is not None
    assert verdict.senders == (lost,)
    assert job.save(_MODEL).reuse


def test_another_coordinator_than_rank_0_reuses_its_plan_and_builds_anew_where_it_cannot() -> None:
    """What travels in the agreement is the plan that rank 0 offers: unless it is offered by all, all send."""
    job = _Job(coordinator=2)
    job.save(_MODEL)
    assert job.save(_MODEL).reuse
    for lost in GROUP:
        job.caches[lost].clear()
        verdict = job.save(_MODEL)
        assert (verdict.reuse, verdict.base, verdict.senders) == (False, None, EVERYONE)
        assert job.save(_MODEL).reuse


def test_another_coordinator_than_rank_0_has_changes_told_from_the_plan_that_all_offer() -> None:
    job = _Job(coordinator=2)
    job.save(_MODEL)
    base = job.offers(_MODEL)[0].plan_id
    verdict = job.save([_MODEL[0], _GROWN[1], _MODEL[2]])
    assert (verdict.reuse, verdict.base, verdict.senders) == (False, base, (1,))


def test_a_coordinator_that_did_not_make_the_plan_builds_its_own() -> None:
    job = _Job()
    job.save(_MODEL)
    job.coordinator = 1
    verdict = job.save(_MODEL)
    assert (verdict.reuse, verdict.base, verdict.senders) == (False, None, EVERYONE)


def test_a_rank_whose_last_save_did_not_commit_is_not_reused() -> None:
    """Rank 1 did not put the grown plan into its cache: it offers the old one."""
    job = _Job()
    job.save(_MODEL)
    kept = job.caches[1]
    job.caches[1] = PlanCache()
    job.save(_GROWN)
    job.caches[1] = kept
    verdict = job.save(_GROWN)
    assert (verdict.reuse, verdict.senders) == (False, (1,))
    assert verdict.base is not None


def test_a_plan_whose_hash_is_not_that_of_the_signatures_shown_is_never_reused() -> None:
    job = _Job()
    job.save(_MODEL)
    good = job.offers(_MODEL)
    assert _decided(good).reuse
    forged = [good[0], replace(good[1], signature=bytes(16)), good[2]]
    verdict = _decided(forged)
    assert (verdict.reuse, verdict.base, verdict.senders) == (False, good[0].plan_id, EVERYONE)
    other = [replace(offer, plan_id=b"its 16 bytes are") for offer in good]
    assert not _decided(other).reuse
    assert _decided(other).senders == EVERYONE


def test_objects_that_differ_are_noticed_when_a_plan_is_reused() -> None:
    job = _Job()
    job.save(_MODEL)
    assert not _decided(job.offers(_MODEL, [5, 5, 5])).objects_differ
    assert _decided(job.offers(_MODEL, [5, 6, 5])).objects_differ
    assert not _decided(job.offers(_MODEL, [5, 0, 5])).objects_differ  # 0 is unknown
    assert job.offers(_MODEL, [5, 5, 5])[0].value == combined_digest(np.array([5], dtype=np.uint64))


def test_a_rank_offers_its_latest_plan_but_says_that_it_does_not_match() -> None:
    cache = PlanCache()
    offer, plan = make_offer(cache, GROUP, local_of(_MODEL[0], ranks=GROUP), leads=True)
    assert (offer.flags, offer.plan_id, offer.value, plan) == (LEADS, NO_PLAN, 0, None)
    job = _Job()
    job.save(_MODEL)
    offer, plan = make_offer(job.caches[0], GROUP, local_of(_GROWN[0], ranks=GROUP), leads=False)
    assert plan is not None
    assert offer.plan_id == plan.plan_id
    assert offer.flags == HAS_GLOBAL_PLAN


def test_no_plan_is_offered_for_files_of_another_writer() -> None:
    job = _Job()
    job.save(_MODEL)
    local = local_of(_MODEL[0], ranks=GROUP, files=None)
    assert make_offer(job.caches[0], GROUP, local, leads=True) == (
        Offer(signature=local.signature.value, flags=LEADS),
        None,
    )


@st.composite
def _offers_of_all(draw: st.DrawFn) -> list[Offer]:
    """Offers of which many are nearly those of a plan that holds."""
    n_ranks = draw(st.integers(1, 9))
    signatures = draw(st.lists(st.sampled_from([bytes(16), b"1" * 16, b"2" * 16]), min_size=n_ranks, max_size=n_ranks))
    proven = combined_signature(signatures)
    usual = Offer(plan_id=draw(st.sampled_from([proven, proven, proven, NO_PLAN, b"p" * 16])), value=1, flags=MATCHES)
    offers = [replace(usual, signature=signature) for signature in signatures]
    holder = draw(st.integers(0, n_ranks - 1))
    offers[holder] = replace(offers[holder], flags=MATCHES | HAS_GLOBAL_PLAN)
    for rank in draw(st.sets(st.integers(0, n_ranks - 1), max_size=2)):
        offers[rank] = Offer(
            signature=draw(st.sampled_from([signatures[rank], b"3" * 16])),
            plan_id=draw(st.sampled_from([proven, usual.plan_id, NO_PLAN, b"q" * 16])),
            value=draw(st.integers(0, 2)),
            flags=draw(st.integers(0, 7)),
        )
    return offers


def _naive(offers: list[Offer], coordinator: int) -> _Verdict:
    """The decision of one who sees all offers."""
    plan_ids = {offer.plan_id for offer in offers}
    base = offers[coordinator].plan_id
    holders = [rank for rank, offer in enumerate(offers) if offer.flags & HAS_GLOBAL_PLAN]
    is_told = len(plan_ids) == 1 or coordinator == 0  # what the coordinator offers is known to all
    if base == NO_PLAN or holders[:1] != [coordinator] or not is_told:
        return _Verdict(reuse=False, base=None, senders=tuple(range(len(offers))), objects_differ=False)
    fitting = [rank for rank, offer in enumerate(offers) if offer.plan_id == base and offer.flags & MATCHES]
    if len(fitting) < len(offers):
        senders = tuple(rank for rank in range(len(offers)) if rank not in fitting)
        return _Verdict(reuse=False, base=base, senders=senders, objects_differ=False)
    if combined_signature([offer.signature for offer in offers]) != base:
        return _Verdict(reuse=False, base=base, senders=tuple(range(len(offers))), objects_differ=False)
    differ = len({offer.value for offer in offers if offer.value}) > 1
    return _Verdict(reuse=True, base=base, senders=(), objects_differ=differ)


@settings(max_examples=500)
@given(_offers_of_all(), st.data())
def test_the_decision_over_an_agreement_is_that_of_one_who_sees_all_offers(
    offers: list[Offer], data: st.DataObject
) -> None:
    coordinator = data.draw(st.sampled_from([0, 0, len(offers) - 1, len(offers) // 2]))
    verdict = _decided(offers, coordinator)
    assert verdict == _naive(offers, coordinator)
    event(f"reuse={verdict.reuse}, base={verdict.base is not None}")


@settings(max_examples=300)
@given(_offers_of_all(), st.data())
def test_whatever_is_offered_a_plan_is_used_only_where_it_is_proven(offers: list[Offer], data: st.DataObject) -> None:
    coordinator = data.draw(st.integers(0, len(offers) - 1))
    verdict = _decided(offers, coordinator)
    base = offers[coordinator].plan_id
    if verdict.reuse:
        assert base != NO_PLAN
        assert offers[coordinator].flags & HAS_GLOBAL_PLAN
        assert all(offer.plan_id == base and offer.flags & MATCHES for offer in offers)
        assert combined_signature([offer.signature for offer in offers]) == base
    assert verdict.base in (None, base)
    for rank, offer in enumerate(offers):
        if rank not in verdict.senders:
            # Whose structure is not sent shows that the coordinator has it already.
            assert offer.plan_id == base
            assert offer.flags & MATCHES
            assert offers[coordinator].flags & HAS_GLOBAL_PLAN
    assert bool(verdict.senders) != verdict.reuse


@given(_offers_of_all())
def test_ranks_agree_on_the_kind_first_unless_the_plan_holds_or_nobody_has_any(offers: list[Offer]) -> None:
    agreement = agreement_of(offers)
    decision = decide(agreement, offers[-1], 0)
    assert is_settled(decision, agreement) == (decision.reuse or {offer.plan_id for offer in offers} == {NO_PLAN})


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 19))
def test_the_one_rank_that_was_told_to_lead_leads_and_of_several_none(leads: list[bool], otherwise: int) -> None:
    otherwise %= len(leads)
    agreement = agreement_of([Offer(flags=LEADS if each else 0) for each in leads])
    expected = leads.index(True) if leads.count(True) == 1 else otherwise
    assert coordinator_of(agreement, otherwise) == expected


def test_all_ranks_read_the_same_decision_from_the_bytes_that_came_down() -> None:
    job = _Job()
    job.save(_MODEL)
    offers = job.offers([_MODEL[0], _GROWN[1], _MODEL[2]])
    agreement = agreement_of(offers)
    received = Agreement.decode(agreement.encode())
    assert received == agreement
    assert decide(received, offers[1], 0) == Decision(reuse=False, base=offers[0].plan_id, sends=True)
