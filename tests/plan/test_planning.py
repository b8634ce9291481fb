"""The coordinator's plan follows from the structures of all ranks, and every rank gets its share of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.errors import ExchangeError, PlanConflict, StructureChanged
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.plan import Gathered, Plan, PlanReply, make_plan
from robust_dcp.plan.share import pack_places, place_items, plan_id_of, unpack_places
from robust_dcp.plan.structure import Form
from robust_dcp.storage.committing.commit import MetadataToPublish
from robust_dcp.storage.writing.engine import WrittenFiles
from tests.plan.structures import World, chunk, local_of, obj, table, tensor, worlds


def locals_of(world: World) -> list[LocalStructure]:
    return [local_of(structure, ranks=range(len(world.ranks))) for structure in world.tables]


def plan_of(
    ranks: list[LocalStructure],
    senders: tuple[int, ...] | None = None,
    known: Plan | None = None,
    *,
    refuse_change: bool = False,
) -> tuple[Plan, list[PlanReply]]:
    structures = [
        local.to_message() if senders is None or rank in senders else None for rank, local in enumerate(ranks)
    ]
    gathered = Gathered.of(structures, known, ranks[0])
    plan, _, replies = make_plan(gathered, known, ranks[0], refuse_change=refuse_change)
    return plan, replies


def published(plan: Plan, *, is_stored: bool = False) -> MetadataToPublish:
    """What a save by ``plan`` publishes whose objects all lie at the start of their files."""
    assert plan.metadata is not None
    objects = [int((t.forms[kept] == Form.VARIABLE).sum()) for t, kept in zip(plan.tables, plan.kept, strict=True)]
    written = [WrittenFiles(True, np.zeros((n, 2), dtype=np.int64), (), 0) for n in objects]
    return plan.metadata.encode(written, StorageMeta("id"), plan.sections if is_stored else None)


def metadata_of(plan: Plan) -> bytes:
    """The ``.metadata`` of :func:`published`."""
    return b"".join(published(plan).fragments)


@settings(max_examples=30)
@given(worlds())
def test_each_rank_takes_its_share_and_places_it_as_the_coordinator_does(world: World) -> None:
    ranks = locals_of(world)
    plan, replies = plan_of(ranks)
    assert plan.signatures == tuple(local.signature.value for local in ranks)
    placements = []
    for rank, (local, reply) in enumerate(zip(ranks, replies, strict=True)):
        assert (reply.outcome, reply.plan_id) == ("built", plan.plan_id)
        kept = unpack_places(reply.kept, len(local.table))
        assert kept.tolist() == plan.kept[rank].tolist()
        placements.append(place_items(local.table, kept, files=2))
    assert plan_id_of(plan.signatures, [reply.kept for reply in replies], placements) == plan.plan_id


@settings(max_examples=30)
@given(worlds(min_ranks=2, max_ranks=4), st.data())
def test_a_plan_is_the_same_whatever_plan_it_was_made_after(world: World, data: st.DataObject) -> None:
    """Ranks that did not change do not send again, and nothing of the plan before is kept."""
    ranks = locals_of(world)
    made, _ = plan_of(ranks)
    changed = data.draw(st.integers(0, len(ranks) - 1))
    others = list(ranks)
    others[changed] = locals_of(World((*world.ranks[:changed], (*world.ranks[changed], tensor("new")))))[changed]
    others[changed] = local_of(others[changed].table, ranks=range(len(ranks)))
    between, replies = plan_of(others, (changed,), made)
    assert {reply.outcome for reply in replies} == {"rebuilt"}
    again, _ = plan_of(ranks, (changed,), between)
    assert between.plan_id != made.plan_id == again.plan_id
    assert metadata_of(again) == metadata_of(made)


def test_another_deal_or_another_structure_has_another_identity() -> None:
    signatures, bits = [bytes(16), b"1" * 16], [pack_places(np.array(each), 9) for each in ([0, 3], [1])]
    placements = [place_items(table(tensor("w", [n])), np.array([0]), files=2) for n in (4, 4)]
    other = place_items(table(tensor("w", [5])), np.array([0]), files=2)
    identities = [
        plan_id_of(signatures, bits, placements),
        plan_id_of(signatures, bits, None),
        plan_id_of(signatures[::-1], bits, placements),
        plan_id_of(signatures, bits[::-1], placements),
        plan_id_of(signatures, bits, [placements[0], other]),
        plan_id_of(signatures, bits, [placements[0], replace(other, offset=other.offset + 64)]),
    ]
    assert len(set(identities)) == len(identities)
    assert plan_id_of(signatures, bits, [placements[1], replace(placements[0])]) == identities[0]


def test_a_changed_structure_is_refused_with_the_keys_if_asked() -> None:
    known, _ = plan_of(locals_of(World(((tensor("a"), tensor("gone")), (tensor("b"),)))))
    after = locals_of(World(((tensor("a", [9]),), (tensor("b"), tensor("c")))))
    with pytest.raises(StructureChanged) as caught:
        plan_of(after, (0, 1), known, refuse_change=True)
    assert (caught.value.added, caught.value.removed, caught.value.changed) == (["c"], ["gone"], ["a"])
    assert "a (float32[4] -> float32[9])" in str(caught.value)


def test_a_lost_cache_is_no_change_of_structure() -> None:
    ranks = locals_of(World(((tensor("a"),), (tensor("b"),))))
    known, _ = plan_of(ranks)
    plan, replies = plan_of(ranks, (1,), known, refuse_change=True)
    assert not replies[0].added + replies[0].removed + tuple(replies[0].changed)
    assert plan.plan_id == known.plan_id


def test_replies_stay_bounded_if_everything_changed() -> None:
    known, _ = plan_of(locals_of(World((tuple(tensor(f"old{n:04}") for n in range(1000)), ()))))
    after = locals_of(World((tuple(tensor(f"new{n:04}") for n in range(1000)), ())))
    _, replies = plan_of(after, (0, 1), known)
    assert len(replies[0].added) == len(replies[0].removed) == 200
    assert len(replies[0].reason) < 1000


def test_replies_name_what_is_compared() -> None:
    both = [obj("rng"), tensor("step", ())]
    _, replies = plan_of(locals_of(World(((obj("own"), *both), (chunk("w", [4], [0], [4]), *both)))))
    assert [unpack_places(reply.compared, 3).tolist() for reply in replies] == [[1, 2], [0, 1]]
    assert all(reply.is_compared for reply in replies)
    _, replies = plan_of(locals_of(World(((obj("own"),), (tensor("w"),)))))
    assert [(reply.compared, reply.is_compared) for reply in replies] == [(b"", False)] * 2


def test_another_writer_gets_no_places() -> None:
    local = local_of(table(tensor("a"), obj("o")), ranks=(0,), files=None)
    plan, (reply,) = plan_of([local])
    assert plan.metadata is None
    assert plan.stock_metadata is not None
    assert plan.stock_metadata.storage_data is None
    assert unpack_places(reply.kept, 2).tolist() == [0, 1]


def test_ranks_with_other_options_are_named_with_the_options() -> None:
    ranks = [local_of(table(tensor("w")), ranks=range(3), files=n) for n in (2, 3, 2)]
    with pytest.raises(PlanConflict, match=r"on rank 1: files_per_rank is 3 there and 2 here") as caught:
        plan_of(ranks)
    assert caught.value.ranks == [1]


def test_a_coordinator_whose_options_changed_alone_names_all_others() -> None:
    before = [local_of(table(tensor("w")), ranks=range(2), files=2)] * 2
    known, _ = plan_of(before)
    changed = local_of(table(tensor("w")), ranks=range(2), files=4)
    with pytest.raises(PlanConflict, match=r"on rank 1: files_per_rank is 2 there and 4 here"):
        plan_of([changed, before[1]], (0,), known)


def test_a_rank_that_is_silent_where_nothing_is_known_is_named() -> None:
    with pytest.raises(ExchangeError, match=r"rank 1 did not send") as caught:
        plan_of(locals_of(World(((tensor("a"),), (tensor("b"),)))), (0,))
    assert caught.value.ranks == [1]
