"""A cached plan is used only if this very save proves that it holds on every rank; all decide alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm import Offer
from robust_dcp.plan.agreement import HAS_GLOBAL_PLAN, MATCHES, Decision, decide, make_offer
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan, PlanCache
from robust_dcp.plan.global_plan import combined_digest
from robust_dcp.plan.rank_plan import RankPlan
from robust_dcp.plan.structure import ItemKind, StructureTable, plan_id_of
from tests.plan.structures import local_of, obj, table, tensor

GROUP = (0, 1, 2)
EVERYONE = (0, 1, 2)

_MODEL = [table(tensor("w", [n + 1]), obj("o")) for n in GROUP]
_EMA = [table(tensor("ema", [n + 1]), obj("o")) for n in GROUP]
_GROWN = [table(tensor("w", [n + 1]), tensor("new"), obj("o")) for n in GROUP]


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
                rank,
                local_of(tables[rank], digests and [digests[rank]], ranks=GROUP),
                leads=rank == self.coordinator,
            )[0]
            for rank, cache in enumerate(self.caches)
        ]

    def save(self, tables: list[StructureTable]) -> Decision:
        offers = self.offers(tables)
        decision = decide(offers, self.coordinator)
        signatures = tuple(offer.signature for offer in offers)
        for rank, (structure, cache) in enumerate(zip(tables, self.caches, strict=True)):
            objects = np.flatnonzero(structure.kinds == ItemKind.BYTES)
            plan = RankPlan(np.arange(len(structure)), objects, None)
            kept = CoordinatorPlan((), (), (), 0, b"", None) if rank == self.coordinator else None
            cache.put(GROUP, CachedPlan(plan_id_of(signatures), signatures, structure, plan, None, kept))
        return decision


def test_the_first_save_builds_and_the_second_reuses() -> None:
    job = _Job()
    assert job.save(_MODEL) == Decision("built", EVERYONE, None)
    decision = job.save(_MODEL)
    assert (decision.outcome, decision.senders) == ("reused", ())
    assert decision.base == job.offers(_MODEL)[0].plan_id


def test_models_that_alternate_are_both_reused() -> None:
    job = _Job()
    for tables in (_MODEL, _EMA):
        job.save(tables)
    assert [job.save(tables).outcome for tables in (_MODEL, _EMA, _MODEL, _EMA)] == ["reused"] * 4


@pytest.mark.parametrize("changed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_ranks_that_changed_send_and_the_others_do_not(changed: tuple[int, ...]) -> None:
    job = _Job()
    job.save(_MODEL)
    base = job.offers(_MODEL)[0].plan_id
    tables = [(_GROWN if rank in changed else _MODEL)[rank] for rank in GROUP]
    assert job.save(tables) == Decision("patched", changed, base)
    assert job.save(tables).outcome == "reused"


def test_if_all_ranks_changed_all_send_and_the_change_is_told_from_the_last_plan() -> None:
    job = _Job()
    job.save(_MODEL)
    base = job.offers(_MODEL)[0].plan_id
    assert job.save(_GROWN) == Decision("rebuilt", EVERYONE, base)
    assert job.save(_GROWN).outcome == "reused"


def test_a_coordinator_that_lost_its_cache_builds_anew() -> None:
    job = _Job()
    job.save(_MODEL)
    job.caches[0].clear()
    assert job.save(_MODEL) == Decision("built", EVERYONE, None)
    assert job.save(_MODEL).outcome == "reused"


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_lost_its_cache_sends_its_structure_again(lost: int) -> None:
    job = _Job()
    job.save(_MODEL)
    job.caches[lost].clear()
    decision = job.save(_MODEL)
    assert (decision.outcome, decision.senders) == ("patched", (lost,))
    assert job.save(_MODEL).outcome == "reused"


def test_another_coordinator_than_rank_0_is_heeded() -> None:
    job = _Job(coordinator=2)
    job.save(_MODEL)
    job.caches[0].clear()
    assert job.save(_MODEL).senders == (0,)
    job.caches[2].clear()
    assert job.save(_MODEL).outcome == "built"


def test_a_rank_whose_last_save_did_not_commit_is_not_reused() -> None:
    """Rank 1 did not put the grown plan into its cache: it offers the old one."""
    job = _Job()
    job.save(_MODEL)
    kept = job.caches[1]
    job.caches[1] = PlanCache()
    job.save(_GROWN)
    job.caches[1] = kept
    decision = job.save(_GROWN)
    assert (decision.outcome, decision.senders) == ("patched", (1,))


def test_a_plan_whose_hash_is_not_that_of_the_signatures_shown_is_never_reused() -> None:
    job = _Job()
    job.save(_MODEL)
    good = job.offers(_MODEL)
    assert decide(good, 0).outcome == "reused"
    forged = [good[0], replace(good[1], signature=bytes(16)), good[2]]
    assert decide(forged, 0) == Decision("rebuilt", EVERYONE, good[0].plan_id)
    other = [replace(offer, plan_id=b"8 bytes!") for offer in good]
    assert decide(other, 0).outcome == "rebuilt"


def test_objects_that_differ_are_noticed_when_a_plan_is_reused() -> None:
    job = _Job()
    job.save(_MODEL)
    assert not decide(job.offers(_MODEL, [5, 5, 5]), 0).objects_differ
    assert decide(job.offers(_MODEL, [5, 6, 5]), 0).objects_differ
    assert job.offers(_MODEL, [5, 5, 5])[0].value == combined_digest(np.array([5], dtype=np.uint64))


def test_a_rank_offers_its_latest_plan_but_says_that_it_does_not_match() -> None:
    cache = PlanCache()
    offer, plan = make_offer(cache, GROUP, 0, local_of(_MODEL[0], ranks=GROUP), leads=True)
    assert (offer.flags & MATCHES, offer.plan_id, offer.value, plan) == (MATCHES * 0, bytes(8), 0, None)
    job = _Job()
    job.save(_MODEL)
    offer, plan = make_offer(job.caches[0], GROUP, 0, local_of(_GROWN[0], ranks=GROUP), leads=True)
    assert plan is not None
    assert offer.plan_id == plan.plan_id
    assert not offer.flags & MATCHES


_OFFERS = st.builds(
    Offer,
    signature=st.sampled_from([bytes(16), b"1" * 16, b"2" * 16]),
    plan_id=st.sampled_from([bytes(8), b"planplan", plan_id_of([bytes(16)] * 2), plan_id_of([bytes(16), b"1" * 16])]),
    value=st.sampled_from([0, 1, 2]),
    flags=st.sampled_from([0, MATCHES, 2, 3]),
)


@given(st.lists(_OFFERS, min_size=1, max_size=4), st.data())
def test_whatever_is_offered_reuse_needs_every_rank_and_the_hash(offers: list[Offer], data: st.DataObject) -> None:
    coordinator = data.draw(st.integers(0, len(offers) - 1))
    decision = decide(offers, coordinator)
    assert decide(tuple(offers), coordinator) == decision  # every rank computes it from the same offers
    base = offers[coordinator].plan_id
    proven = (
        base != bytes(8)
        and bool(offers[coordinator].flags & HAS_GLOBAL_PLAN)
        and all(offer.plan_id == base and offer.flags & MATCHES for offer in offers)
        and plan_id_of([offer.signature for offer in offers]) == base
    )
    assert (decision.outcome == "reused") == proven
    assert decision.base == (None if decision.outcome == "built" else base)
    for rank, offer in enumerate(offers):
        if rank not in decision.senders:
            # Whose structure is not sent shows that the coordinator has it already.
            assert offer.plan_id == base
            assert offer.flags & MATCHES
    assert bool(decision.senders) == (decision.outcome != "reused")
