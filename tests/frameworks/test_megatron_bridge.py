"""Megatron-Bridge's own ``pretrain`` with its checkpoints, unmodified, on two ranks of gloo.

Dropout is on, so losses also tell whether a job that goes on has the random numbers that it should have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.jobs import Job, checkpoints_in, is_ours, require, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]

_TAKES_OVER = "robust_dcp 0.1.0 is the planner of Megatron's checkpoints"
_STEPS = ["iter_0000002", "iter_0000004", "iter_0000006"]


@pytest.fixture(scope="module", autouse=True)
def megatron_bridge() -> None:
    require("megatron.bridge", "megatron.training")


def _run(directory: Path, *runs: str, robust: bool) -> Job:
    job = run_job("megatron_bridge", directory, *runs, robust=robust)
    # A process that is started for an asynchronous save would import torch too, and say it once more.
    assert job.output.count(_TAKES_OVER) == job.announcements == robust
    assert job.stays_stock == []
    return job


def _noted(directory: Path) -> list[dict[str, Any]]:
    """What each rank has noted."""
    return [json.loads((directory / f"notes.{rank}.json").read_text()) for rank in range(2)]


def test_training_is_the_same_bit_for_bit_and_both_sides_go_on_from_what_either_has_written(tmp_path: Path) -> None:
    _run(tmp_path, "save:stock", robust=False)
    _run(tmp_path, "save:sync", "save:async", "load:stock@4", robust=True)
    _run(tmp_path, "load:sync@4", "load:async@4", robust=False)
    whole = _noted(tmp_path / "stock")
    assert [list(rank["losses"]) for rank in whole] == [["1", "2", "3", "4", "5", "6"]] * 2
    for name in ("stock", "sync", "async"):
        written = checkpoints_in(tmp_path / name)
        assert [path.name for path in written] == _STEPS
        assert [is_ours(path) for path in written] == [name != "stock"] * 3
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == "6"
        assert _noted(tmp_path / name) == whole
        resumed = tmp_path / f"after-{name}@4"
        assert [is_ours(path) for path in checkpoints_in(resumed)] == [name == "stock"]
        for before, after in zip(whole, _noted(resumed), strict=True):
            assert after["start"] == 4
            assert after["losses"] == {step: before["losses"][step] for step in ("5", "6")}
            assert after["digest"] == before["digest"]
