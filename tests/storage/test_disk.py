"""The file system's calls are completed, made durable and reported as they are promised to be."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk


@pytest.fixture
def disk() -> PosixDisk:
    return PosixDisk()


def test_what_is_written_in_pieces_is_read_back(disk: PosixDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    file = disk.open_new(path)
    disk.pwrite(file, [b"abc", b"", bytearray(b"def")], 2)
    disk.pwrite(file, b"xy", 0)
    disk.fsync(file)
    disk.close(file)
    buffer = bytearray(10)
    file = disk.open_read(path)
    assert disk.pread_into(file, buffer, 0) == 8 == disk.size(path)
    assert buffer[:8] == b"xyabcdef"
    disk.close(file)
    disk.close(file)


def test_more_buffers_than_one_call_takes_are_all_written(disk: PosixDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    file = disk.open_new(path)
    disk.pwrite(file, [bytes([number % 256]) for number in range(3000)], 0)
    disk.close(file)
    assert Path(path).read_bytes() == bytes(number % 256 for number in range(3000))


def test_short_writes_and_reads_are_continued(disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv

    def short_write(fd: int, buffers: list[Any], offset: int) -> int:
        return pwritev(fd, [memoryview(buffers[0])[:3]], offset)

    def short_read(fd: int, buffers: list[Any], offset: int) -> int:
        return preadv(fd, [memoryview(buffers[0])[:2]], offset)

    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    path = str(tmp_path / "file")
    file = disk.open_new(path)
    disk.pwrite(file, [b"0123456789", b"abcde"], 0)
    disk.close(file)
    buffer = bytearray(15)
    file = disk.open_read(path)
    assert disk.pread_into(file, buffer, 0) == 15
    assert bytes(buffer) == b"0123456789abcde"
    disk.close(file)


def test_a_file_that_exists_is_never_opened_for_writing(disk: PosixDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"committed")
    with pytest.raises(StorageError, match="no save overwrites it") as caught:
        disk.open_new(str(tmp_path / "file"))
    assert caught.value.errno == errno.EEXIST
    assert caught.value.path == str(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"committed"


def test_a_full_disk_is_reported_with_what_to_do(disk: PosixDisk) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    file = OpenFile("/dev/full", os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(StorageError, match=r"ENOSPC.*free space") as caught:
        disk.pwrite(file, b"x", 0)
    assert (caught.value.errno, caught.value.operation) == (errno.ENOSPC, "write")
    disk.close(file)


def test_a_file_size_limit_is_an_error_and_no_signal(disk: PosixDisk, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = disk.open_new(str(tmp_path / "file"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="ulimit -f") as caught:
            disk.pwrite(file, bytes(2000), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        disk.close(file)
    assert caught.value.errno == errno.EFBIG


def test_after_a_failed_fsync_the_file_is_given_up(
    disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fails_once(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails_once)
    file = disk.open_new(str(tmp_path / "file"))
    for _ in range(2):
        with pytest.raises(StorageError):
            disk.fsync(file)
    assert len(calls) == 1
    disk.close(file)


def test_space_is_reserved_before_anything_is_written(disk: PosixDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    file = disk.open_new(path)
    if disk.preallocate(file, 1 << 20):
        assert os.stat(path).st_blocks * 512 >= 1 << 20
    disk.truncate(file, 10)
    disk.close(file)
    assert disk.size(path) == 10


def test_a_new_directory_is_durable_in_every_parent_that_was_missing(
    disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(PosixDisk, "fsync_directory", lambda self, path: synced.append(path))
    disk.mkdirs(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    disk.mkdirs(str(tmp_path / "a" / "b"))
    assert synced[2:] == [str(tmp_path / "a")]


def test_a_file_in_the_way_of_a_directory_is_reported(disk: PosixDisk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        disk.mkdirs(str(tmp_path / "a"))
    assert caught.value.errno == errno.EEXIST
    assert "save to another directory" in str(caught.value)


def test_names_can_be_changed_listed_linked_and_removed(disk: PosixDisk, tmp_path: Path) -> None:
    disk.close(disk.open_new(str(tmp_path / "b")))
    disk.rename(str(tmp_path / "b"), str(tmp_path / "a"))
    disk.symlink(str(tmp_path / "a"), str(tmp_path / "link"))
    assert disk.list_directory(str(tmp_path)) == ["a", "link"]
    assert disk.resolve(str(tmp_path / "link")) == os.path.realpath(tmp_path / "a")
    disk.unlink(str(tmp_path / "a"))
    assert not disk.exists(str(tmp_path / "link"))
    disk.fsync_directory(str(tmp_path))
    with pytest.raises(StorageError, match="ENOENT"):
        disk.unlink(str(tmp_path / "a"))
