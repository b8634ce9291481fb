"""What becomes of a call that a file system refuses: another way where there is one, else an error with the path."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robust_dcp.errors import StorageError
from robust_dcp.storage.files import posix_disk
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.fixture
def disk() -> PosixDisk:
    return PosixDisk()


@pytest.fixture
def file(disk: PosixDisk, tmp_path: Path) -> Any:
    made = disk.open_new(str(tmp_path / "file"))
    yield made
    disk.close(made)


def test_a_system_that_writes_nothing_is_an_error_and_no_endless_loop(
    disk: PosixDisk, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError, match="the system wrote nothing") as caught:
        disk.pwrite(file, b"data", 0)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, file.path)


def fallocate_that_fails(*codes: int) -> tuple[list[int], Callable[..., int]]:
    left = list(codes)

    def fallocate(*_: int) -> int:
        if not left:
            return 0
        ctypes.set_errno(left.pop(0))
        return -1

    return left, fallocate


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_space_cannot_be_reserved_a_save_goes_on_without(
    code: int, disk: PosixDisk, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fallocate = fallocate_that_fails(code)
    monkeypatch.setattr(posix_disk, "_fallocate", lambda: fallocate)
    assert disk.preallocate(file, 4096) is False
    monkeypatch.setattr(posix_disk, "_fallocate", lambda: None)
    assert disk.preallocate(file, 4096) is False
    assert disk.preallocate(file, 0) is True


def test_a_reservation_that_a_signal_interrupts_is_asked_for_again(
    disk: PosixDisk, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, fallocate = fallocate_that_fails(errno.EINTR, errno.EINTR)
    monkeypatch.setattr(posix_disk, "_fallocate", lambda: fallocate)
    assert disk.preallocate(file, 4096) is True and not left


def test_a_reservation_for_which_there_is_no_room_is_an_error(
    disk: PosixDisk, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fallocate = fallocate_that_fails(errno.ENOSPC)
    monkeypatch.setattr(posix_disk, "_fallocate", lambda: fallocate)
    with pytest.raises(StorageError, match="preallocate") as caught:
        disk.preallocate(file, 4096)
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, file.path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_directories_is_no_error(
    code: int, disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(code))
    disk.fsync_directory(str(tmp_path))


def test_a_directory_that_fails_to_sync_is_an_error(
    disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(StorageError, match="fsync directory") as caught:
        disk.fsync_directory(str(tmp_path))
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path))


def test_directories_that_could_not_be_made_durable_are_removed_again(
    disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(StorageError):
        disk.mkdirs(str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(disk: PosixDisk) -> None:
    with pytest.raises(StorageError, match="create directory /proc/nothing") as caught:
        disk.mkdirs("/proc/nothing/here")
    assert caught.value.path == "/proc/nothing"


def test_what_is_no_regular_file_is_no_lock(disk: PosixDisk, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="it is a FIFO"):
        disk.open_lock(str(tmp_path / "lock"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_locks_are_refused_nobody_is_said_to_hold_one(
    disk: PosixDisk, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    assert disk.lock(file) is None


def test_a_path_that_may_not_be_looked_at_is_not_taken_for_missing(
    disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "stat", refusing(errno.EACCES))
    with pytest.raises(StorageError) as caught:
        disk.exists(str(tmp_path))
    assert caught.value.errno == errno.EACCES


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags = fcntl.fcntl

    def without_direct(fd: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return set_flags(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without_direct)


def without_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_disk, "alignment_of", lambda _: None)


def without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_disk, "_O_DIRECT", 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (refuse_direct, "the file system refuses O_DIRECT: Invalid argument"),
        (without_alignment, "the file system has no direct I/O"),
        (without_the_flag, "this system has no O_DIRECT"),
    ],
)
def test_where_there_is_no_direct_io_the_file_is_written_through_the_page_cache_and_says_why(
    change: Callable[[pytest.MonkeyPatch], None],
    why: str,
    disk: PosixDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    file = disk.open_new(str(tmp_path / "direct"), direct=True)
    assert (file.alignment, file.why_buffered) == (None, why)
    assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    disk.pwrite(file, b"unaligned", 3)
    disk.close(file)
    assert (tmp_path / "direct").read_bytes() == bytes(3) + b"unaligned"
