"""Where the host cannot hold copies of everything, an async save writes the rest while its caller waits."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import RobustWriter
from robust_dcp.staging import SHARED_STAGING, STAGING
from tests.api.test_async_save import loaded
from tests.harness.disks import GatedDisk
from tests.harness.ranks import in_ranks, values

MEGABYTE = 1 << 20


@contextmanager
def overwriting(tensors: dict[str, torch.Tensor]) -> Iterator[Callable[[], None]]:
    """A thread that changes all tensors, without end, from when it is told to."""
    begin, over = threading.Event(), threading.Event()

    def train() -> None:
        begin.wait()
        while not over.is_set():
            for tensor in tensors.values():
                tensor.fill_(-1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield begin.set
    finally:
        over.set()
        begin.set()
        thread.join()


def state_of(rank: int) -> dict[str, torch.Tensor]:
    sizes = [4 * MEGABYTE, 3 * MEGABYTE, MEGABYTE, MEGABYTE // 2, 1000, 7]
    return {f"{rank}.{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}


def save_and_overwrite(directory: str, staging: Any, staging_nbytes: int, executor: Any = "thread") -> tuple[str, ...]:
    STAGING.release()
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(2):
        state = state_of(rank)
        with overwriting(state) as overwrite:
            saving = robust_dcp.async_save(
                state,
                checkpoint_id=f"{directory}/{step}",
                staging=staging,
                staging_nbytes=staging_nbytes,
                executor=executor,
            )
            if staging == "lazy":
                saving.wait_staged()
            overwrite()
            report = (saving if staging == "full" else saving.upload_completion).result(timeout=60)
        assert STAGING.kept_nbytes <= max(staging_nbytes, 2 * MEGABYTE)
        got = loaded(f"{directory}/{step}", state)
        assert all(torch.equal(got[name], tensor) for name, tensor in state_of(rank).items())
        assert report.blocked_seconds > 0
    return report.how


@pytest.mark.parametrize("staging", ["full", "lazy"])
@pytest.mark.parametrize("staging_nbytes", [0, 1000, 10 * MEGABYTE])
def test_what_is_over_the_limit_is_written_before_tensors_may_change(
    tmp_path: Path, staging: str, staging_nbytes: int
) -> None:
    how = save_and_overwrite(str(tmp_path), staging, staging_nbytes)
    assert "while training waited: they are over staging_nbytes" in how[-1]


def test_with_room_for_all_nobody_waits_for_a_disk(tmp_path: Path) -> None:
    disk = GatedDisk()
    saving = robust_dcp.async_save(
        {"w": torch.ones(MEGABYTE)}, storage_writer=RobustWriter(tmp_path, disk=disk), staging_nbytes=4 * MEGABYTE
    )
    disk.gate.set()
    assert not any("waited" in how for how in saving.result(timeout=60).how)


def test_each_rank_has_its_own_limit(tmp_path: Path) -> None:
    for how in values(in_ranks(2, limited_by_rank, str(tmp_path))):
        assert "waited" in how[-1]


def limited_by_rank(directory: str) -> tuple[str, ...]:
    return save_and_overwrite(directory, "full", 9 * MEGABYTE * (1 + dist.get_rank()))


def test_the_thread_writes_what_the_process_cannot_have(tmp_path: Path) -> None:
    how = save_and_overwrite(str(tmp_path), "full", 10 * MEGABYTE, "process")
    assert "while training waited" in how[-1]


def test_a_negative_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="staging_nbytes must be at least 0"):
        robust_dcp.async_save({"w": torch.ones(1)}, checkpoint_id=str(tmp_path), staging_nbytes=-1)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_save_that_is_interrupted_while_it_copies_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Any
) -> None:
    buffers = STAGING if executor == "thread" else SHARED_STAGING
    for each in (STAGING, SHARED_STAGING):
        each.release()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        robust_dcp.async_save({"w": torch.ones(MEGABYTE)}, checkpoint_id=tmp_path / "1", executor=executor)
    assert buffers.kept_nbytes >= 4 * MEGABYTE  # the next save has it
    buffers.release()
    gc.collect()  # the exception holds the copies
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not any("robust_dcp-staging" in each for each in files)
