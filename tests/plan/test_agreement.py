"""A cached plan is used only if this very save proves that it holds on every rank; all decide alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from robust_dcp.comm import Agreement, Offer
from robust_dcp.plan.agreed_plan import HAS_PLAN, LEADS, MATCHES, may_reuse, offer_of, sends_structure
from robust_dcp.plan.cache import CachedPlan, PlanCache
from robust_dcp.plan.plan import Gathered, make_plan
from robust_dcp.plan.share import Share
from robust_dcp.plan.structure import StructureTable
from tests.plan.structures import agreement_of, local_of, obj, table, tensor

GROUP = (0, 1, 2)
NO_PLAN = bytes(16)

_MODEL = [table(tensor(f"w{n}", [n + 1]), obj("o")) for n in GROUP]
_EMA = [table(tensor(f"ema{n}", [n + 1]), obj("o")) for n in GROUP]
_GROWN = [table(tensor(f"w{n}", [n + 1]), tensor("new"), obj("o")) for n in GROUP]


def _decided(offers: list[Offer], coordinator: int = 0) -> tuple[bool, tuple[int, ...]]:
    """Whether the plan is reused, and which ranks send their structure if it is not."""
    agreement = agreement_of(offers)
    if may_reuse(agreement, coordinator):
        return True, ()
    return False, tuple(rank for rank, own in enumerate(offers) if sends_structure(agreement, own, coordinator))


@dataclass
class _Job:
    """Three ranks with a cache each; ``save`` is a save that commits."""

    caches: list[PlanCache] = field(default_factory=lambda: [PlanCache() for _ in GROUP])
    coordinator: int = 0

    def offers(self, tables: list[StructureTable]) -> list[Offer]:
        found = []
        for rank, cache in enumerate(self.caches):
            local = local_of(tables[rank], ranks=GROUP)
            plan = cache.find(GROUP, local.signature.value) or cache.latest(GROUP)
            found.append(offer_of(plan, local, leads=rank == self.coordinator))
        return found

    def save(self, tables: list[StructureTable]) -> tuple[bool, tuple[int, ...]]:
        decided = _decided(self.offers(tables), self.coordinator)
        locals_ = [local_of(structure, ranks=GROUP) for structure in tables]
        gathered = Gathered.of([local.to_message() for local in locals_], None, locals_[0])
        plan, _, _ = make_plan(gathered, None, locals_[0])
        for rank, (local, cache) in enumerate(zip(locals_, self.caches, strict=True)):
            share = Share(plan.plan_id, plan.kept[rank], None)
            whole = plan if rank == self.coordinator else None
            cache.put(GROUP, CachedPlan(share, local.signature.value, local.table, whole))
        return decided


def test_the_first_save_builds_and_the_second_reuses() -> None:
    job = _Job()
    assert job.save(_MODEL) == (False, GROUP)
    assert job.save(_MODEL) == (True, ())


def test_models_that_alternate_are_both_reused() -> None:
    job = _Job()
    for tables in (_MODEL, _EMA):
        job.save(tables)
    assert all(job.save(tables)[0] for tables in (_MODEL, _EMA, _MODEL, _EMA))


@pytest.mark.parametrize("changed", [(0,), (1,), (2,), (0, 2), (1, 2), GROUP])
def test_ranks_that_changed_send_and_the_others_do_not(changed: tuple[int, ...]) -> None:
    job = _Job()
    job.save(_MODEL)
    tables = [(_GROWN if rank in changed else _MODEL)[rank] for rank in GROUP]
    assert job.save(tables) == (False, changed)
    assert job.save(tables)[0]


@pytest.mark.parametrize(("lost", "senders"), [(0, GROUP), (1, (1,)), (2, (2,))])
def test_a_rank_that_lost_its_plans_sends_its_structure_again(lost: int, senders: tuple[int, ...]) -> None:
    job = _Job()
    job.save(_MODEL)
    job.caches[lost].clear()
    assert job.save(_MODEL) == (False, senders)
    assert job.save(_MODEL)[0]


def test_another_coordinator_than_rank_0_reuses_its_plan_and_hears_from_all_where_it_cannot() -> None:
    """What travels in the agreement is the plan that rank 0 offers: unless it is offered by all, all send."""
    job = _Job(coordinator=2)
    job.save(_MODEL)
    assert job.save(_MODEL)[0]
    for lost in GROUP:
        job.caches[lost].clear()
        assert job.save(_MODEL) == (False, GROUP)
        assert job.save(_MODEL)[0]
    assert job.save([_MODEL[0], _GROWN[1], _MODEL[2]]) == (False, (1,))


def test_a_coordinator_that_did_not_make_the_plan_hears_from_all() -> None:
    job = _Job()
    job.save(_MODEL)
    job.coordinator = 1
    assert job.save(_MODEL) == (False, GROUP)


def test_ranks_that_offer_other_decisions_for_the_same_structures_do_not_reuse() -> None:
    job = _Job()
    job.save(_MODEL)
    good = job.offers(_MODEL)
    assert _decided(good)[0]
    assert _decided([good[0], replace(good[1], plan_id=b"other decisions!"), good[2]]) == (False, (1,))


def test_a_rank_offers_its_latest_plan_but_says_that_it_does_not_match() -> None:
    local = local_of(_GROWN[0], ranks=GROUP)
    assert offer_of(None, local, leads=True, mark=5) == Offer(flags=LEADS, told=5)
    job = _Job()
    job.save(_MODEL)
    latest = job.caches[0].latest(GROUP)
    assert latest is not None
    assert job.offers(_GROWN)[0] == Offer(plan_id=latest.plan_id, flags=LEADS | HAS_PLAN)


@st.composite
def _offers_of_all(draw: st.DrawFn) -> list[Offer]:
    """Offers of which many are nearly those of a plan that holds."""
    n_ranks = draw(st.integers(1, 9))
    usual = Offer(plan_id=draw(st.sampled_from([b"p" * 16, b"p" * 16, b"p" * 16, NO_PLAN])), flags=MATCHES)
    offers = [usual] * n_ranks
    holder = draw(st.integers(0, n_ranks - 1))
    offers[holder] = replace(offers[holder], flags=MATCHES | HAS_PLAN)
    for rank in draw(st.sets(st.integers(0, n_ranks - 1), max_size=2)):
        plan_id = draw(st.sampled_from([usual.plan_id, NO_PLAN, b"q" * 16]))
        offers[rank] = Offer(plan_id=plan_id, flags=draw(st.integers(0, 7)))
    return offers


@settings(max_examples=500)
@given(_offers_of_all(), st.data())
def test_whatever_is_offered_a_plan_is_used_only_where_it_is_proven(offers: list[Offer], data: st.DataObject) -> None:
    coordinator = data.draw(st.sampled_from([0, 0, len(offers) - 1, len(offers) // 2]))
    is_reused, senders = _decided(offers, coordinator)
    base = offers[coordinator].plan_id
    is_whole = bool(offers[coordinator].flags & HAS_PLAN) and base != NO_PLAN
    earlier = [rank for rank, offer in enumerate(offers[:coordinator]) if offer.flags & HAS_PLAN]
    fitting = [rank for rank, offer in enumerate(offers) if offer.plan_id == base and offer.flags & MATCHES]
    assert is_reused == (is_whole and not earlier and len(fitting) == len(offers))
    for rank in set(range(len(offers))).difference(senders):
        # Whose structure is not sent shows that the coordinator has it already.
        assert is_whole
        assert rank in fitting
    assert bool(senders) != is_reused
    event(f"reused={is_reused}, all send={len(senders) == len(offers)}")


def test_all_ranks_read_the_same_from_the_bytes_that_came_down() -> None:
    job = _Job()
    job.save(_MODEL)
    offers = job.offers([_MODEL[0], _GROWN[1], _MODEL[2]])
    agreement = agreement_of(offers)
    received = Agreement.decode(agreement.encode())
    assert received == agreement
    assert [sends_structure(received, own, 0) for own in offers] == [False, True, False]
