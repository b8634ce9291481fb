"""Whatever the sizes, data passes through no more memory than is allowed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from robust_dcp.staging.blocks import POOL
from robust_dcp.storage.layouts.places import LARGE_NBYTES, place_as_they_come
from robust_dcp.storage.writing.write_options import WriteOptions, default_buffer_bytes, default_threads
from tests.storage.sources import ListSource, content_of, framed_one_by_one, placed, write
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
