"""A commit is whole or not at all: after a crash or a failed call at any point, a complete checkpoint loads."""

from __future__ import annotations

import errno
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.errors import StorageError, UnsafeCheckpoint
from robust_dcp.storage.committing.commit import commit_metadata
from robust_dcp.storage.committing.removal import remove_data_files
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import data_file_name
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.metadata.metadata_file import StorageInfo, decode_metadata, encode_metadata, referenced_files
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.torch_zip import payload_view, record_template
from tests.support.simulated_disk import SimulatedDisk, WatchedDisk, runs_with_each_call_failing

DIRECTORY = "/checkpoint"


def write_data(disk: Disk, step: int, directory: str = DIRECTORY) -> Metadata:
    """Write and fsync the one data file of a checkpoint whose tensor is filled with ``step``."""
    tensor = torch.full((5,), float(step))
    template = record_template(tensor.dtype, (5,))
    assert template is not None
    payload = payload_view(tensor)
    name = data_file_name(0, 0, str(step))
    file = disk.open_new(f"{directory}/{name}")
    crc = zlib.crc32(payload)
    disk.pwrite(file, [template.header(crc), payload, template.trailer(crc)], 0)
    disk.fsync(file)
    disk.close(file)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([5]))
    return Metadata(
        {"w": TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size([5]), [chunk])},
        storage_data={MetadataIndex("w", [0], 0): StorageInfo(name, 0, template.nbytes)},
    )


def save(disk: Disk, step: int, directory: str = DIRECTORY) -> None:
    """What a save does to the disk, in the order of the rules: data, commit, and only then removals."""
    old: set[str] = set()
    if disk.exists(f"{directory}/.metadata"):
        old = referenced_files(RobustReader(directory, disk=disk).read_metadata())
    metadata = write_data(disk, step, directory)
    commit_metadata(disk, directory, encode_metadata(metadata))
    remove_data_files(disk, directory, old, keep=referenced_files(metadata))


def loaded_step(disk: Disk, directory: str = DIRECTORY) -> int | None:
    """The step that loads, or ``None`` where nothing was committed. Any damage raises."""
    if not disk.exists(f"{directory}/.metadata"):
        return None
    state_dict = {"w": torch.zeros(5)}
    dcp.load(state_dict, storage_reader=RobustReader(directory, disk=disk), no_dist=True)
    assert torch.equal(state_dict["w"], state_dict["w"][:1].expand(5))
    return int(state_dict["w"][0])


def disk_with(*steps: int) -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.mkdirs(DIRECTORY)
    for step in steps:
        save(disk, step)
    return disk


def test_a_commit_makes_its_calls_in_the_promised_order() -> None:
    disk = WatchedDisk(disk_with(1))
    commit_metadata(disk, DIRECTORY, encode_metadata(write_data(disk_with(), 2)))
    assert disk.operations == [
        "open_new",
        "pwrite",
        "fsync",
        "close",
        "fsync_directory",
        "rename",
        "fsync_directory",
    ]
    paths = [path for _, path in disk.calls]
    temporary = paths[0]
    assert temporary.startswith("/checkpoint/.metadata.")
    assert temporary.endswith(".tmp")
    assert paths == [temporary] * 4 + [DIRECTORY, temporary, DIRECTORY]


@pytest.mark.parametrize("old", [None, 1])
def test_a_crash_before_any_call_leaves_the_old_or_the_new_checkpoint(old: int | None) -> None:
    inner = disk_with(*([] if old is None else [old]))
    found: list[set[int | None]] = []

    def crash(number: int) -> None:
        found.append({loaded_step(crashed) for crashed in inner.crashes()})

    save(WatchedDisk(inner, before=crash), 2)
    crash(-1)
    assert set().union(*found) == {old, 2}
    assert found[0] == {old}
    assert found[-1] == {2}
    # Once the new checkpoint is the only one that can be found, it stays so.
    first_sure = next(number for number, steps in enumerate(found) if steps == {2})
    assert all(steps == {2} for steps in found[first_sure:])


def test_once_the_commit_has_returned_no_crash_can_undo_it() -> None:
    disk = disk_with(1, 2)
    assert {loaded_step(crashed) for crashed in disk.crashes()} == {2}


@pytest.mark.parametrize("old", [None, 1])
def test_a_call_that_fails_leaves_a_checkpoint_that_loads(old: int | None) -> None:
    steps = [] if old is None else [old]
    disks = runs_with_each_call_failing(lambda disk: save(disk, 2), lambda: disk_with(*steps))
    assert len(disks) > 10
    for number, failing in enumerate(disks):
        inner = failing._disk
        assert isinstance(inner, SimulatedDisk)
        for disk in (inner, *inner.crashes()):
            assert loaded_step(disk) in (old, 2), (number, failing.calls)


def test_stock_loads_what_a_crash_leaves(tmp_path: Path) -> None:
    inner = disk_with(1)
    states: list[SimulatedDisk] = []
    save(WatchedDisk(inner, before=lambda _: states.extend(inner.crashes())), 2)
    for number, state in enumerate(states):
        directory = tmp_path / str(number)
        state.copy_to(DIRECTORY, directory)
        state_dict = {"w": torch.zeros(5)}
        dcp.load(state_dict, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        assert state_dict["w"][0].item() in (1.0, 2.0)


def test_a_failed_commit_leaves_no_temporary_file() -> None:
    for operation in ("pwrite", "fsync", "fsync_directory", "rename"):
        inner = disk_with(1)
        number = ["open_new", "pwrite", "fsync", "close", "fsync_directory", "rename"].index(operation)
        with pytest.raises(StorageError) as caught:
            commit_metadata(WatchedDisk(inner, fail_at=number, code=errno.ENOSPC), DIRECTORY, b"new")
        assert caught.value.errno == errno.ENOSPC
        assert inner.list_directory(DIRECTORY) == [".metadata", data_file_name(0, 0, "1")]


def test_saves_replace_each_other_on_a_real_disk(tmp_path: Path) -> None:
    disk = PosixDisk()
    for step in (1, 2, 3):
        save(disk, step, str(tmp_path))
        assert loaded_step(disk, str(tmp_path)) == step
        assert disk.list_directory(str(tmp_path)) == [".metadata", data_file_name(0, 0, str(step))]


def test_a_file_that_cannot_be_removed_is_reported_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    disk = WatchedDisk(disk_with(1, 2), fail_at=0, code=errno.EACCES)
    name = data_file_name(0, 0, "2")
    assert remove_data_files(disk, DIRECTORY, [name, data_file_name(5, 5)]) == [name]
    assert "not removed" in caplog.text


def test_what_the_committed_checkpoint_names_is_never_removed() -> None:
    disk = disk_with(1)
    metadata = decode_metadata(encode_metadata(write_data(disk_with(), 1)), ".metadata")
    assert remove_data_files(disk, DIRECTORY, [data_file_name(0, 0, "1")], keep=referenced_files(metadata)) == []
    assert loaded_step(disk) == 1
    with pytest.raises(UnsafeCheckpoint):
        remove_data_files(disk, DIRECTORY, ["../other/__0_0.distcp"])
