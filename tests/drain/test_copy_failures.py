"""A copy between directories in which a disk refuses, a file vanishes, or an earlier copy was cut off."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import robust_dcp
from robust_dcp import CopyOptions, CorruptCheckpoint, StorageError, copy_checkpoint
from robust_dcp.drain.copy import Copy
from robust_dcp.drain.plan import CopyPlan
from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts.footer import TAIL_NBYTES
from tests.drain.checkpoints import (
    IMPATIENT,
    ONE_THREAD,
    files_of,
    loaded,
    save_like_megatron,
    save_ours,
    state_dict,
)
from tests.harness.ranks import run_ranks


def test_a_full_disk_ends_the_copy_at_once_and_leaves_room_to_go_on(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    disk = _Full(room_nbytes=50_000)
    with pytest.raises(StorageError, match=r"No space left on device.*free space") as raised:
        copy_checkpoint(tmp_path / "source", tmp_path / "target", options=ONE_THREAD, disk=disk)
    assert (raised.value.errno, disk.refused) == (errno.ENOSPC, 1)  # asking again does not help
    assert not [name for name in files_of(tmp_path / "target") if name.endswith(".copying")]
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert loaded(tmp_path / "target") == 1.0


class _Full(PosixDisk):
    def __init__(self, room_nbytes: int) -> None:
        super().__init__()
        self.room_nbytes = room_nbytes
        self.refused = 0

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        self.room_nbytes -= len(data)
        if self.room_nbytes < 0:
            self.refused += 1
            error = OSError(errno.ENOSPC, "No space left on device")
            raise storage_error("write", file.path, error) from error
        super().pwrite(file, data, offset)


def test_a_disk_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    disk = _FailsOnce()
    result = copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert disk.has_failed and result.retries == 1
    assert loaded(tmp_path / "target") == 1.0


class _FailsOnce(PosixDisk):
    has_failed = False

    def fsync(self, file: OpenFile) -> None:
        if not self.has_failed and ".distcp" in file.path:
            self.has_failed = True
            error = OSError(errno.EIO, "Input/output error")
            raise storage_error("fsync", file.path, error) from error
        super().fsync(file)


class _Acts(PosixDisk):
    """Does something right before a call for a path: what another program does meanwhile, or what the disk refuses."""

    def __init__(self, call: str, part: str, act: Callable[[str], None]) -> None:
        super().__init__()
        self.call, self.part, self.act = call, part, act
        self.n_acted = 0

    def _at(self, call: str, path: str) -> None:
        if call == self.call and self.part in path:
            self.n_acted += 1
            self.act(path)

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        self._at("open", path)
        return super().open_read(path, direct=direct)

    def size(self, file: OpenFile | str) -> int:
        self._at("size", file.path if isinstance(file, OpenFile) else file)
        return super().size(file)

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        self._at("read", file.path)
        return super().pread_into(file, buffer, offset)

    def rename(self, source: str, target: str) -> None:
        self._at("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._at("unlink", path)
        super().unlink(path)


def _refuse(path: str) -> None:
    error = OSError(errno.EACCES, "Permission denied")
    raise storage_error("use", path, error) from error


@pytest.mark.parametrize(("call", "expected"), [("open", "No such file"), ("read", "was cut off or replaced")])
def test_a_file_that_vanishes_or_shrinks_while_it_is_copied_is_named(call: str, expected: str, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    disk = _Acts(call, "source/__0_0.distcp", os.unlink if call == "open" else lambda path: os.truncate(path, 10))
    with pytest.raises(StorageError, match=rf"source/__0_0\.distcp.*{expected}"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target", options=IMPATIENT, disk=disk)
    assert not (tmp_path / "target/.metadata").exists()


def test_a_file_that_cannot_be_read_is_not_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    for call in ("open", "read"):
        disk = _Acts(call, "source/.metadata", _refuse)
        with pytest.raises(StorageError, match=r"source/\.metadata.*Permission denied"):
            copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)


def test_metadata_of_an_impossible_size_is_not_read(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    os.truncate(tmp_path / "source/.metadata", 17 << 30)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata cannot be used: expected at most \d+ bytes, found"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target")


def _copy_until_killed(source: str, target: str) -> None:
    disk = _Acts("rename", "__0_0.distcp", lambda path: os.kill(os.getpid(), signal.SIGKILL))
    copy_checkpoint(source, target, options=ONE_THREAD, disk=disk)


def test_half_a_file_of_a_copy_that_was_killed_is_removed_by_the_copy_that_goes_on(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    run_ranks(1, _copy_until_killed, str(tmp_path / "source"), str(tmp_path / "target"), init=False)
    assert [name for name in files_of(tmp_path / "target") if name.endswith(".copying")]
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert files_of(tmp_path / "target") == files_of(tmp_path / "source") - {".robust_dcp.lock"}
    assert loaded(tmp_path / "target") == 1.0


def test_a_copy_goes_on_although_its_own_note_at_the_target_is_damaged(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    with pytest.raises(StorageError):
        copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=_Acts("rename", "target/.metadata", _refuse))
    (note,) = (tmp_path / "target").glob(".robust_dcp.copying.*")
    note.write_bytes(b"\xff{")
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert loaded(tmp_path / "target") == 1.0
    assert not note.exists()


def test_a_checkpoint_whose_metadata_is_damaged_is_replaced_and_its_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_ours(str(tmp_path / "source"))
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "target")
    before = files_of(tmp_path / "target")
    (tmp_path / "target/.metadata").write_bytes(b"no metadata")
    copied = copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert loaded(tmp_path / "target") == 1.0
    assert copied.removed == (".robust_dcp.index",)  # it is of that checkpoint, and a load would believe it
    assert files_of(tmp_path / "target") >= before - {".robust_dcp.index"}
    assert "files of the checkpoint that is replaced stay" in caplog.text


def test_files_of_the_checkpoint_before_that_cannot_be_removed_cost_space_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_ours(str(tmp_path / "source"))
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "target")
    disk = _Acts("unlink", "target/__0_1.distcp", lambda path: None if path.endswith(".copying") else _refuse(path))
    copied = copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert loaded(tmp_path / "target") == 1.0
    assert (tmp_path / "target/__0_1.distcp").exists() and "__0_1.distcp" not in copied.removed
    assert "is committed, but files of the one before stay" in caplog.text


def test_what_another_copy_has_removed_already_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_ours(str(tmp_path / "source"))
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "target")
    disk = _Acts("unlink", "target/__0_1.distcp", lambda path: (os.path.exists(path) and os.unlink(path)) or None)
    copied = copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert "__0_1.distcp" in copied.removed and not (tmp_path / "target/__0_1.distcp").exists()
    assert caplog.text == ""


def test_a_copy_that_cannot_go_on_says_which_of_its_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_ours(str(tmp_path / "source"))
    disk = _Acts("unlink", "target/__0_0.distcp", lambda path: None if path.endswith(".copying") else _refuse(path))

    def replace(done_nbytes: int, total_nbytes: int) -> None:
        if done_nbytes == total_nbytes:
            robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "source")

    with pytest.raises(StorageError, match="was replaced by another save while it was copied"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target", progress=replace, disk=disk)
    assert "files of a copy that cannot go on stay" in caplog.text
    assert not (tmp_path / "target/.metadata").exists()


def test_what_other_programs_keep_beside_a_checkpoint_is_told_from_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_ours(str(source))
    before = files_of(source)
    (tmp_path / "notes.txt").write_text("not of the checkpoint")
    (source / "notes.txt").symlink_to(tmp_path / "notes.txt")
    (source / "__0.metadata").write_bytes((source / ".metadata").read_bytes())  # of a save without collectives
    (source / "half.tmp").write_bytes(b"half")
    copy_checkpoint(source, tmp_path / "target")
    assert files_of(tmp_path / "target") == before - {".robust_dcp.lock"}


def test_a_file_beside_the_data_that_cannot_be_sent_ends_the_copy_before_its_commit(tmp_path: Path) -> None:
    save_like_megatron(str(tmp_path / "source"))
    disk = _Acts("rename", "target/common.pt", _refuse)
    with pytest.raises(StorageError, match=r"target/common\.pt.*Permission denied"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert not (tmp_path / "target/.metadata").exists()


def test_files_that_another_program_removes_at_the_target_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    disk = _Acts("rename", "target/.robust_dcp.report.json", lambda _: os.unlink(tmp_path / "target/__0_1.distcp"))
    with pytest.raises(StorageError, match=r"target lacks files that this copy has sent: __0_1\.distcp; another prog"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert not (tmp_path / "target/.metadata").exists()
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert loaded(tmp_path / "target") == 1.0


def test_a_source_whose_checksums_are_damaged_is_named_and_not_copied(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    path = tmp_path / "source/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[-TAIL_NBYTES - 10] ^= 1  # of the checksums of blocks
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp is damaged, and is not copied: expected checksums"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target")


def test_the_steps_of_a_copy_have_an_order(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    copy = Copy(tmp_path / "source", tmp_path / "target", CopyOptions())
    for step in (lambda: copy.inventory, lambda: copy.send_data([]), lambda: copy.commit({})):
        with pytest.raises(RuntimeError, match="comes first"):
            step()
    copy.follow(CopyPlan("0" * 16, {}, {}))
    copy.send_data([])  # a rank with no files, at a target that does not exist yet
    assert not (tmp_path / "target").exists()
