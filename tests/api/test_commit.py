"""Killed at any instant of a save, the directory loads as the old checkpoint or as the new one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustWriter
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.support.simulated_disk import WatchedDisk

StateDict = dict[str, Any]


def state(step: int, world: int) -> StateDict:
    """What all ranks together save at ``step``; more and other tensors each time."""
    found: StateDict = {f"rank{rank}.w": torch.full((1000 + 10 * step,), float(step)) for rank in range(world)}
    found |= {f"rank{rank}.object": f"step {step}" for rank in range(world)}
    found |= {f"rank0.extra{n}": torch.full((3,), float(step)) for n in range(step)}
    return found


def own_part(step: int, world: int) -> StateDict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {key: value for key, value in state(step, world).items() if key.startswith(f"rank{rank}.")}


def save_and_be_killed(directory: str, step: int, world: int, kill_rank: int, kill_at: int | None) -> int:
    """The number of calls to the disk; with ``kill_at``, SIGKILL comes right before that call."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def kill(number: int) -> None:
        if rank == kill_rank and number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    disk: Any = WatchedDisk(PosixDisk(), before=kill)
    robust_dcp.save(own_part(step, world), storage_writer=RobustWriter(directory, disk=disk), timeout_seconds=20)
    return len(disk.calls)


def step_found(directory: str, world: int, load: Any) -> int:
    """The step that the checkpoint holds: all of it, or the load raises or this fails."""
    metadata: Any = dcp.FileSystemReader(directory).read_metadata()
    step = len([key for key in metadata.state_dict_metadata if ".extra" in key])
    expected = state(step, world)
    assert set(metadata.state_dict_metadata) == set(expected)
    target = {key: "" if isinstance(value, str) else torch.zeros_like(value) for key, value in expected.items()}
    load(target, checkpoint_id=directory)
    assert differences(expected, target) == []
    return step


def check_old_or_new(directory: str, world: int) -> int:
    ours = step_found(directory, world, robust_dcp.load)
    assert step_found(directory, world, dcp.load) == ours
    assert ours in (1, 2)
    return ours


@pytest.mark.parametrize("kill_rank", [0, 1])
def test_one_of_two_ranks_may_be_killed_at_any_call(kill_rank: int, tmp_path: Path) -> None:
    old, whole = str(tmp_path / "old"), str(tmp_path / "whole")
    values(run_ranks(2, save_and_be_killed, old, 1, 2, kill_rank, None))
    shutil.copytree(old, whole)
    n_calls = values(run_ranks(2, save_and_be_killed, whole, 2, 2, kill_rank, None))[kill_rank]
    last, directory = 1, whole
    for number in range(kill_rank, n_calls, 5):
        directory = str(tmp_path / str(number))
        shutil.copytree(old, directory)
        outcomes = run_ranks(2, save_and_be_killed, directory, 2, 2, kill_rank, number)
        assert outcomes[kill_rank].exitcode == -signal.SIGKILL
        step = check_old_or_new(directory, 2)
        assert step >= last
        last = step
    # What was left behind is in nobody's way.
    values(run_ranks(2, save_and_be_killed, directory, 2, 2, kill_rank, None))
    assert check_old_or_new(directory, 2) == 2
    files = os.listdir(directory)
    assert len({name.split(".", 1)[1] for name in files if name.endswith(".distcp")}) <= 2


class SlowToRemove(PosixDisk):
    """Removes no data before rank 1 has returned from its save."""

    def unlink(self, path: str) -> None:
        dist.distributed_c10d._get_default_store().wait(["rank 1 has returned"])
        super().unlink(path)


def save_where_removing_is_slow(directory: str) -> None:
    robust_dcp.save(own_part(1, 2), checkpoint_id=directory)
    writer = RobustWriter(directory, disk=SlowToRemove() if dist.get_rank() == 0 else PosixDisk())
    robust_dcp.save(own_part(2, 2), storage_writer=writer, timeout_seconds=30)
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().set("rank 1 has returned", "")


def test_nobody_waits_for_the_removal_of_what_a_committed_checkpoint_replaces(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    values(run_ranks(2, save_where_removing_is_slow, directory))
    assert step_found(directory, 2, robust_dcp.load) == 2
    data_files = [name for name in os.listdir(directory) if name.endswith(".distcp")]
    assert data_files and all(name.count(".") == 2 for name in data_files)  # of the second save alone


class NeverRemoves(PosixDisk):
    def unlink(self, path: str) -> None:
        if os.path.basename(path).startswith(("__0_0.", "__0_1.")):
            raise PermissionError(f"{path} stays, by a law that our code does not know")
        super().unlink(path)


def test_a_committed_save_has_succeeded_whatever_becomes_of_the_old_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        robust_dcp.save(state(step, 1), storage_writer=RobustWriter(tmp_path, disk=NeverRemoves()), no_dist=True)
    assert step_found(str(tmp_path), 1, robust_dcp.load) == 2
    assert "is committed, but not tidied up" in caplog.text


def stock_overwrites(directory: str, kill: bool) -> None:
    class Deadly(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    dcp.save(state(2 if kill else 1, 1), checkpoint_id=directory, planner=Deadly())


def test_stock_destroys_the_old_checkpoint_when_it_is_killed(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    values(run_ranks(1, stock_overwrites, directory, False, init=False))
    assert step_found(directory, 1, robust_dcp.load) == 1
    (outcome,) = run_ranks(1, stock_overwrites, directory, True, init=False)
    assert outcome.exitcode == -signal.SIGKILL
    with pytest.raises((Exception, robust_dcp.RobustCheckpointError)):
        step_found(directory, 1, robust_dcp.load)
