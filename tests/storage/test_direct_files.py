"""Files on a real file system: the same bytes by direct I/O and through the page cache, in blocks of any size."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import StorageError
from robust_dcp.staging import tensor_bytes
from robust_dcp.staging.blocks import Block
from robust_dcp.staging.tensor_bytes import DeviceCopies, TensorBytes
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.layouts.places import LARGE_NBYTES
from robust_dcp.storage.writing import emit
from tests.storage.sources import ListSource, content_of, framed_one_by_one, placed, write
from tests.storage.test_engine import tensors
from tests.support.simulated_disk import SimulatedDisk

MIX = [
    torch.arange(LARGE_NBYTES // 4 + 5),
    torch.arange(3.0),
    torch.rand(700, 900).t(),
    torch.arange(3 * LARGE_NBYTES, dtype=torch.uint8)[1:],  # not where direct I/O can take it
    torch.rand(1 << 18),
    torch.rand(500),
]


def written_to(directory: str, values: list[Any], **options: Any) -> tuple[tuple[str, ...], list[bytes]]:
    """(how they were written, the files)."""
    files = options.pop("files", 2)
    disk = options.pop("disk", None) or Disk()
    written = write(ListSource(values), placed(values, files=files), disk, directory=directory, **options)
    return written.how, [content_of(disk, name, directory) for name in written.names]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(tensors(), min_size=1, max_size=12),
    st.integers(1, 3),
    st.sampled_from([4096, 20_480, 1 << 20]),
    st.integers(1, 4),
    st.sampled_from([None, False]),
)
def test_any_mix_of_tensors_in_any_blocks_by_any_threads(
    values: list[torch.Tensor], files: int, block_bytes: int, threads: int, direct: bool | None
) -> None:
    expected = framed_one_by_one(values, placed(values, files=files))
    with TemporaryDirectory() as directory:
        options = {"files": files, "block_bytes": block_bytes, "threads": threads, "direct": direct}
        assert written_to(directory, values, **options)[1] == expected


def test_files_that_may_be_direct_are_and_say_so(tmp_path: Path) -> None:
    how, contents = written_to(str(tmp_path), MIX)
    assert contents == framed_one_by_one(MIX, placed(MIX, files=2))
    can = Disk().open_new(str(tmp_path / "asked"), direct=True)
    assert how == ("direct",) if can.alignment is not None else how[0].startswith("buffered: ")
    Disk().close(can)


def test_a_disk_without_direct_io_is_an_error_where_it_is_insisted_on() -> None:
    disk = SimulatedDisk(alignment=None)
    with pytest.raises(StorageError, match="cannot be written by direct I/O, and direct=True: it is simulated"):
        written_to("/checkpoint", MIX, disk=disk, direct=True)
    assert disk.list_directory("/checkpoint") == []


class RefusesDirectWrites(SimulatedDisk):
    """Refuses direct writes from the n-th on, as file systems do that take O_DIRECT and cannot do it everywhere."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        if file.alignment is not None:
            self.left -= 1
            if self.left < 0:
                raise storage_error("write", file.path, OSError(errno.EINVAL, "Invalid argument"))
        super().pwrite(file, data, offset)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_file_whose_direct_writes_are_refused_goes_on_buffered(n: int) -> None:
    how, contents = written_to("/checkpoint", MIX, disk=RefusesDirectWrites(n), threads=4, block_bytes=64 << 10)
    assert contents == framed_one_by_one(MIX, placed(MIX, files=2))
    assert all(one.startswith("buffered: a direct write was refused: write /checkpoint/__0_") for one in how)


def test_a_refused_write_is_an_error_where_direct_io_is_insisted_on() -> None:
    disk = RefusesDirectWrites(1)
    with pytest.raises(StorageError, match="EINVAL"):
        written_to("/checkpoint", MIX, disk=disk, direct=True)
    assert disk.list_directory("/checkpoint") == []


def test_a_direct_write_that_ends_within_a_block_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    cut = threading.Lock()

    def short_once(fd: int, buffers: list[Any], offset: int) -> int:
        nbytes = memoryview(buffers[0]).nbytes
        if nbytes > LARGE_NBYTES // 2 and cut.acquire(blocking=False):
            pwritev(fd, [memoryview(buffers[0])[:4096]], offset)
            return 4000
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", short_once)
    _, contents = written_to(str(tmp_path), MIX, threads=1)
    assert cut.locked()
    assert contents == framed_one_by_one(MIX, placed(MIX, files=2))


class _RunAhead(DeviceCopies):
    """Copies that go on by themselves, as those of a device do: in threads."""

    def can_run_ahead(self, data: TensorBytes) -> bool:
        return True

    def begin(self, data: TensorBytes, begin: int, end: int, block: Block, at: int) -> Callable[[], None]:
        thread = threading.Thread(target=data.copy, args=(begin, end, block, at))
        thread.start()
        return thread.join


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block_bytes", [40_960, 8 << 20])
def test_copies_that_run_while_earlier_blocks_are_written(
    threads: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emit, "DeviceCopies", _RunAhead)
    monkeypatch.setattr(tensor_bytes, "host_address", lambda tensor: None)
    _, contents = written_to(
        "/checkpoint", [*MIX, b"object"], threads=threads, block_bytes=block_bytes, disk=SimulatedDisk()
    )
    assert contents[:2] == framed_one_by_one(MIX, placed(MIX, files=2))
    assert contents[2] == b"object"
