"""Copies of one tensor that differ between ranks are found by their checksums and named: a sample of them, or all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.testing.ranks import run_ranks, values


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("robust_dcp.plan.replica_checks").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def take(self) -> list[str]:
        taken, self.messages = self.messages, []
        return taken


def _state(drifted: dict[str, int]) -> dict[str, Any]:
    """``drifted``: names to the rank that holds something else."""
    state: dict[str, Any] = {f"layer{n:03}": torch.full((n + 1,), float(n)) for n in range(100)}
    state["large"] = torch.zeros(1_000_000)
    state["empty"] = torch.empty(0)
    state["own"] = {f"rank{dist.get_rank()}": torch.full((3,), float(dist.get_rank()))}
    for name, rank in drifted.items():
        if dist.get_rank() == rank:
            state[name] = state[name].clone()
            state[name][-1] += 1
    return state


def _saved(path: Path, drifted: dict[str, int], mode: Any) -> list[int]:
    report = robust_dcp.save(_state(drifted), checkpoint_id=path, planner=RobustPlanner(verify_replicas=mode))
    return [phase.payload_nbytes for phase in report.phases]


def _in_all_modes(directory: Path) -> dict[str, Any]:
    warnings = _Warnings()
    drifted = {"layer007": 2, "layer051": 0, "large": 1}
    found: dict[str, Any] = {}
    _saved(directory / "off", drifted, "off")
    found["off"] = warnings.take()
    _saved(directory / "equal", {}, "all")
    found["equal"] = warnings.take()
    _saved(directory / "all", drifted, "all")
    found["all"] = warnings.take()
    _saved(directory / "all again", drifted, "all")
    found["all again"] = warnings.take()
    dcp.save(
        _state({"layer010": 1}),
        storage_writer=RobustWriter(directory / "stock's save"),
        planner=RobustPlanner(verify_replicas="all"),
    )
    found["by stock's save"] = warnings.take()
    return found


def test_what_differs_is_named_with_the_ranks_in_one_warning_on_one_rank(tmp_path: Path) -> None:
    first, *others = values(run_ranks(3, _in_all_modes, tmp_path))
    for each in others:
        assert each == {"off": [], "equal": [], "all": [], "all again": [], "by stock's save": []}
    assert (first["off"], first["equal"], first["all again"]) == ([], [], [])
    (told,) = first["all"]
    assert "3 tensor(s) are not the same" in told
    assert "'layer007' (ranks 0-1 / rank 2)" in told
    assert "'layer051' (rank 0 / ranks 1-2)" in told
    assert "'large' (ranks 0, 2 / rank 1)" in told
    (told,) = first["by stock's save"]
    assert "1 tensor(s)" in told and "'layer010' (ranks 0, 2 / rank 1)" in told


def _samples(directory: Path) -> tuple[list[int], str]:
    """Every layer has drifted: what the samples find tells what they looked at."""
    warnings = _Warnings()
    drifted = {f"layer{n:03}": 1 for n in range(100)}
    payloads, told = [], []
    for step in range(50):
        payloads.append(max(_saved(directory / f"step{step}", drifted, "sample")))
        told += warnings.take()
    return payloads[1:], "".join(told)


def test_samples_are_small_and_come_round_to_every_copy(tmp_path: Path) -> None:
    (_, told), (payloads, _) = values(run_ranks(2, _samples, tmp_path, timeout_seconds=120))
    assert max(payloads) < 3000  # 24 bytes for a chunk, whatever its size
    classes = {int(word) for line in told.split("step")[1:] for word in line.split()[1:2]}
    assert classes and max(classes) < 60
    assert sum(int(line.split()[1]) for line in told.split("step")[1:]) == 100


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match='"off", "sample" or "all"'):
        RobustPlanner(verify_replicas="some")  # type: ignore[arg-type]


def _from_the_stored_plan(directory: Path) -> tuple[str, list[str]]:
    """The plan of a job that resumes still knows what there is to compare."""
    from robust_dcp.plan.cache import PLANS

    warnings = _Warnings()
    _saved(directory / "1", {}, "all")
    robust_dcp.load(_state({}), checkpoint_id=directory / "1")
    PLANS.clear()
    state = _state({"layer003": 1})
    report = robust_dcp.save(state, checkpoint_id=directory / "2", planner=RobustPlanner(verify_replicas="all"))
    return report.reason, warnings.take()


def test_a_job_that_resumes_by_a_plan_in_the_checkpoint_compares_too(tmp_path: Path) -> None:
    (reason, told), _ = values(run_ranks(2, _from_the_stored_plan, tmp_path))
    assert "since" in reason
    assert len(told) == 1 and "'layer003' (rank 0 / rank 1)" in told[0]
