"""A patched plan is as right as one that is made from scratch of the same structures, and refuses what that refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan
from robust_dcp.plan.global_plan import make_global_plan, patch_plan, plan_of_kept, shares_of
from robust_dcp.plan.global_plan import patch as patching
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import apply_plan, coordinator_plan_of
from robust_dcp.plan.rank_plan import RankPlanMessage
from robust_dcp.plan.stored_plan import plan_sections, read_plan
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.index import fitting_index, lazy_metadata
from robust_dcp.storage.layouts import LAYOUTS, Layout
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from tests.plan.structures import Item, World, obj, table, tensor, worlds
from tests.plan.test_planning import first_save, locals_of, metadata_of, plan_of, published

Ranks = tuple[tuple[Item, ...], ...]
Written = list[tuple[str, tuple[int, ...]]]


def written_by(plan: CoordinatorPlan) -> Written:
    """(name, offsets) of all that is written, as often as it is."""
    return sorted(
        (structure.names[structure.name_ids[item]], structure.dims_of(item)[1])
        for structure, kept in zip(plan.tables, plan.kept, strict=True)
        for item in kept.tolist()
    )


def unpickled(plan: CoordinatorPlan) -> Metadata:
    return decode_metadata(metadata_of(plan), "a test")


def filled_chunks(metadata: Metadata) -> dict[str, Any]:
    """``state_dict_metadata`` without the sizes of chunks that hold nothing: replicas of these may differ in them."""
    return {
        name: [entry.size, [(c.offsets, c.sizes if 0 not in c.sizes else None) for c in entry.chunks]]
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for name, entry in metadata.state_dict_metadata.items()
    }


def same_made_from_scratch(plan: CoordinatorPlan, layout: Layout) -> CoordinatorPlan:
    """The plan with the same shares that knows nothing of the one before."""
    again = plan_of_kept(plan.tables, plan.kept)
    return coordinator_plan_of(again, plan.signatures, plan.context, files=2, layout=layout)


@pytest.fixture
def any_change_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small structures change by more than a quarter all the time."""
    monkeypatch.setattr(patching, "_MOST", 0)
    monkeypatch.setattr(patching, "_DRIFT", 1e9)


@st.composite
def changes(draw: st.DrawFn, ranks: Ranks, other: Ranks) -> Ranks:
    """``ranks`` with some names as they are in ``other``: added, removed, changed, or moved to other ranks."""
    names = sorted({item.name for items in (*ranks, *other) for item in items})
    taken = draw(st.sets(st.sampled_from(names), max_size=3)) if names else set()
    return tuple(
        tuple(item for item in own if item.name not in taken) + tuple(item for item in new if item.name in taken)
        for own, new in zip(ranks, other, strict=True)
    )


def senders_of(before: Sequence[LocalStructure], after: Sequence[LocalStructure]) -> tuple[int, ...]:
    return tuple(r for r, (one, two) in enumerate(zip(before, after, strict=True)) if one.signature != two.signature)


def saved(
    ranks: list[LocalStructure], before: list[CachedPlan], senders: tuple[int, ...]
) -> tuple[list[CachedPlan], list[RankPlanMessage]]:
    """One save after another, and what each rank knows of it afterwards."""
    plan, replies = plan_of(ranks, senders, before[0])
    cached = []
    for local, reply, known in zip(ranks, replies, before, strict=True):
        share = apply_plan(reply, local, known)
        cached.append(CachedPlan(b"", local.signature.value, local.table, share, None, plan))
    return cached, replies


