"""Whatever ranks have saved, loaded and failed at before, a checkpoint holds what they held when it was saved.

A state machine drives two ranks through histories: save, change, go back to an earlier structure, load an older
checkpoint, restart, fail on one rank, save by stock's own ``save``, or in another process group. After each save
stock's reader and ours read what was saved.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from tests.faults.disk import LONG_TESTS, Fault, FaultDisk
from tests.harness.fingerprints import blank, differences, wrongly_loaded
from tests.harness.ranks import Job

N_RANKS = 2

Structure = tuple[int, ...]
"""For each rank which tensors it holds besides those that all hold, as bits."""


def _state(structure: Structure, value: float) -> dict[str, Any]:
    """Replicated tensors of different sizes, which are dealt out to ranks, and what only this rank holds."""
    rank = dist.get_rank()
    state: dict[str, Any] = {f"t{n}": torch.full((17_000 + 1_000 * n,), value + n) for n in range(12)}
    state["small"] = torch.full((3,), value)
    state["step"] = int(value)
    for bit in range(3):
        if structure[rank] >> bit & 1:
            state[f"rank{rank}.{bit}"] = torch.full((20_000 * (bit + 1),), value + bit)
        if structure[-1] >> bit & 1:
            state[f"all.{bit}"] = torch.full((40_000 * (bit + 1),), value - bit)
    return state


_REFUSED: dict[str, dict[str, Fault]] = {
    "commit": {"rename:.metadata": OSError(errno.ENOSPC, "")},
    "write": {"allocate": OSError(errno.EIO, "")},
}


def save(path: Path, structure: Structure, value: float, way: str) -> list[str]:
    """Save, and name the keys that a load of it gets wrong."""
    state = _state(structure, value)
    if way == "ours":
        robust_dcp.save(state, checkpoint_id=path)
    elif way == "async":
        robust_dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, storage_writer=RobustWriter(path), planner=RobustPlanner())
    dist.barrier()
    return wrongly_loaded(state, path)


def save_and_fail(path: Path, structure: Structure, value: float, way: str, rank: int, operation: str) -> None:
    """A save that fails on one rank: while it writes, or at the commit, which is the coordinator's."""
    is_refused = dist.get_rank() == (0 if operation == "commit" else rank)
    call = robust_dcp.save if way == "ours" else dcp.save
    disk = FaultDisk(path, on=_REFUSED[operation] if is_refused else {})
    with disk, pytest.raises(dcp.api.CheckpointException):
        call(_state(structure, value), storage_writer=RobustWriter(path), planner=RobustPlanner())
    dist.barrier()


def load(paths: list[Path], structures: list[Structure], values: list[float]) -> list[str]:
    """Load a checkpoint on each rank for itself: ranks may know different ones."""
    rank = dist.get_rank()
    expected = _state(structures[rank], values[rank])
    found = blank(expected)
    robust_dcp.load(found, checkpoint_id=paths[rank], no_dist=True)
    dist.barrier()
    return differences(expected, found)


def save_alone(directory: Path, structure: Structure, value: float) -> None:
    """Each rank saves by itself, in a group of its own."""
    path = directory / f"rank{dist.get_rank()}"
    robust_dcp.save(_state(structure, value), checkpoint_id=path, no_dist=True)
    dist.barrier()


_STRUCTURES = st.sampled_from([(0, 0, 0), (1, 0, 0), (0, 1, 0)])
_WAYS = st.sampled_from(["ours", "ours", "stock", "async"])


class Histories(RuleBasedStateMachine):
    """What happens to a job, one thing after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="histories-"))
        self.job = Job(N_RANKS)
        self.saved: list[tuple[Path, Structure, float]] = []
        self.n = 0

    @initialize()
    def begin(self) -> None:
        self._save((0,) * (N_RANKS + 1), "ours")

    def _next(self) -> tuple[Path, float]:
        self.n += 1
        return self.directory / f"step{self.n}", float(self.n)

    def _save(self, structure: Structure, way: str) -> None:
        path, value = self._next()
        assert self.job.run(save, path, structure, value, way) == [[]] * N_RANKS
        self.saved.append((path, structure, value))

    @rule(structure=_STRUCTURES, way=_WAYS)
    def change(self, structure: Structure, way: str) -> None:
        self._save(structure, way)

    @rule(structures=st.lists(_STRUCTURES, min_size=2, max_size=2, unique=True), way=_WAYS)
    def begin_anew(self, structures: list[Structure], way: str) -> None:
        """A new job, which loads nothing."""
        self.job.restart()
        for structure in structures:
            self._save(structure, way)

    @rule(structure=_STRUCTURES, way=st.sampled_from(["ours", "stock"]), data=st.data())
    def fail(self, structure: Structure, way: str, data: st.DataObject) -> None:
        path, value = self._next()
        rank, operation = data.draw(st.integers(0, N_RANKS - 1)), data.draw(st.sampled_from(["write", "commit"]))
        self.job.run(save_and_fail, path, structure, value, way, rank, operation)

    @rule(data=st.data(), way=_WAYS)
    def resume(self, data: st.DataObject, way: str) -> None:
        """Each rank loads a checkpoint of one structure, perhaps another one than the other ranks, and all save it."""
        self.job.restart()
        structure = data.draw(st.sampled_from(sorted({each for _, each, _ in self.saved})))
        alike = [each for each in self.saved if each[1] == structure]
        mine = [data.draw(st.sampled_from(alike)) for _ in range(N_RANKS)]
        if len(alike) > 1 and data.draw(st.booleans()):
            mine[-1] = data.draw(st.sampled_from([each for each in alike if each != mine[0]]))
        paths, structures, values = (list(each) for each in zip(*mine, strict=True))
        assert self.job.run(load, paths, structures, values) == [[]] * N_RANKS
        self._save(structure, way)

    @rule(structure=_STRUCTURES)
    def save_in_other_groups(self, structure: Structure) -> None:
        path, value = self._next()
        self.job.run(save_alone, path, structure, value)

    def teardown(self) -> None:
        self.job.end()
        shutil.rmtree(self.directory)


def test_every_load_equals_what_was_saved_in_histories() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=20 if LONG_TESTS else 4,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
