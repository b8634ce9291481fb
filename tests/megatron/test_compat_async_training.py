"""Megatron-LM's own training loop with ``--async-save``, unmodified, in jobs of two ranks. ``make test-compat`` puts
the sources of 0.19.2 on ``PYTHONPATH``.

Losses are compared bit for bit with those of a job that knows nothing of robust_dcp and saves while training stands.
Dropout is on, so losses also tell whether a resumed job has the random numbers that it should have.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron.training_job import Job, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

_TRAINING = (
    "--ckpt-format",
    "torch_dist",
    "--use-distributed-optimizer",
    "--train-iters",
    "12",
    "--save-interval",
    "4",
)
_OURS = ("--ckpt-planner", "robust_dcp", "--ckpt-exchange-timeout-seconds", "30")
_ASYNC = ("--async-save", "--async-strategy", "mcore")
_WORKER = "--use-persistent-ckpt-worker"


@dataclass(frozen=True)
class _Jobs:
    """Two jobs of twelve iterations that save after the fourth, the eighth and the last.

    Attributes:
        stock: without robust_dcp, and without ``--async-save``.
        ours: asynchronous. Rank 1 cannot write what is saved after iteration 4 until iteration 7.
        saved: where ``ours`` has saved.
    """

    stock: Job
    ours: Job
    saved: Path


@pytest.fixture(scope="module", autouse=True)
def megatron_training() -> None:
    assert importlib.util.find_spec("megatron.training") is not None, "run make test-compat"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> _Jobs:
    directory = tmp_path_factory.mktemp("jobs")
    saved = directory / "ours"
    stock = run_job(directory / "job_stock", *_TRAINING, "--save", directory / "stock", steps="loop")
    ours = run_job(
        directory / "job_ours", *_TRAINING, *_OURS, *_ASYNC, _WORKER, "--save", saved, steps="loop:4=gate,7=open"
    )
    return _Jobs(stock, ours, saved)


def _losses(job: Job, place: int = 0) -> list[list[float]]:
    """For each rank those of all iterations."""
    return job.of_step(place, "losses")


def test_training_goes_on_while_a_rank_cannot_write_and_has_the_losses_of_a_run_without_us(jobs: _Jobs) -> None:
    assert "robust_dcp" not in jobs.stock.output
    assert [len(losses) for losses in _losses(jobs.ours)] == [12, 12]
    assert _losses(jobs.ours) == _losses(jobs.stock)
    assert jobs.ours.of_step(0, "digest") == jobs.stock.of_step(0, "digest")
    for trackers in jobs.ours.of_step(0, "trackers"):
        assert trackers[:7] == [None] * 7  # the tracker moves after the commit
        assert None not in trackers[8:]  # the second save waits until the first is committed
    assert [jobs.ours.of_step(0, key) for key in ("early", "processes", "tracker")] == [[[], []], [0, 0], ["12", "12"]]


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_a_job_that_goes_on_from_an_asynchronous_checkpoint_has_the_same_losses(
    tmp_path: Path, jobs: _Jobs, by: str
) -> None:
    arguments = (*_OURS, *_ASYNC, _WORKER) if by == "ours" else ()
    resumed = run_job(
        tmp_path / "job", *_TRAINING, *arguments, "--save", tmp_path / "saved", steps=f"load:{jobs.saved}@4 loop"
    )
    assert ("robust_dcp" in resumed.output) == (by == "ours")
    assert resumed.of_step(0, "iteration") == [4, 4]
    assert _losses(resumed, 1) == [losses[4:] for losses in _losses(jobs.stock)]
    assert resumed.of_step(1, "digest") == jobs.stock.of_step(0, "digest")


def test_with_warn_training_goes_on_over_a_full_disk_and_the_next_save_works(tmp_path: Path, jobs: _Jobs) -> None:
    saved, on_failure = tmp_path / "saved", ("--ckpt-save-failure", "warn")
    job = run_job(
        tmp_path / "job", *_TRAINING, *_OURS, *_ASYNC, _WORKER, *on_failure, "--save", saved, steps="loop:8=full"
    )
    assert job.of_step(0, "error") == [None, None]
    assert _losses(job) == _losses(jobs.stock)
    assert "No space left on device" in job.output
    assert "this checkpoint was not saved, and training goes on (--ckpt-save-failure warn)" in job.output
    assert all("8" not in trackers for trackers in job.of_step(0, "trackers"))
    assert not (saved / "iter_0000008" / "metadata.json").exists()
    assert job.of_step(0, "tracker") == ["12", "12"]
    resumed = run_job(tmp_path / "next", *_TRAINING, *_OURS, "--save", tmp_path / "2", steps=f"load:{saved}")
    assert resumed.of_step(0, "iteration") == [12, 12]
    assert resumed.of_step(0, "digest") == jobs.stock.of_step(0, "digest")


def test_with_raise_a_full_disk_ends_training_with_the_same_exception_on_all_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    job = run_job(tmp_path / "job", *_TRAINING, *_OURS, *_ASYNC, _WORKER, "--save", saved, steps="loop:8=full")
    of_rank_0, of_rank_1 = job.of_step(0, "error")
    assert of_rank_0 == of_rank_1
    assert of_rank_0[0] == "StorageError" and "No space left on device" in of_rank_0[1] and of_rank_0[2] == [1]
    assert job.of_step(0, "tracker") == ["4", "4"]


def test_without_a_persistent_worker_megatron_saves_while_training_stands(tmp_path: Path, jobs: _Jobs) -> None:
    job = run_job(tmp_path / "job", *_TRAINING, *_OURS, *_ASYNC, "--save", tmp_path / "saved", steps="loop")
    assert "Disabling --async-save" in job.output
    assert job.of_step(0, "trackers") == [[None] * 4 + ["4"] * 4 + ["8"] * 4] * 2
    assert job.of_step(0, "tracker") == ["12", "12"]
    assert _losses(job) == _losses(jobs.stock)