@pytest.mark.usefixtures("any_change_is_patched")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@settings(max_examples=40, deadline=None)
@given(worlds(min_ranks=3, max_ranks=3), st.lists(worlds(min_ranks=3, max_ranks=3), min_size=1, max_size=3), st.data())
def test_a_patched_plan_is_as_right_as_a_fresh_one(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, world: World, others: list[World], data: st.DataObject
) -> None:
    ranks = [replace(local, layout=layout) for local in locals_of(world)]
    cached, content = first_save(ranks), world.ranks
    for other in others:
        content = data.draw(changes(content, other.ranks))
        before, ranks = ranks, [replace(local, layout=layout) for local in locals_of(World(content))]
        senders = senders_of(before, ranks)
        if not senders:
            continue
        fresh, _ = plan_of(ranks, (0, 1, 2), None)
        cached, replies = saved(ranks, cached, senders)
        plan = cached[0].coordinator
        assert plan is not None
        assert plan.shares is not None
        event(f"patched: {plan.shares.n_patched > 0}")
        assert written_by(plan) == written_by(fresh)
        assert plan.nbytes == fresh.nbytes
        assert [each.tolist() for each in plan.common_objects] == [each.tolist() for each in fresh.common_objects]
        assert unpickled(plan) == unpickled(same_made_from_scratch(plan, layout))
        check_index(plan, os.fspath(tmp_path_factory.mktemp("checkpoint")))
        assert filled_chunks(unpickled(plan)) == filled_chunks(unpickled(fresh))
        made_anew = shares_of(plan_of_kept(plan.tables, plan.kept))
        assert plan.shares.load.tolist() == made_anew.load.tolist()
        assert plan.shares.n_replicated == made_anew.n_replicated
        for rank, (own, reply) in enumerate(zip(cached, replies, strict=True)):
            assert own.rank_plan.kept.tolist() == plan.kept[rank].tolist()
            assert (reply.kept is None) <= (rank not in senders)


@pytest.mark.usefixtures("any_change_is_patched")
@settings(max_examples=100, deadline=None)
@given(worlds(min_ranks=3, max_ranks=3), worlds(min_ranks=3, max_ranks=3), st.data())
def test_it_refuses_what_a_fresh_one_refuses_in_the_same_words(world: World, other: World, data: st.DataObject) -> None:
    mixed = list(data.draw(changes(world.ranks, other.ranks)))
    liar = data.draw(st.integers(0, 2))  # who brings names as they are elsewhere, whatever the others hold
    mixed[liar] = data.draw(changes((mixed[liar],), (other.ranks[liar],)))[0]
    before, after = locals_of(world), locals_of(World(tuple(mixed)))
    senders = senders_of(before, after)

    def outcome(sending: tuple[int, ...], known: CachedPlan | None) -> object:
        try:
            return written_by(plan_of(after, sending, known)[0])
        except PlanConflict as conflict:
            event("refused")
            return str(conflict), conflict.key, conflict.ranks

    assert outcome(senders, first_save(before)[0]) == outcome((0, 1, 2), None)


@pytest.mark.usefixtures("any_change_is_patched")
@settings(max_examples=40, deadline=None)
@given(worlds(min_ranks=3, max_ranks=3), worlds(min_ranks=3, max_ranks=3), st.data())
def test_a_patched_plan_lies_in_the_index_of_its_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, world: World, other: World, data: st.DataObject
) -> None:
    before = locals_of(world)
    cached = first_save(before)
    assert cached[0].coordinator is not None
    plan_sections((0, 1, 2), cached[0].coordinator)
    after = locals_of(World(data.draw(changes(world.ranks, other.ranks))))
    cached, _ = saved(after, cached, senders_of(before, after) or (0,))
    plan = cached[0].coordinator
    assert plan is not None
    directory = os.fspath(tmp_path_factory.mktemp("checkpoint"))
    check_index(plan, directory)
    for rank, local in enumerate(after):
        found = read_plan(directory, (0, 1, 2), rank, local, leads=rank == 0)
        assert found is not None
        assert found.rank_plan.kept.tolist() == plan.kept[rank].tolist()
        assert found.rank_plan.common_objects.tolist() == plan.common_objects[rank].tolist()
        if found.coordinator is not None:
            assert unpickled(found.coordinator) == unpickled(plan)
            assert found.coordinator.signatures == plan.signatures


