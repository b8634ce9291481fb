"""Megatron-LM's own ``save_checkpoint`` and ``load_checkpoint``, unmodified, in jobs of two ranks, with and without the
flag. ``make test-compat`` puts the sources of 0.19.2 on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron.training_job import Job, run_job

pytestmark = pytest.mark.compat

_OURS = ("--ckpt-planner", "robust_dcp", "--ckpt-exchange-timeout-seconds", "30")


@dataclass(frozen=True)
class _Jobs:
    """Jobs that go on where the one before has ended: ours, stock's, ours.

    Attributes:
        first: saves 10, 20, fails at 30 and only warns, saves 40.
        stock: loads 20 and saves 50.
        last: loads our 40, then stock's 50, and fails at 60.
    """

    first: Job
    stock: Job
    last: Job
    directory: Path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> _Jobs:
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None, "run make test-compat"
    directory = tmp_path_factory.mktemp("jobs")
    ours, stock, last = (directory / name for name in ("ours", "stock", "last"))
    always = ("--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--verify-integrity")
    return _Jobs(
        run_job(
            directory / "first",
            *(*always, *_OURS, "--ckpt-save-failure", "warn", "--save", ours),
            steps="save:10 save:20 fault:30 save:40",
        ),
        run_job(directory / "second", *always, "--save", stock, steps=f"load:{ours}@20 save:50"),
        run_job(
            directory / "third",
            *(*always, *_OURS, "--ckpt-fully-parallel-load", "--save", last),
            steps=f"load:{ours} load:{stock} save:60 fault:70",
        ),
        directory,
    )


def test_a(jobs: _Jobs) -> None:
    print(jobs)
