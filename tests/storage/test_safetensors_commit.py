"""Readers of safetensors, which know nothing of commits, find all files or none; in between ``.metadata`` decides."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustCheckpointError, RobustReader, RobustWriter, StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.fingerprints import differences
from tests.storage.sources import DIRECTORY, content_of
from tests.support.simulated_disk import SimulatedDisk, WatchedDisk, runs_with_each_call_failing
from tests.support.torch_versions import needs_safetensors

StateDict = dict[str, Any]


def state_dict_of(step: int) -> StateDict:
    return {**{f"w{n}": torch.full((300,), float(step + n)) for n in range(3)}, "step": step}


def save(disk: Disk, step: int = 1, directory: str = DIRECTORY, **options: Any) -> None:
    writer = RobustWriter(directory, layout="safetensors", disk=disk, threads=1, files_per_rank=2, **options)
    robust_dcp.save(state_dict_of(step), storage_writer=writer, no_dist=True)


def loaded_step(disk: Disk, directory: str = DIRECTORY) -> int | None:
    """The step that loads; ``None`` where nothing was committed. Any damage raises."""
    if not disk.exists(f"{directory}/.metadata"):
        return None
    found = state_dict_of(-1)
    dcp.load(found, storage_reader=RobustReader(directory, disk=disk), no_dist=True)
    assert differences(state_dict_of(found["step"]), found) == []
    return int(found["step"])


def shards_in(disk: Disk, directory: str = DIRECTORY) -> list[str]:
    if not disk.exists(directory):
        return []
    return [name for name in disk.list_directory(directory) if name.endswith(".safetensors")]


def distinct(disks: Iterator[SimulatedDisk]) -> list[SimulatedDisk]:
    found = {}
    for disk in disks:
        names = disk.list_directory(DIRECTORY) if disk.exists(DIRECTORY) else []
        found[tuple((name, content_of(disk, name)) for name in names)] = disk
    return list(found.values())


def names_of_a_save() -> list[str]:
    disk = SimulatedDisk()
    save(disk)
    return shards_in(disk)


def test_after_a_save_there_are_two_files_and_one_beside_them(tmp_path: Path) -> None:
    save(PosixDisk(), directory=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [
        ".metadata",
        ".robust_dcp.index",
        ".robust_dcp.report.json",
        "__0_2.distcp",
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00001-model-00002-of-00002.safetensors",
    ]


def test_data_files_get_their_names_between_the_bytes_of_the_metadata_and_its_name() -> None:
    disk = WatchedDisk(SimulatedDisk())
    save(disk)
    first = next(n for n, (call, path) in enumerate(disk.calls) if call == "open_new" and ".metadata" in path)
    written = ["open_new", "pwrite", "fsync", "close"]  # .metadata, then its index
    named = ["rename", "rename"]  # the data files, then the index and .metadata
    expected = [*written, *written, *named, "fsync_directory", *named, "fsync_directory"]
    changing = [
        call for call, path in disk.calls[first:] if call in ("rename", "fsync_directory") or path.endswith(".tmp")
    ]
    assert changing[: len(expected)] == expected


def test_a_crash_before_any_call_leaves_nothing_or_everything() -> None:
    inner = SimulatedDisk()
    everything = names_of_a_save()
    found: list[tuple[int | None, int]] = []

    def crash(_: int) -> None:
        for crashed in distinct(inner.crashes()):
            step, shards = loaded_step(crashed), shards_in(crashed)
            assert set(shards) <= set(everything)
            if step is not None:
                assert shards == everything
            found.append((step, len(shards)))

    save(WatchedDisk(inner, before=crash))
    crash(-1)
    # Some of the files alone: only while they are renamed, when there is no .metadata yet.
    assert set(found) == {(None, 0), (None, 1), (None, 2), (1, 2)}
    assert found[-1] == (1, 2)


@needs_safetensors
def test_stock_reads_what_a_crash_leaves_once_all_files_have_their_names(tmp_path: Path) -> None:
    inner = SimulatedDisk()
    states: list[SimulatedDisk] = []
    save(WatchedDisk(inner, before=lambda _: states.extend(distinct(inner.crashes()))))
    complete = [state for state in states if len(shards_in(state)) == 2]
    assert complete
    for number, state in enumerate(complete):
        directory = tmp_path / str(number)
        state.copy_to(DIRECTORY, directory)
        found = {f"w{n}": torch.zeros(300) for n in range(3)}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
        assert differences({name: state_dict_of(1)[name] for name in found}, found) == []


def test_our_reader_refuses_files_that_were_not_committed() -> None:
    inner = SimulatedDisk()
    states: list[SimulatedDisk] = []
    save(WatchedDisk(inner, before=lambda _: states.extend(distinct(inner.crashes()))))
    halfway = [state for state in states if shards_in(state) and not state.exists(f"{DIRECTORY}/.metadata")]
    assert {len(shards_in(state)) for state in halfway} == {1, 2}
    for state in halfway:
        with pytest.raises(CorruptCheckpoint, match="was not committed"):
            RobustReader(DIRECTORY, disk=state).read_metadata()


def test_the_next_save_removes_what_a_crash_has_left() -> None:
    inner = SimulatedDisk()
    states: list[SimulatedDisk] = []
    save(WatchedDisk(inner, before=lambda _: states.extend(distinct(inner.crashes()))))
    uncommitted = [state for state in states if not state.exists(f"{DIRECTORY}/.metadata")]
    clean = {".metadata", ".robust_dcp.index", ".robust_dcp.report.json", *names_of_a_save()}
    for state in distinct(iter(uncommitted)):
        save(state, 5)
        assert loaded_step(state) == 5
        assert {name for name in state.list_directory(DIRECTORY) if not name.endswith(".distcp")} == clean
        assert sum(name.endswith(".distcp") for name in state.list_directory(DIRECTORY)) == 1


def test_a_call_that_fails_leaves_nothing_or_everything() -> None:
    disks = runs_with_each_call_failing(save, SimulatedDisk)
    everything = names_of_a_save()
    outcomes = set()
    for number, failing in enumerate(disks):
        inner = failing._disk
        assert isinstance(inner, SimulatedDisk)
        step, shards = loaded_step(inner), shards_in(inner)
        assert shards in ([], everything), (number, failing.calls)
        assert step is None or shards == everything
        outcomes.add((step, len(shards)))
    assert (None, 0) in outcomes
    assert (1, 2) in outcomes


@pytest.mark.parametrize("operation", ["pwrite", "fsync", "close"])
def test_a_rank_that_fails_to_write_leaves_nothing(tmp_path: Path, operation: str) -> None:
    class Failing(PosixDisk):
        def __getattribute__(self, name: str) -> Any:
            method = super().__getattribute__(name)
            if name != operation:
                return method

            def call(file: OpenFile, *args: Any) -> Any:
                if file.fd >= 0 and file.path.endswith(".part") and "00002.safetensors" in file.path:
                    os.close(file.fd)
                    file.fd = -1
                    raise StorageError("no", path=file.path, errno=5, operation=operation)
                return method(file, *args)

            return call

    with pytest.raises(StorageError, match="no"):
        save(Failing(), directory=str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_rename_that_fails_is_undone(tmp_path: Path) -> None:
    class NoSecondRename(PosixDisk):
        renames = 0

        def rename(self, source: str, target: str) -> None:
            self.renames += 1
            if self.renames == 2:
                raise StorageError("no", path=target, errno=5, operation="rename")
            super().rename(source, target)

    with pytest.raises(RobustCheckpointError, match="no"):
        save(NoSecondRename(), directory=str(tmp_path))
    assert os.listdir(tmp_path) == []
    save(PosixDisk(), 2, directory=str(tmp_path))
    assert loaded_step(PosixDisk(), str(tmp_path)) == 2


def test_the_links_of_a_killed_save_are_removed_with_their_targets(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class KilledAtMetadata(PosixDisk):
        def rename(self, source: str, target: str) -> None:
            if target.endswith(".metadata"):
                raise Killed
            super().rename(source, target)

        def unlink(self, path: str) -> None:
            if not path.endswith(".tmp"):
                raise Killed

    stripe = tmp_path / "stripe"
    stripe.mkdir()
    directory = str(tmp_path / "checkpoint")
    with contextlib.suppress(Killed, RobustCheckpointError):
        save(KilledAtMetadata(), directory=directory, stripe_paths=[stripe])
    assert len(shards_in(PosixDisk(), directory)) == 2
    save(PosixDisk(), 3, directory=directory, stripe_paths=[stripe])
    assert loaded_step(PosixDisk(), directory) == 3
    targets = [name for _, _, names in os.walk(stripe) for name in names]
    assert sorted(name.split(".part")[0].rsplit(".", 1)[0] for name in targets if "shard" in name) == shards_in(
        PosixDisk(), directory
    )
    tensors = [load_file(os.path.join(directory, name)) for name in shards_in(PosixDisk(), directory)]
    assert sum(map(len, tensors)) == 3
