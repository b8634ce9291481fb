"""A disk that fails: the save fails on all ranks, what was there loads, and what was begun is removed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.storage.committing.commit import BEFORE_RENAME
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.api.test_cached_plans import blank, check_loads
from tests.api.test_failures import BrokenPlanner, shards
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import run_ranks, values
from tests.support.simulated_disk import WatchedDisk

StateDict = dict[str, Any]


def stock_runs_out_of_space(directory: str) -> tuple[str, bool]:
    os.makedirs(directory)
    original = os.fsync
    failed = []

    def full_for_workers(descriptor: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            failed.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    os.fsync = full_for_workers  # type: ignore[assignment]
    state_dict = {f"w{n}": torch.ones(1 << 10) for n in range(4)}
    verdict = verdict_of(dcp.save, state_dict, storage_writer=dcp.FileSystemWriter(directory, thread_count=2))
    assert failed
    return verdict.type_name, os.path.exists(f"{directory}/.metadata")


def test_stock_commits_a_checkpoint_whose_files_could_not_be_written(tmp_path: Path) -> None:
    assert values(run_ranks(1, stock_runs_out_of_space, str(tmp_path / "c"), init=False)) == [("", True)]


def we_run_out_of_space(directory: str) -> tuple[Verdict, list[str]]:
    state_dict = {f"w{n}": torch.ones(1 << 16) for n in range(4)}
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    verdict = verdict_of(robust_dcp.save, state_dict, checkpoint_id=directory)
    dist.barrier()
    return verdict, os.listdir(directory)


def test_a_file_that_may_not_grow_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    for verdict, left in values(run_ranks(2, we_run_out_of_space, str(tmp_path))):
        assert (verdict.type_name, verdict.fields["errno"]) == ("StorageError", errno.EFBIG)
        assert verdict.failed_ranks == (1,) and "__1_" in verdict.message
        assert left == []


WRITING, COMMITTING, END = 0, 1, 2


def fail_each_call(directory: str, failing_rank: int, code: int) -> list[str]:
    """Every call that one rank makes to its disk fails once, in a save where a checkpoint lies; what is wrong then."""
    rank = dist.get_rank()
    problems: list[str] = []
    robust_dcp.save(shards(0), checkpoint_id=directory)
    committed, step, what = 0, 0, torch.tensor(0)
    while int(what) != END:
        dist.barrier()
        files = sorted(os.listdir(directory))
        dist.barrier()
        step += 1
        disk: Any = WatchedDisk(PosixDisk(), fail_at=step - 1, code=code) if rank == failing_rank else PosixDisk()
        verdict = verdict_of(robust_dcp.save, shards(step), storage_writer=RobustWriter(directory, disk=disk))
        if rank == failing_rank:
            calls = disk.calls[:step]
            committing = any(path.endswith(".tmp") for _, path in calls)
            what.fill_(END if len(calls) < step else COMMITTING if committing else WRITING)
        dist.broadcast(what, src=failing_rank)
        if verdict.type_name == "":
            committed = step
        elif verdict.type_name != "StorageError" or verdict.fields["errno"] != code:
            problems.append(f"call {step}: {verdict}")
        target = blank(shards(step))
        robust_dcp.load(target, checkpoint_id=directory)
        loaded = int(target["v0" if rank == 0 else "v1"][0])
        if loaded not in {committed, step} or (loaded != committed and int(what) == WRITING):
            problems.append(f"call {step}: loaded {loaded}, committed {committed}")
        committed = loaded
        check_loads(shards(loaded), directory, "ours")
        left = set(os.listdir(directory)) - set(files)
        if verdict.type_name and left:
            if int(what) == WRITING or verdict.fields["operation"] in BEFORE_RENAME:
                problems.append(f"call {step} ({verdict.message}) left {left}")
            # A commit that failed from the rename on may have come through: its files stay until the next one.
            robust_dcp.save(shards(step), checkpoint_id=directory)
            committed = step
    check_loads(shards(step), directory)
    assert step > 10
    return problems


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_every_call_to_the_disk_may_fail_and_the_old_checkpoint_loads(failing_rank: int, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    for problems in values(run_ranks(2, fail_each_call, directory, failing_rank, errno.ENOSPC, timeout_seconds=120)):
        assert problems == []


class CountsWrites(PosixDisk):
    nbytes = 0

    def pwrite(self, file: Any, data: Any, offset: int) -> None:
        time.sleep(0.05)  # a slow disk
        super().pwrite(file, data, offset)
        type(self).nbytes += memoryview(data).nbytes


def fail_while_the_others_write(directory: str) -> tuple[str, int, float]:
    disk = CountsWrites()
    began = time.monotonic()
    if dist.get_rank() == 1:
        state_dict: StateDict = {"small": torch.ones(4)}
        planner: RobustPlanner = BrokenPlanner("resolve_data")
    else:
        # 200 writes of 8 MiB: ten seconds of this disk. One block, seen by many names, takes no memory.
        block = torch.ones(2 << 20)
        state_dict = {f"w{n}": block for n in range(200)}
        planner = BrokenPlanner("")
    verdict = verdict_of(
        robust_dcp.save, state_dict, storage_writer=RobustWriter(directory, threads=1, disk=disk), planner=planner
    )
    return verdict.type_name, disk.nbytes, time.monotonic() - began


def test_ranks_that_still_write_stop_when_another_has_failed(tmp_path: Path) -> None:
    (name, nbytes, _), (other, _, _) = values(run_ranks(2, fail_while_the_others_write, str(tmp_path)))
    assert name == other == "RobustCheckpointError"
    assert nbytes < 100 * (8 << 20)
    assert os.listdir(tmp_path) == []
