"""Whatever the sizes, data passes through no more memory than is allowed."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import pytest
import torch

from robust_dcp.staging.blocks import POOL
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.layouts.places import LARGE_NBYTES, place_as_they_come
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.record import framed_record
from robust_dcp.storage.writing.write_options import WriteOptions, default_buffer_bytes, default_threads
from tests.storage.sources import DIRECTORY, ListSource, content_of, framed_one_by_one, placed, write
from tests.support.simulated_disk import SimulatedDisk

MIB = 1 << 20


@pytest.mark.parametrize("buffer_bytes", [8192, 100_000, 3 * MIB])
@pytest.mark.parametrize("threads", [1, 4])
def test_one_tensor_larger_than_all_buffers_streams_through(buffer_bytes: int, threads: int) -> None:
    values = [torch.rand(1100, 1000).t(), torch.rand(10), torch.rand(1000, 1100)[:, ::2]]
    disk = SimulatedDisk()
    options = {"buffer_bytes": buffer_bytes, "threads": threads}
    written = write(ListSource(values), placed(values, files=1), disk, **options)
    assert 0 < written.peak_buffer_nbytes <= buffer_bytes
    assert [content_of(disk, name) for name in written.names] == framed_one_by_one(values, placed(values, files=1))


def test_the_blocks_of_a_save_serve_the_next_and_no_more_of_them_are_kept() -> None:
    values = [torch.rand(1000, 3000).t()]
    placements = placed(values, files=1)
    large = write(ListSource(values), placements, threads=3, block_bytes=MIB)
    assert POOL.kept_nbytes == large.peak_buffer_nbytes
    small = write(ListSource(values), placements, threads=1, block_bytes=MIB)
    assert POOL.kept_nbytes == small.peak_buffer_nbytes == MIB
    POOL.release()
    assert POOL.kept_nbytes == 0


@pytest.mark.parametrize("ranks", ["1", "8", "1000", "", "eight"])
def test_defaults_fit_the_machine_and_the_ranks_on_it(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    threads, block_nbytes = WriteOptions().fitted(4096)
    assert threads == default_threads() and 2 <= threads <= 4
    assert 32 * MIB <= default_buffer_bytes() <= 1024 * MIB
    assert block_nbytes == min(8 * MIB, default_buffer_bytes() // threads // 2)


class ComparesPayload(SimulatedDisk):
    """Compares what is written with a payload that repeats, and keeps only what is not payload."""

    def __init__(self, row: bytes, begin: int, end: int) -> None:
        super().__init__()
        self._rows, self._period = memoryview(row * 10), len(row)
        self._begin, self._end = begin, end
        self._left_out_nbytes = (end - begin) // MIB * MIB - 32 * MIB
        self._adding = threading.Lock()
        self.n_compared = 0

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        view = memoryview(data)
        if offset < self._begin or offset + view.nbytes > self._end:
            super().pwrite(file, view, offset if offset < self._begin else offset - self._left_out_nbytes)
            return
        at = (offset - self._begin) % self._period
        assert np.array_equal(np.frombuffer(view, np.uint8), np.frombuffer(self._rows[at : at + view.nbytes], np.uint8))
        with self._adding:
            self.n_compared += view.nbytes

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        return False

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        pass


def test_a_tensor_of_more_than_4_gib_is_written_bit_for_bit() -> None:
    row = torch.arange(MIB, dtype=torch.int64).to(torch.uint8)
    row[::1001] = 7
    tensor = row.expand(4097, MIB)  # takes no more memory than its row
    template = framed_record(tensor.dtype, tuple(tensor.shape))
    assert template is not None
    placements = placed([tensor], files=1)
    begin = int(placements.offset[0]) + template.data_offset
    disk = ComparesPayload(bytes(row.numpy().data), begin, begin + tensor.numel())
    written = write(ListSource([tensor]), placements, disk, threads=2, buffer_bytes=32 * MIB)
    assert written.nbytes == placements.file_nbytes[0] > 4 << 30
    assert disk.n_compared >= tensor.numel() - 2 * 8 * MIB  # the first block and the last hold other bytes, too
    assert written.peak_buffer_nbytes <= 32 * MIB
    kept = bytes(disk._directory(DIRECTORY).names[written.names[0]].cached)
    checksum = template.crc32_in_header(kept[begin - template.data_offset : begin])
    assert checksum is not None
    _, trailer = template.around(checksum)
    assert trailer in kept
    assert checksum == _crc32_of_rows(bytes(row.numpy().data), 4097)


def _crc32_of_rows(row: bytes, n: int) -> int:
    checksum = 0
    for _ in range(n):
        checksum = crc32(row, checksum)
    return checksum


def test_large_tensors_of_another_planner_stream_through_as_well() -> None:
    values: list[Any] = [torch.rand(1000, 1100).t(), b"object", torch.zeros(LARGE_NBYTES, dtype=torch.uint8)]
    disk = SimulatedDisk()
    placements = place_as_they_come([1] * 3, files=1)
    written = write(ListSource(values), placements, disk, buffer_bytes=64 << 10)
    assert written.peak_buffer_nbytes <= 64 << 10
    content = content_of(disk, written.names[0])
    for place in (0, 2):
        offset, nbytes = written.variable_places[place].tolist()
        record = torch.load(io.BytesIO(content[offset : offset + nbytes]), weights_only=True)
        assert torch.equal(record, values[place])
