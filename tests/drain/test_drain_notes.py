"""What a checkpoint notes of its copy, when the note cannot be made, cannot be read, or is of another save."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import CheckpointManager, RobustWriter, StorageError, copy_checkpoint, nearest_copy
from robust_dcp.contents.read import read_contents
from robust_dcp.drain.record import (
    DRAIN_RECORD_NAME,
    DrainRecord,
    is_awaited,
    read_drain_record,
    write_drain_record,
)
from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.drain.checkpoints import loaded, save_ours, state_dict
from tests.harness.ranks import run_ranks, values


def save_id_of(path: Path) -> str:
    return read_contents(PosixDisk(), str(path)).save_id or ""


def note(path: Path, target: Path) -> DrainRecord:
    """Note that the checkpoint at ``path`` will be copied."""
    record = DrainRecord(str(target), save_id_of(path), is_complete=False)
    write_drain_record(PosixDisk(), str(path), record)
    return record


class _RefusesNotes(PosixDisk):
    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) == DRAIN_RECORD_NAME:
            error = OSError(errno.EACCES, "Permission denied")
            raise storage_error("rename", target, error) from error
        super().rename(source, target)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"target": 3}', b""])
def test_a_note_that_cannot_be_understood_keeps_no_checkpoint_from_being_removed(
    content: bytes, tmp_path: Path
) -> None:
    for step in (1, 2):
        save_ours(str(tmp_path / f"step_{step}"))
    (tmp_path / "step_1" / DRAIN_RECORD_NAME).write_bytes(content)
    assert nearest_copy([tmp_path / "step_1"]) == str(tmp_path / "step_1")
    assert CheckpointManager(tmp_path, keep_last=1).prune() == [str(tmp_path / "step_1")]


def test_a_checkpoint_whose_metadata_cannot_be_read_counts_as_one_whose_copy_is_awaited(tmp_path: Path) -> None:
    class Unreadable(PosixDisk):
        def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
            if path.endswith(".metadata"):
                raise storage_error("open", path, OSError(errno.EIO, "Input/output error"))
            return super().open_read(path, direct=direct)

    save_ours(str(tmp_path / "step_1"))
    write_drain_record(PosixDisk(), str(tmp_path / "step_1"), DrainRecord("elsewhere", "another save", False))
    assert not is_awaited(PosixDisk(), str(tmp_path / "step_1"))
    assert is_awaited(Unreadable(), str(tmp_path / "step_1"))


def test_a_drain_to_a_place_that_cannot_be_noted_arrives_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = f"{tmp_path}/dur\udcffable"  # a name that is no UTF-8
    robust_dcp.save(state_dict(), storage_writer=RobustWriter(tmp_path / "local", drain_to=target))
    robust_dcp.finish_async_saves()
    assert loaded(target) == 1.0
    assert "nobody will know where its copy is" in caplog.text
    assert "is no UTF-8; give the target another name" in caplog.text


def test_a_copy_that_has_arrived_is_a_copy_although_that_cannot_be_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_ours(str(tmp_path / "local"))
    note(tmp_path / "local", tmp_path / "durable")
    copy_checkpoint(tmp_path / "local", tmp_path / "durable", disk=_RefusesNotes())
    assert loaded(tmp_path / "durable") == 1.0
    assert "has arrived at" in caplog.text and "that cannot be noted" in caplog.text
    assert is_awaited(PosixDisk(), str(tmp_path / "local"))  # so it stays, and is copied once more


def test_the_save_that_comes_right_after_a_copy_is_not_taken_for_the_one_that_has_arrived(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "local"))

    class ReplacedAtTheEnd(PosixDisk):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if target == f"{tmp_path}/durable/.metadata":
                robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "local")
                note(tmp_path / "local", tmp_path / "durable")

    copy_checkpoint(tmp_path / "local", tmp_path / "durable", disk=ReplacedAtTheEnd())
    assert loaded(tmp_path / "durable") == 1.0
    assert is_awaited(PosixDisk(), str(tmp_path / "local"))


class _Slow(PosixDisk):
    """Makes no file at ``slow`` before the event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if "/slow/" in path:
            assert self.goes_on.wait(60)
        return super().open_new(path, direct=direct)


def test_a_drain_whose_turn_comes_after_the_next_save_into_its_directory_leaves_the_copy_to_that_one(
    tmp_path: Path,
) -> None:
    disk = _Slow()
    robust_dcp.save(
        state_dict(), storage_writer=RobustWriter(tmp_path / "other", drain_to=tmp_path / "slow", disk=disk)
    )
    for value in (2.0, 3.0):
        writer = RobustWriter(tmp_path / "local", drain_to=tmp_path / f"durable_{value:g}")
        robust_dcp.save(state_dict(value), storage_writer=writer)
    disk.goes_on.set()
    robust_dcp.finish_async_saves()
    assert loaded(tmp_path / "durable_3") == 3.0
    assert not (tmp_path / "durable_2").exists()
    record = read_drain_record(PosixDisk(), str(tmp_path / "local"))
    assert record is not None and record.is_complete and record.target.endswith("durable_3")


class TestStaging:
    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "not/yet"))
        return tmp_path / "not/yet"

    def test_it_is_gone_when_the_copy_has_arrived(self, root: Path) -> None:
        robust_dcp.save(state_dict(), checkpoint_id="memory://staged/step_1")
        assert loaded("memory://staged/step_1") == 1.0 and list(root.iterdir()) == []

    def test_it_stays_if_that_is_asked_for(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROBUST_DCP_KEEP_STAGING", "1")
        robust_dcp.save(state_dict(), checkpoint_id="memory://staged/step_2")
        (staged,) = root.iterdir()
        assert loaded(staged) == 1.0


class TestNearestCopy:
    def test_without_a_place_there_is_none(self) -> None:
        with pytest.raises(ValueError, match="nearest_copy needs at least one place"):
            nearest_copy([])

    def test_a_data_file_of_another_save_makes_a_copy_half_a_copy(self, tmp_path: Path) -> None:
        near, far = tmp_path / "near", tmp_path / "far"
        save_ours(str(far))
        copy_checkpoint(far, near)
        save_ours(str(tmp_path / "other"))
        shutil.copy(tmp_path / "other/__0_0.distcp", near / "__0_0.distcp")
        assert nearest_copy([near, far]) == str(far)
        with pytest.raises(
            StorageError, match=r"__0_0\.distcp is not what \.metadata beside it names: expected the mark"
        ):
            nearest_copy([near])

    def test_a_directory_in_which_ranks_see_different_saves_is_taken_by_none(self, tmp_path: Path) -> None:
        save_ours(str(tmp_path / "far"))
        for rank in range(2):
            robust_dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / f"rank_{rank}/near")
        found = values(run_ranks(2, _nearest_or_why, str(tmp_path)))
        assert found[0] == found[1] and found[0][0] == f"{tmp_path}/far"
        assert "some ranks see save" in found[0][1]


def _nearest_or_why(root: str) -> tuple[str, Any]:
    os.chdir(f"{root}/rank_{dist.get_rank()}")  # a path that each rank sees otherwise, as nodes do
    taken = nearest_copy(["near", f"{root}/far"])
    with pytest.raises(StorageError) as raised:
        nearest_copy(["near"])
    return taken, raised.value.message
