"""A plan that lay beside a checkpoint is the plan it was, for the ranks it was made for, and for nobody else."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.plan import Plan
from robust_dcp.plan.stored_plan import LoadedCheckpoints, read_plan
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index.form import SECTIONS
from tests.plan.structures import World, chunk, local_of, obj, table, tensor, worlds
from tests.plan.test_planning import locals_of, metadata_of, plan_of, published
from tests.storage.indices import with_fixed_checksums

_WORLD = World(
    (
        (chunk("w", [8], [0], [4]), obj("step"), tensor("norm")),
        (chunk("w", [8], [4], [4]), obj("step"), tensor("norm")),
    )
)


def _stored(ranks: list[LocalStructure]) -> tuple[Plan, bytes]:
    """A plan, and the index of a checkpoint that was saved by it."""
    plan, _ = plan_of(ranks)
    return plan, b"".join(published(plan, is_stored=True).index)


def _put(directory: Path, plan: Plan, index: bytes) -> str:
    (directory / METADATA_NAME).write_bytes(metadata_of(plan))
    (directory / INDEX_NAME).write_bytes(index)
    return os.fspath(directory)


@settings(max_examples=20)
@given(worlds(min_ranks=1))
def test_every_rank_finds_its_share_and_the_coordinator_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, world: World
) -> None:
    ranks = locals_of(world)
    group = tuple(range(len(ranks)))
    plan, data = _stored(ranks)
    directory = _put(tmp_path_factory.mktemp("checkpoint"), plan, data)
    for rank, local in enumerate(ranks):
        found = read_plan(directory, group, rank, local, leads=rank == 0)
        assert found is not None
        assert (found.plan_id, found.signature) == (plan.plan_id, plan.signatures[rank])
        assert found.share.kept.tolist() == plan.kept[rank].tolist()
        assert (found.plan is None) == (rank != 0)
        if found.plan is not None:
            assert metadata_of(found.plan) == metadata_of(plan)
            assert (found.plan.nbytes, found.plan.signatures) == (plan.nbytes, plan.signatures)


def test_a_plan_for_another_group_or_structure_is_passed_over(tmp_path: Path) -> None:
    ranks = locals_of(_WORLD)
    directory = _put(tmp_path, *_stored(ranks))
    assert read_plan(directory, (0, 1), 1, ranks[1], leads=False) is not None
    assert read_plan(directory, (2, 3), 1, ranks[1], leads=False) is None
    other = local_of(table(tensor("w"), obj("step"), tensor("norm")))
    assert read_plan(directory, (0, 1), 1, other, leads=False) is None
    assert read_plan(directory, (0, 1), 0, ranks[1], leads=False) is None


def test_a_checkpoint_without_a_plan_is_passed_over(tmp_path: Path) -> None:
    assert read_plan(os.fspath(tmp_path), (0, 1), 0, locals_of(_WORLD)[0], leads=True) is None


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_plan_is_refused_or_was_not_needed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ranks = locals_of(_WORLD)
    plan, good = _stored(ranks)
    at = data.draw(st.integers(0, len(good) - 1))
    damage = data.draw(st.sampled_from(["flip", "cut", "more"]))
    bad = bytearray(good)
    if damage == "flip":
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del bad[at:]
    else:
        bad += bytes(at + 1)
    directory = _put(tmp_path_factory.mktemp("checkpoint"), plan, bytes(bad))
    refused: list[str] = []
    for rank in range(2):
        try:
            found = read_plan(directory, (0, 1), rank, ranks[rank], leads=rank == 0)
        except RobustCheckpointError as error:
            refused.append(str(error))
            continue
        assert damage == "flip"  # of what this rank does not ask for
        if found is None:
            assert at in range(32, 64)  # it does not fit
            refused.append(INDEX_NAME)
            continue
        if found.plan is not None:
            assert metadata_of(found.plan) == metadata_of(plan)
    assert refused or damage == "flip"
    assert all(INDEX_NAME in words for words in refused)


def test_the_checkpoint_that_was_loaded_last_is_asked_first_and_once(tmp_path: Path) -> None:
    ranks = locals_of(_WORLD)
    plan, data = _stored(ranks)
    loaded = LoadedCheckpoints(max_entries=2)
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        loaded.add(_put(tmp_path / name, plan, data))
    plans = [loaded.find_plan((0, 1), 0, ranks[0], leads=True) for _ in range(3)]
    names = [None if found is None else os.path.basename(found.loaded_from) for found in plans]
    assert names == ["third", "second", None]


def test_a_damaged_plan_is_told_of_once_and_planned_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = locals_of(_WORLD)
    loaded = LoadedCheckpoints()
    loaded.add(_put(tmp_path, _stored(ranks)[0], b"RDCPIDX\n and nothing that belongs there"))
    assert loaded.find_plan((0, 1), 0, ranks[0], leads=True) is None
    assert loaded.find_plan((0, 1), 0, ranks[0], leads=True) is None
    assert [record.message for record in caplog.records if "planning anew" in record.message] == [
        caplog.records[0].message
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_plan_that_was_never_ours_costs_a_plan_and_no_save(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Right checksums over shares and structures that no version of ours wrote."""
    ranks = locals_of(_WORLD)
    plan, data = _stored(ranks)
    bad, chance = bytearray(data), random.Random(seed)
    number = list(SECTIONS).index(
        chance.choice(["plan_id", "ranks", "signatures", "shares", "share_ends", "structures"])
    )
    start, nbytes = struct.unpack_from("<QQ", data, 64 + 40 * number + 24)
    for _ in range(chance.randint(1, 3)):
        bad[start + chance.randrange(nbytes)] = chance.choice([0, 1, 127, 128, 255])
    loaded = LoadedCheckpoints()
    for rank in (0, 1):
        loaded.add(_put(tmp_path_factory.mktemp("checkpoint"), plan, with_fixed_checksums(bad)))
        loaded.find_plan((0, 1), rank, ranks[rank], leads=rank == 0)  # whatever it finds has to be agreed on


def test_a_plan_in_an_index_of_another_metadata_is_passed_over(tmp_path: Path) -> None:
    ranks = locals_of(_WORLD)
    plan, data = _stored(ranks)
    directory = _put(tmp_path, plan, data)
    (tmp_path / METADATA_NAME).write_bytes(metadata_of(plan)[:-1])
    assert read_plan(directory, (0, 1), 0, ranks[0], leads=True) is None