def check_index(plan: CoordinatorPlan, directory: str) -> None:
    """Publish ``plan`` in ``directory`` and make sure that its index says what its ``.metadata`` says."""
    made = published(plan, plan_sections((0, 1, 2), plan))
    Path(directory, METADATA_NAME).write_bytes(b"".join(made.fragments))
    Path(directory, INDEX_NAME).write_bytes(b"".join(made.index))
    index = fitting_index(PosixDisk(), directory)
    assert index is not None
    indexed, stored = deepcopy(lazy_metadata(index, unreachable)), unpickled(plan)
    assert indexed.state_dict_metadata == stored.state_dict_metadata
    assert indexed.storage_data == stored.storage_data
    assert indexed.planner_data == stored.planner_data


def unreachable() -> Any:
    raise AssertionError("the index is damaged")


def items(first: int, end: int) -> tuple[Item, ...]:
    return tuple(tensor(f"t{number:03}", [1 + number]) for number in range(first, end))


def test_names_that_did_not_change_keep_their_writers() -> None:
    shared = items(0, 90)
    first, second, third = (table(*shared) for _ in range(3))
    before = shares_of(make_global_plan([first, second, third]))
    grown = [first, table(*shared, tensor("huge", [10_000])), third]
    assert patch_plan(before, grown, {"huge"}, lowest_rank=False) is None  # others should write what rank 1 wrote
    grown = [first, table(*shared, tensor("small", [1])), third]
    patch = patch_plan(before, grown, {"small"}, lowest_rank=False)
    assert patch is not None
    assert patch.moved == (1,)
    assert patch.shares.kept[0] is before.kept[0]
    assert patch.shares.kept[2] is before.kept[2]
    assert len(patch.shares.kept[1]) == len(before.kept[1]) + 1


def test_many_changes_one_after_the_other_are_planned_wholly_at_last() -> None:
    tables = [table(*items(0, 50)), table(*items(50, 100))]
    shares, n_patches = shares_of(make_global_plan(tables)), 0
    while n_patches < 100:
        extra = tensor(f"x{n_patches:03}")
        tables = [tables[0], table(*items(50, 100), extra)]
        changed = {extra.name, f"x{n_patches - 1:03}"} if n_patches else {extra.name}
        patch = patch_plan(shares, tables, changed, lowest_rank=False)
        if patch is None:
            break
        shares, n_patches = patch.shares, n_patches + 1
    assert n_patches == 25


def test_other_attributes_peers_or_ways_to_flatten_are_planned_wholly() -> None:
    plain = [table(*items(0, 50)), table(*items(50, 100))]
    shares = shares_of(make_global_plan(plain))
    paths = {item.name: (item.name,) for item in items(50, 101)}
    for after in (
        table(*items(50, 101), attributes={"mcore_data": {"t100": 1}}),
        table(*items(50, 101), paths=paths),
    ):
        assert patch_plan(shares, [plain[0], after], {"t100"}, lowest_rank=False) is None
    assert patch_plan(shares, [plain[0], table(*items(50, 101))], {"t100"}, lowest_rank=False) is not None


def test_an_object_that_two_senders_tell_differently_is_named_with_all_that_hold_it() -> None:
    content = tuple((obj("rng"), *items(30 * rank, 30 * rank + 30)) for rank in range(3))
    before = locals_of(World(content))
    grown = locals_of(World((*((*own, tensor(f"new{rank}")) for rank, own in enumerate(content[:2])), content[2])))
    after = [replace(local, object_digests=local.object_digests + rank) for rank, local in enumerate(grown)]
    cached, replies = saved(after, first_save(before), (0, 1))
    assert cached[0].coordinator is not None
    assert cached[0].coordinator.shares is not None
    assert cached[0].coordinator.shares.n_patched == 2
    assert replies[2].differing_objects == {"rng": (0, 1, 2)}
