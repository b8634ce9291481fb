"""A rank whose disk is slow: the others wait for it as long as it gets on, and it stops when they have failed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustReader, RobustWriter
from robust_dcp.comm import patience
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.ranks import in_ranks, values

N_TENSORS = 12
MEGABYTE = 1 << 20


class SlowDisk(PosixDisk):
    """Takes its time for each MiB."""

    n_reads = 0

    def pwrite(self, file: Any, data: Any, offset: int) -> None:
        time.sleep(0.15)
        super().pwrite(file, data, offset)

    def pread_into(self, file: Any, buffer: Any, offset: int) -> int:
        SlowDisk.n_reads += 1
        time.sleep(0.15)
        return super().pread_into(file, buffer, offset)


def own_tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"rank{dist.get_rank()}.{n}": torch.full((MEGABYTE // 4,), value + n) for n in range(N_TENSORS)}


def own_disk(slow_rank: int) -> PosixDisk:
    return SlowDisk() if dist.get_rank() == slow_rank else PosixDisk()


def reader_of(directory: str, slow_rank: int) -> RobustReader:
    return RobustReader(directory, threads=1, buffer_bytes=4 * MEGABYTE, disk=own_disk(slow_rank))


def save_and_load_slowly(directory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    patience.LOG_SECONDS = 0.5
    writer = RobustWriter(directory, threads=1, buffer_bytes=2 * MEGABYTE, disk=own_disk(1))
    saved = robust_dcp.save(own_tensors(1.0), storage_writer=writer, timeout_seconds=1.2)
    target = own_tensors(0.0)
    loaded = robust_dcp.load(target, storage_reader=reader_of(directory, 1), timeout_seconds=1.2)
    assert all(torch.equal(target[key], value) for key, value in own_tensors(1.0).items())
    return saved.stragglers, loaded.stragglers


def test_a_rank_that_writes_or_reads_slowly_is_waited_for_and_named(tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, save_and_load_slowly, str(tmp_path / "checkpoint")))
    for stragglers in outcomes[0]:
        assert stragglers and all("the slowest is rank 1: " in each for each in stragglers)
        assert " % of 0.01 GiB, " in stragglers[-1] and stragglers[-1].endswith("MiB/s")


def load_damaged(directory: str) -> int:
    robust_dcp.save(own_tensors(1.0), checkpoint_id=directory)
    if dist.get_rank() == 0:
        data_file = min(Path(directory).glob("__0_*.distcp"))
        content = bytearray(data_file.read_bytes())
        content[len(content) // 2 + MEGABYTE // 2] ^= 1  # the middle of a tensor
        data_file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CorruptCheckpoint):
        robust_dcp.load(own_tensors(0.0), storage_reader=reader_of(directory, 1), timeout_seconds=30)
    return SlowDisk.n_reads


def test_a_rank_that_reads_stops_when_the_load_has_failed_on_another(tmp_path: Path) -> None:
    _, n_reads, _ = values(in_ranks(3, load_damaged, str(tmp_path / "checkpoint")))
    assert n_reads < N_TENSORS
