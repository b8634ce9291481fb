"""Megatron-LM's own ``save_checkpoint`` and ``load_checkpoint``, unmodified, in jobs of two ranks, with and without the
flag. ``make test-compat`` puts the sources of 0.19.2 on ``PYTHONPATH``.

Weights and optimizer are compared bit for bit, rank by rank. With ``--verify-integrity`` Megatron hashes all files of a
checkpoint when it is saved, and again when it is loaded: its own hashes hold for our files, and ours for its.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron.training_job import Job, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

_OURS = ("--ckpt-planner", "robust_dcp", "--ckpt-exchange-timeout-seconds", "30")
_TORCH_DIST = ("--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--verify-integrity")
_DAMAGED = "__1_0."
_ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
_TORCH_DCP = ("--ckpt-format", "torch_dcp", "--use-torch-fsdp2")


@dataclass(frozen=True)
class _Jobs:
    """Three jobs, each of which goes on where those before it have ended.

    Attributes:
        ours: ``--ckpt-save-failure warn``: saves 10 and 20, fails at 30, saves 40.
        stock: loads 20 of ``ours``, saves 50.
        last: ours, with a parallel load: is refused 10 of ``ours``, of which a byte has changed, loads 40 of ``ours``
            and 50 of ``stock``, saves 60, fails at 70.
        directory: holds a folder of checkpoints for each of them.
    """

    ours: Job
    stock: Job
    last: Job
    directory: Path


@pytest.fixture(scope="module", autouse=True)
def megatron_training() -> None:
    assert importlib.util.find_spec("megatron.training") is not None, "run make test-compat"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> _Jobs:
    directory = tmp_path_factory.mktemp("jobs")
    ours, stock, last = (directory / name for name in ("ours", "stock", "last"))
    first = run_job(
        directory / "job_ours",
        *(*_TORCH_DIST, *_OURS, "--ckpt-save-failure", "warn", "--save", ours),
        steps="save:10 save:20 fault:30 save:40",
    )
    second = run_job(directory / "job_stock", *_TORCH_DIST, "--save", stock, steps=f"load:{ours}@20 save:50")
    _damage(next((ours / "iter_0000010").glob(f"{_DAMAGED}*")))
    third = run_job(
        directory / "job_last",
        *(*_TORCH_DIST, *_OURS, "--ckpt-fully-parallel-load", "--save", last),
        steps=f"load:{ours}@10 load:{ours} load:{stock} save:60 fault:70",
    )
    return _Jobs(first, second, third, directory)


def _damage(path: Path) -> None:
    """Change one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _plans_in_log(job: Job) -> list[tuple[str, str]]:
    """The iterations that the log says were saved, and how each was planned."""
    return re.findall(r"saved .*iter_00000(\d\d) \(rank 0 of 2\): .*; plan (\w+): ", job.output)


def test_checkpoints_go_both_ways_between_ours_and_stock_and_plans_are_repeated(jobs: _Jobs) -> None:
    ours, stock, last = jobs.ours, jobs.stock, jobs.last
    assert [ours.of_step(step, "tracker") for step in (0, 1)] == [["10", "10"], ["20", "20"]]
    assert [ours.of_step(step, "plan") for step in (0, 1)] == [["built", "built"], ["reused", "reused"]]
    assert _plans_in_log(ours) == [("10", "built"), ("20", "reused"), ("40", "reused")]
    assert "robust_dcp" not in stock.output
    assert stock.of_step(1, "tracker") == ["50", "50"]
    for loading, place, saving, saved_at, iteration in (
        (stock, 0, ours, 1, 20),
        (last, 1, ours, 3, 40),
        (last, 2, stock, 1, 50),
    ):
        assert loading.of_step(place, "iteration") == [iteration, iteration]
        assert loading.of_step(place, "digest") == saving.of_step(saved_at, "digest")


def test_what_fails_is_the_same_exception_on_all_ranks_or_with_warn_in_the_log(jobs: _Jobs) -> None:
    of_rank_0, of_rank_1 = jobs.last.of_step(0, "error")  # of a file that is not as it was saved
    assert of_rank_0 == of_rank_1 and of_rank_0[0] == "RefusedByMegatron"
    assert re.search(r"__1_0\.\w+\.distcp: expected ", of_rank_0[1])
    assert [jobs.ours.of_step(2, key) for key in ("error", "tracker")] == [[None, None], ["20", "20"]]
    assert not (jobs.directory / "ours" / "iter_0000030" / "metadata.json").exists()
    assert "this checkpoint was not saved, and training goes on (--ckpt-save-failure warn)" in jobs.ours.output
    assert "File too large" in jobs.ours.output
    assert jobs.ours.of_step(3, "tracker") == ["40", "40"]
    of_rank_0, of_rank_1 = jobs.last.of_step(4, "error")
    name, message, failed_ranks = of_rank_0
    assert of_rank_0 == of_rank_1 and (name, failed_ranks) == ("StorageError", [1]) and "File too large" in message
    assert jobs.last.of_step(4, "tracker") == ["60", "60"]


def test_an_asynchronous_save_of_torch_dcp_is_named_when_megatron_finalizes_it(tmp_path: Path) -> None:
    steps = f"save:10 finalize save:20 finalize load:{tmp_path}"
    job = run_job(tmp_path / "job", *_TORCH_DCP, *_OURS, *_ASYNC, "--save", tmp_path, steps=steps)
    assert [job.of_step(step, "tracker")[0] for step in range(4)] == [None, "10", "10", "20"]
    assert _plans_in_log(job) == [("10", "built"), ("20", "reused")]
    assert job.of_step(4, "digest") == job.of_step(2, "digest")


def test_torch_dcp_checkpoints_go_both_ways_between_ours_and_stock(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    saved = run_job(tmp_path / "1", *_TORCH_DCP, *_OURS, "--save", ours, steps="save:10 save:20")
    by_stock = run_job(tmp_path / "2", *_TORCH_DCP, "--save", stock, steps=f"load:{ours} save:50")
    loaded = run_job(tmp_path / "3", *_TORCH_DCP, *_OURS, "--save", ours, steps=f"load:{ours} load:{stock}")
    assert _plans_in_log(saved) == [("10", "built"), ("20", "reused")]
    assert "robust_dcp" not in by_stock.output
    assert by_stock.of_step(0, "digest") == loaded.of_step(0, "digest") == saved.of_step(1, "digest")
    assert loaded.of_step(1, "iteration") == [50, 50]
    assert loaded.of_step(1, "digest") == by_stock.of_step(1, "digest")
