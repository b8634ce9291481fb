"""At every instant a directory has an index that fits its ``.metadata``, or none that a reader would use."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index import DamagedIndex, fitting_index
from tests.support.simulated_disk import SimulatedDisk, WatchedDisk, runs_with_each_call_failing

DIRECTORY = "/checkpoint"


def save(disk: Disk, step: int) -> None:
    """The size of the tensor is the step, so that the index alone says which checkpoint it is of."""
    writer = robust_dcp.RobustWriter(DIRECTORY, disk=disk)
    robust_dcp.save({"w": torch.full((step,), float(step)), "o": step}, storage_writer=writer, no_dist=True)


def disk_with(*steps: int) -> SimulatedDisk:
    disk = SimulatedDisk()
    for step in steps:
        save(disk, step)
    return disk


def committed_step(disk: Disk) -> int | None:
    """By ``.metadata`` alone."""
    if not disk.exists(f"{DIRECTORY}/{METADATA_NAME}"):
        return None
    reader = robust_dcp.RobustReader(DIRECTORY, disk=disk)
    return int(reader.source.decode_metadata(reader.source.metadata_bytes()).state_dict_metadata["w"].size[0])


def indexed_step(disk: Disk) -> int | None:
    """By the index that a reader would use; ``None`` if it would use none."""
    try:
        index = fitting_index(disk, DIRECTORY)
    except DamagedIndex:
        return None
    if index is None:
        return None
    size = index.stored(index.names.find_all(["w"])["w"]).size
    return None if size is None else size[0]


@pytest.mark.parametrize("old", [None, 3])
def test_after_a_crash_the_index_is_that_of_the_metadata_or_is_not_used(old: int | None) -> None:
    inner = disk_with(*([] if old is None else [old]))
    found: list[tuple[int | None, int | None]] = []

    def crash(number: int) -> None:
        found.extend((committed_step(crashed), indexed_step(crashed)) for crashed in inner.crashes())

    save(WatchedDisk(inner, before=crash), 5)
    crash(-1)
    assert {indexed for committed, indexed in found if indexed != committed} == ({None} if old else set())
    assert {committed for committed, _ in found} == {old, 5}
    assert found[-1] == (5, 5)


def test_a_call_that_fails_leaves_no_index_of_another_checkpoint() -> None:
    for failing in runs_with_each_call_failing(lambda disk: save(disk, 5), lambda: disk_with(3)):
        inner = failing._disk
        assert isinstance(inner, SimulatedDisk)
        for disk in (inner, *inner.crashes()):
            assert indexed_step(disk) in (None, committed_step(disk)), failing.calls


def test_a_save_whose_index_cannot_be_written_is_committed_without(caplog: pytest.LogCaptureFixture) -> None:
    class Full(WatchedDisk):
        def open_new(self, path: str, *, direct: bool = False) -> object:
            if INDEX_NAME in path:
                raise StorageError("the file system is full", path=path, errno=errno.ENOSPC, operation="create")
            return self._disk.open_new(path, direct=direct)

    inner = disk_with(3)
    save(Full(inner), 5)
    assert (committed_step(inner), indexed_step(inner)) == (5, None)
    assert not inner.exists(f"{DIRECTORY}/{INDEX_NAME}")  # nothing stays of the checkpoint that was replaced
    assert "gets no index" in caplog.text


def test_what_a_save_killed_in_its_commit_leaves_is_removed_by_the_next() -> None:
    inner = disk_with(3)
    states: list[SimulatedDisk] = []

    def crash(number: int) -> None:
        states.extend(inner.crashes())

    save(WatchedDisk(inner, before=crash), 5)
    left = [state for state in states if any(INDEX_NAME + "." in name for name in state.list_directory(DIRECTORY))]
    assert left
    for state in left:
        save(state, 7)
        assert indexed_step(state) == 7
        assert not any(name.endswith(".tmp") for name in state.list_directory(DIRECTORY))


def test_a_stock_save_over_ours_makes_the_index_unused(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    assert (tmp_path / INDEX_NAME).exists()
    dcp.save({"v": torch.full((3,), 2.0)}, checkpoint_id=tmp_path, no_dist=True)
    found = {"v": torch.zeros(3)}
    robust_dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["v"].tolist() == [2.0] * 3
    assert robust_dcp.RobustReader(tmp_path).read_metadata().state_dict_metadata.keys() == {"v"}


def test_a_save_by_another_planner_takes_the_index_away(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    dcp.save({"v": torch.ones(3)}, storage_writer=robust_dcp.RobustWriter(tmp_path), no_dist=True)
    assert not (tmp_path / INDEX_NAME).exists()
    assert robust_dcp.RobustReader(tmp_path).read_metadata().state_dict_metadata.keys() == {"v"}
