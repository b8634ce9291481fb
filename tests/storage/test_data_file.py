"""DataFile reads the same bytes past the page cache as through it, and finds its way back where that is refused."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import StorageError
from robust_dcp.staging.blocks import BlockLease, BlockPool
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.record import bytes_of
from tests.support.simulated_disk import WatchedDisk

FILE_NBYTES = 3 * (1 << 20) + 1234
BLOCK_NBYTES = 2 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "data"
    data = torch.randint(0, 256, (FILE_NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    path.write_bytes(data.numpy().tobytes())
    return path


def forget(path: Path) -> None:
    """Have the kernel drop the file from its page cache."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def blocks() -> BlockLease:
    """Room for ``BLOCK_NBYTES``, wherever they begin in a file."""
    return BlockPool().lease(BLOCK_NBYTES + 2 * PAGE_NBYTES, 2)


ranges = st.tuples(st.integers(0, FILE_NBYTES), st.integers(0, BLOCK_NBYTES))


@settings(max_examples=40, deadline=None)
@given(ranges, st.sampled_from([None, False]), st.booleans())
def test_a_block_holds_the_bytes_of_the_file(
    file: Path, place: tuple[int, int], direct: bool | None, cached: bool
) -> None:
    offset, nbytes = place
    if not cached:
        forget(file)
    opened = DataFile(Disk(), str(file), direct)
    block = blocks().take()
    start, found = opened.read_block(block, offset, nbytes)
    opened.close()
    assert block.memory[start : start + found] == file.read_bytes()[offset : offset + nbytes]


@settings(max_examples=40, deadline=None)
@given(ranges, st.integers(0, PAGE_NBYTES), st.booleans(), st.booleans())
def test_a_piece_holds_the_bytes_of_the_file(
    file: Path, place: tuple[int, int], shift: int, aligned: bool, cached: bool
) -> None:
    offset, nbytes = place
    memory = torch.zeros(BLOCK_NBYTES + 3 * PAGE_NBYTES, dtype=torch.uint8)
    if aligned:  # with its place in the file, so that direct I/O needs no copy
        shift = (offset - memory.data_ptr()) % PAGE_NBYTES
    target = memory[shift : shift + nbytes]
    if not cached:
        forget(file)
    opened = DataFile(Disk(), str(file), None)
    found, checksum = opened.read_piece(bytes_of(target), target.data_ptr(), offset, blocks(), checksum=True)
    opened.close()
    expected = file.read_bytes()[offset : offset + nbytes]
    assert target.numpy().tobytes()[:found] == expected
    assert checksum == zlib.crc32(expected)
    assert not memory[:shift].any() and not memory[shift + nbytes :].any()


class Refusing(Disk):
    """Takes O_DIRECT when the file is opened, or not even then, and refuses to read by it."""

    def __init__(self, at_open: bool) -> None:
        self.at_open = at_open
        self.direct: list[OpenFile] = []

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        if direct and self.at_open:
            opened = super().open_read(path)
            opened.why_buffered = "the file system refuses O_DIRECT: Invalid argument"
            return opened
        opened = super().open_read(path, direct=direct)
        if direct:
            self.direct.append(opened)
        return opened

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        if file in self.direct:
            raise storage_error("read", file.path, OSError(errno.EINVAL, "Invalid argument"))
        return super().pread_into(file, buffer, offset)


@pytest.mark.parametrize("at_open", [False, True])
def test_where_direct_reads_are_refused_the_page_cache_is_used(file: Path, at_open: bool) -> None:
    disk = WatchedDisk(Refusing(at_open))
    forget(file)
    opened = DataFile(disk, str(file), None)
    lease = blocks()
    block = lease.take()
    for offset in (0, 12345):
        start, found = opened.read_block(block, offset, 1 << 20)
        assert block.memory[start : start + found] == file.read_bytes()[offset : offset + (1 << 20)]
        forget(file)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    assert opened.read_piece(bytes_of(target), target.data_ptr(), 77, lease) == (1 << 20, 0)
    assert target.numpy().tobytes() == file.read_bytes()[77 : 77 + (1 << 20)]
    opened.close()
    assert disk.operations.count("open_read") <= 2  # it is not asked for again


@pytest.mark.parametrize("at_open", [False, True])
def test_who_demands_direct_reads_is_told_that_they_are_refused(file: Path, at_open: bool) -> None:
    opened = DataFile(Refusing(at_open), str(file), True)
    with pytest.raises(StorageError, match="EINVAL"):
        opened.read_block(blocks().take(), 0, 1 << 20)
    opened.close()


def test_an_error_of_the_device_is_no_refusal(file: Path) -> None:
    class Broken(Disk):
        def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
            raise storage_error("read", file.path, OSError(errno.EIO, "Input/output error"))

    forget(file)
    opened = DataFile(Broken(), str(file), None)
    with pytest.raises(StorageError, match="EIO"):
        opened.read_block(blocks().take(), 0, 1 << 20)
    opened.close()
