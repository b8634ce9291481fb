"""A plan that is patched is the plan that would be built anew, and every rank gets its share of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.comm import combined_signature
from robust_dcp.errors import ExchangeError, PlanConflict, StructureChanged
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import apply_plan, plan_for_all
from robust_dcp.plan.rank_plan import RankPlan, RankPlanMessage
from robust_dcp.plan.structure import Form, ItemKind
from robust_dcp.storage.committing.commit import MetadataToPublish
from robust_dcp.storage.index import Section
from robust_dcp.storage.writing.engine import WrittenFiles
from tests.plan.structures import World, local_of, obj, table, tensor, worlds


def locals_of(world: World, digest: int = 1) -> list[LocalStructure]:
    ranks = range(len(world.ranks))
    return [
        local_of(structure, [digest] * sum(item.kind == ItemKind.BYTES for item in items), ranks=ranks)
        for structure, items in zip(world.tables, world.ranks, strict=True)
    ]


def plan_of(
    ranks: list[LocalStructure], senders: tuple[int, ...], base: CachedPlan | None, *, refuse_change: bool = False
) -> tuple[CoordinatorPlan, list[RankPlanMessage]]:
    structures = [local.to_message() if rank in senders else None for rank, local in enumerate(ranks)]
    agreed = combined_signature([local.signature.value for local in ranks])
    return plan_for_all(structures, agreed, base, ranks[0], refuse_change=refuse_change)


def _cached(local: LocalStructure, share: RankPlan, plan: CoordinatorPlan) -> CachedPlan:
    return CachedPlan(combined_signature(plan.signatures), local.signature.value, local.table, share, None, plan)


def published(plan: CoordinatorPlan, kept_plan: Mapping[str, Section] | None = None) -> MetadataToPublish:
    """What a save by ``plan`` publishes whose objects all lie at the start of their files."""
    assert plan.metadata is not None
    objects = [int((t.forms[kept] == Form.VARIABLE).sum()) for t, kept in zip(plan.tables, plan.kept, strict=True)]
    written = [WrittenFiles(True, np.zeros((n, 2), dtype=np.int64), (), 0) for n in objects]
    return plan.metadata.encode(written, StorageMeta("id"), kept_plan)


def metadata_of(plan: CoordinatorPlan) -> bytes:
    """The ``.metadata`` of :func:`published`."""
    return b"".join(published(plan).fragments)


def first_save(ranks: list[LocalStructure]) -> list[CachedPlan]:
    plan, replies = plan_of(ranks, tuple(range(len(ranks))), None)
    return [_cached(r, apply_plan(reply, r, None), plan) for r, reply in zip(ranks, replies, strict=True)]


@settings(max_examples=30)
@given(worlds())
def test_each_rank_takes_its_share_and_places_it_as_the_coordinator_does(world: World) -> None:
    ranks = locals_of(world)
    plan, replies = plan_of(ranks, tuple(range(len(ranks))), None)
    assert plan.signatures == tuple(local.signature.value for local in ranks)
    for rank, (local, reply) in enumerate(zip(ranks, replies, strict=True)):
        assert reply.outcome == "built"
        share = apply_plan(reply, local, None)
        assert share.kept.tolist() == plan.kept[rank].tolist()
        assert share.common_objects.tolist() == plan.common_objects[rank].tolist()
        assert share.placements is not None
        assert len(share.placements.file) == len(share.kept)


def test_a_rank_whose_share_is_as_before_gets_no_bits() -> None:
    before = locals_of(World(((tensor("a"),), (tensor("b"),))))
    cached = first_save(before)
    after = locals_of(World(((tensor("a"),), (tensor("b"), tensor("c")))))
    _, replies = plan_of(after, (1,), cached[0])
    assert [reply.kept is None for reply in replies] == [True, False]
    with pytest.raises(ValueError, match="does not have"):
        apply_plan(replies[0], after[0], None)


def test_a_changed_structure_is_refused_with_the_keys_if_asked() -> None:
    cached = first_save(locals_of(World(((tensor("a"), tensor("gone")), (tensor("b"),)))))
    after = locals_of(World(((tensor("a", [9]),), (tensor("b"), tensor("c")))))
    with pytest.raises(StructureChanged) as caught:
        plan_of(after, (0, 1), cached[0], refuse_change=True)
    assert (caught.value.added, caught.value.removed, caught.value.changed) == (["c"], ["gone"], ["a"])
    assert "a (float32[4] -> float32[9])" in str(caught.value)
    _, replies = plan_of(after, (0, 1), cached[0])
    assert {reply.outcome for reply in replies} == {"rebuilt"}


def test_a_lost_cache_is_no_change_of_structure() -> None:
    ranks = locals_of(World(((tensor("a"),), (tensor("b"),))))
    cached = first_save(ranks)
    _, replies = plan_of(ranks, (1,), cached[0], refuse_change=True)
    assert not replies[0].added + replies[0].removed + tuple(replies[0].changed)


def test_objects_that_differ_are_told_to_all_ranks() -> None:
    structure = table(obj("rng"), obj("step"))
    ranks = [local_of(structure, [rank, 5], ranks=range(3)) for rank in (7, 8, 7)]
    _, replies = plan_of(ranks, (0, 1, 2), None)
    assert all(reply.differing_objects == {"rng": (0, 1, 2)} for reply in replies)


def test_replies_stay_bounded_if_everything_changed() -> None:
    cached = first_save(locals_of(World((tuple(tensor(f"old{n:04}") for n in range(1000)), ()))))
    after = locals_of(World((tuple(tensor(f"new{n:04}") for n in range(1000)), ())))
    _, replies = plan_of(after, (0, 1), cached[0])
    assert len(replies[0].added) == len(replies[0].removed) == 200
    assert len(replies[0].reason) < 1000


def test_another_writer_gets_no_places() -> None:
    structure = table(tensor("a"), obj("o"))
    local = local_of(structure, ranks=(0,), files=None)
    plan, (reply,) = plan_of([local], (0,), None)
    assert apply_plan(reply, local, None).placements is None
    assert plan.metadata is None
    assert plan.stock_metadata is not None
    assert plan.stock_metadata.storage_data is None
    assert np.array_equal(apply_plan(reply, local, None).kept, [0, 1])


def test_ranks_with_other_options_are_named_with_the_options() -> None:
    ranks = [local_of(table(tensor("w")), ranks=range(3), files=n) for n in (2, 3, 2)]
    with pytest.raises(PlanConflict, match=r"on rank 1: files_per_rank is 3 there and 2 here") as caught:
        plan_of(ranks, (0, 1, 2), None)
    assert caught.value.ranks == [1]


def test_a_coordinator_whose_options_changed_alone_names_all_others() -> None:
    before = [local_of(table(tensor("w")), ranks=range(2), files=2)] * 2
    base = first_save(before)
    changed = local_of(table(tensor("w")), ranks=range(2), files=4)
    with pytest.raises(PlanConflict, match=r"on rank 1: files_per_rank is 2 there and 4 here"):
        plan_of([changed, before[1]], (0,), base[0])


@settings(max_examples=30)
@given(worlds(min_ranks=2, max_ranks=4), st.data())
def test_a_silent_rank_must_hold_what_the_coordinator_has_of_it(world: World, data: st.DataObject) -> None:
    before = locals_of(world)
    base = first_save(before)
    silent = data.draw(st.integers(0, len(before) - 1))
    senders = data.draw(st.sets(st.integers(0, len(before) - 1))) - {silent}
    after = list(before)
    after[silent] = locals_of(World((*world.ranks[:silent], (*world.ranks[silent], tensor("new")))))[silent]
    after[silent] = local_of(after[silent].table, ranks=range(len(before)))
    with pytest.raises(ExchangeError, match="did not send theirs") as caught:
        plan_of(after, tuple(senders), base[0])
    assert silent in caught.value.ranks
    assert not senders.intersection(caught.value.ranks)
    plan_of(before, tuple(senders), base[0])  # and if it does hold that, there is a plan


def test_a_structure_that_does_not_fit_the_signature_that_its_rank_showed_is_refused() -> None:
    ranks = locals_of(World(((tensor("a"),), (tensor("b"),))))
    other = locals_of(World(((tensor("a"),), (tensor("c"),))))
    agreed = combined_signature([local.signature.value for local in ranks])
    structures = [ranks[0].to_message(), other[1].to_message()]
    with pytest.raises(ExchangeError, match="not those that the ranks hold"):
        plan_for_all(structures, agreed, None, ranks[0], refuse_change=False)


def test_a_rank_that_is_silent_where_nothing_is_known_is_named() -> None:
    with pytest.raises(ExchangeError, match=r"1 ranks did not send theirs: \[1\]") as caught:
        plan_of(locals_of(World(((tensor("a"),), (tensor("b"),)))), (0,), None)
    assert caught.value.ranks == [1]
