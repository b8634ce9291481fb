"""A plan that lay beside a checkpoint is the plan it was, for the ranks it was made for, and for nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.comm import decode, encode
from robust_dcp.errors import RobustCheckpointError
from robust_dcp.plan.cache import CoordinatorPlan
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.stored_plan import _HEAD, LoadedCheckpoints, _Index, encode_plan, read_plan
from robust_dcp.storage.files.paths import PLAN_NAME
from robust_dcp.storage.records.checksum import crc32
from tests.plan.structures import World, chunk, local_of, obj, table, tensor, worlds
from tests.plan.test_planning import first_save, locals_of, metadata_of, plan_of

_WORLD = World(
    (
        (chunk("w", [8], [0], [4]), obj("step"), tensor("norm")),
        (chunk("w", [8], [4], [4]), obj("step"), tensor("norm")),
    )
)


def _stored(ranks: list[LocalStructure]) -> tuple[CoordinatorPlan, bytes]:
    plan, _ = plan_of(ranks, tuple(range(len(ranks))), None)
    group = tuple(range(len(ranks)))
    return plan, encode_plan(group, plan)


def _put(directory: Path, data: bytes) -> str:
    (directory / PLAN_NAME).write_bytes(data)
    return os.fspath(directory)


@settings(max_examples=20)
@given(worlds(min_ranks=1))
def test_every_rank_finds_its_share_and_the_coordinator_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, world: World
) -> None:
    ranks = locals_of(world)
    group = tuple(range(len(ranks)))
    made = first_save(ranks)
    plan, data = _stored(ranks)
    directory = _put(tmp_path_factory.mktemp("checkpoint"), data)
    for rank, local in enumerate(ranks):
        found = read_plan(directory, group, rank, local, leads=rank == 0)
        assert found is not None
        assert found.plan_id == made[rank].plan_id
        assert found.signature == made[rank].signature
        assert found.rank_plan.kept.tolist() == made[rank].rank_plan.kept.tolist()
        assert found.rank_plan.common_objects.tolist() == made[rank].rank_plan.common_objects.tolist()
        assert found.rank_plan.placements is not None
        assert made[rank].rank_plan.placements is not None
        assert found.rank_plan.placements.offset.tolist() == made[rank].rank_plan.placements.offset.tolist()
        assert (found.coordinator is None) == (rank != 0)
        if found.coordinator is not None:
            assert metadata_of(found.coordinator) == metadata_of(plan)
            assert found.coordinator.nbytes == plan.nbytes
            assert found.coordinator.signatures == plan.signatures


def test_a_plan_for_another_group_or_structure_is_passed_over(tmp_path: Path) -> None:
    ranks = locals_of(_WORLD)
    _, data = _stored(ranks)
    directory = _put(tmp_path, data)
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
    directory = _put(tmp_path_factory.mktemp("checkpoint"), bytes(bad))
    refused: list[str] = []
    for rank in range(2):
        try:
            found = read_plan(directory, (0, 1), rank, ranks[rank], leads=rank == 0)
        except RobustCheckpointError as error:
            refused.append(str(error))
            continue
        assert damage == "flip"  # of the other rank's share
        assert found is not None
        if found.coordinator is not None:
            assert metadata_of(found.coordinator) == metadata_of(plan)
    assert refused
    assert all(PLAN_NAME in words for words in refused)


def test_the_checkpoint_that_was_loaded_last_is_asked_first_and_once(tmp_path: Path) -> None:
    ranks = locals_of(_WORLD)
    _, data = _stored(ranks)
    loaded = LoadedCheckpoints(max_entries=2)
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        loaded.add(_put(tmp_path / name, data))
    found = [loaded.find_plan((0, 1), 0, ranks[0], leads=True) for _ in range(3)]
    assert [None if plan is None else os.path.basename(plan.loaded_from) for plan in found] == ["third", "second", None]


def test_a_damaged_plan_is_told_of_once_and_planned_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = locals_of(_WORLD)
    loaded = LoadedCheckpoints()
    loaded.add(_put(tmp_path, b"RDCPPLN2 and nothing that belongs there"))
    assert loaded.find_plan((0, 1), 0, ranks[0], leads=True) is None
    assert loaded.find_plan((0, 1), 0, ranks[0], leads=True) is None
    assert [record.message for record in caplog.records if "planning anew" in record.message] == [
        caplog.records[0].message
    ]


def test_a_plan_file_that_was_never_ours_costs_a_plan_and_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Right checksums over an index that no version of ours wrote: sections of negative length."""
    ranks = locals_of(_WORLD)
    _, good = _stored(ranks)
    magic, nbytes, _ = _HEAD.unpack_from(good)
    index = decode(good[_HEAD.size : _HEAD.size + nbytes], _Index)
    lengths = (sum(index.nbytes) + 8, *[0] * (len(index.nbytes) - 2), -8)
    bad = encode(msgspec.structs.replace(index, nbytes=lengths))
    loaded = LoadedCheckpoints()
    sections = good[_HEAD.size + nbytes :]
    loaded.add(_put(tmp_path, b"".join((_HEAD.pack(magic, len(bad), crc32(bad)), bad, sections))))
    assert all(loaded.find_plan((0, 1), rank, ranks[rank], leads=rank == 0) is None for rank in (0, 1))
    assert any("planning anew" in record.message for record in caplog.records)
