"""Whatever plans the ranks of a save have in mind, what it saves is what they hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from tests.faults.disk import FaultDisk
from tests.harness.ranks import run_ranks, values

_N_TENSORS = 40


def _state(value: float, *, n_more: int = 0) -> dict[str, Any]:
    """Replicated tensors, whose writers a plan chooses, and what only one rank has."""
    state: dict[str, Any] = {f"t{n:02}": torch.full((30_000 + n,), value + n) for n in range(_N_TENSORS)}
    if dist.get_rank() == 0:
        state |= {f"more{n}": torch.full((75_000,), value) for n in range(n_more)}
    return state


def _wrong_keys(directory: Path, value: float) -> list[str]:
    """The keys that our reader or stock's loads with other values than were saved."""
    wrong = set()
    for load in (robust_dcp.load, dcp.load):
        state = _state(-1.0)
        load(state, checkpoint_id=os.fspath(directory))
        wrong |= {key for key, tensor in _state(value).items() if not torch.equal(state[key], tensor)}
    return sorted(wrong)


def _save_first(directory: Path) -> None:
    robust_dcp.save(_state(1.0), checkpoint_id=directory / "first")


def _save_after_a_change(directory: Path) -> None:
    robust_dcp.save(_state(2.0, n_more=1), checkpoint_id=directory / "changed")
    robust_dcp.save(_state(3.0), checkpoint_id=directory / "again")


def _resume_from_different_checkpoints(directory: Path) -> tuple[str, list[str]]:
    """Each rank knows another one of two checkpoints with the same structure."""
    mine = directory / ("again" if dist.get_rank() == 0 else "first")
    robust_dcp.load(_state(0.0), checkpoint_id=mine, no_dist=True)
    report = robust_dcp.save(_state(4.0), checkpoint_id=directory / "resumed")
    return report.plan, _wrong_keys(directory / "resumed", 4.0)


def test_ranks_that_resume_from_different_checkpoints_of_one_structure_save_what_they_hold(tmp_path: Path) -> None:
    for job in (_save_first, _save_after_a_change):
        values(run_ranks(2, job, tmp_path))
    assert values(run_ranks(2, _resume_from_different_checkpoints, tmp_path)) == [("reused", [])] * 2


def _go_back_after_a_failed_commit(directory: Path) -> list[list[str]]:
    """Stock's ``save`` calls only the coordinator's commit."""

    def save(name: str, value: float, *, n_more: int = 0) -> None:
        writer = RobustWriter(directory / name)
        dcp.save(_state(value, n_more=n_more), storage_writer=writer, planner=RobustPlanner())

    save("changed", 2.0, n_more=1)
    full = FaultDisk(directory, on={"rename:.metadata": OSError(errno.ENOSPC, "")})
    with full, pytest.raises(dcp.api.CheckpointException):
        save("refused", 3.0)
    robust_dcp.load(_state(0.0), checkpoint_id=directory / "first")
    save("after", 4.0)
    save("repeated", 5.0)
    return [_wrong_keys(directory / "after", 4.0), _wrong_keys(directory / "repeated", 5.0)]


def test_ranks_that_do_not_know_of_a_failed_commit_save_what_they_hold(tmp_path: Path) -> None:
    values(run_ranks(2, _save_first, tmp_path))
    assert values(run_ranks(2, _go_back_after_a_failed_commit, tmp_path)) == [[[], []]] * 2


def _save_with_one_key_that_changes(directory: Path) -> list[int]:
    """The bytes of ``.metadata`` and of the index after each save."""
    state = {f"t{n}": torch.ones(4) for n in range(50)}
    sizes = []
    for step in range(20):
        path = directory / f"{step:02}"
        report = robust_dcp.save(state | {f"step{step:02}": torch.ones(4)}, checkpoint_id=path)
        assert report.plan == ("rebuilt" if step else "built")
        sizes.append(sum((path / name).stat().st_size for name in (".metadata", ".robust_dcp.index")))
    return sizes


def test_metadata_and_index_do_not_grow_with_the_number_of_changes(tmp_path: Path) -> None:
    sizes, _ = values(run_ranks(2, _save_with_one_key_that_changes, tmp_path))
    assert max(sizes) < min(sizes) * 1.05
