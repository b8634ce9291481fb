"""Megatron-LM's own training, unmodified, in jobs of two ranks: each format, saved while training stands and beside it.
``make test-compat`` puts the sources of 0.19.2 on ``PYTHONPATH``.

Losses, weights and optimizer are compared bit for bit with those of a job that knows nothing of robust_dcp. Dropout is
on, so losses also tell whether a resumed job has the random numbers that it should have. With ``--verify-integrity``
Megatron hashes all files of a checkpoint, and robust_dcp does: the hashes of each hold for the files of the other.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.jobs import run_command, torchrun
from tests.harness.hosts import can_become_node

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

_FORMATS = {
    "torch_dist": ("--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--verify-integrity"),
    "torch_dcp": ("--ckpt-format", "torch_dcp", "--use-torch-fsdp2"),
}
_OURS = ("--ckpt-planner", "robust_dcp", "--ckpt-exchange-timeout-seconds", "30")
_ASYNC = (*_OURS, "--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker")
_HOW = {"stock": (), "ours": _OURS, "async": _ASYNC}
_GOES_ON = "this checkpoint was not saved, and training goes on (--ckpt-save-failure warn)"

_ARGUMENTS = """
--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
--position-embedding-type rope --no-rope-fusion --swiglu --vocab-size 64 --untie-embeddings-and-output-weights
--transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --no-bias-dropout-fusion --distributed-backend gloo --bf16 --micro-batch-size 1
--train-iters 12 --lr 0.01 --save-interval 4
"""


@dataclass(frozen=True)
class Job:
    """What became of a job: what each rank noted at each step, and the log and standard error of all."""

    ranks: list[list[dict[str, Any]]]
    output: str

    def noted(self, key: str, step: int = 0) -> list[Any]:
        """What the ranks noted under ``key`` at one step."""
        return [rank[step].get(key) for rank in self.ranks]


def run_job(directory: Path, *arguments: str | Path, steps: str) -> Job:
    """Run two ranks of a training job until they have done all their steps.

    Args:
        directory: an empty one, for what the ranks note.
        arguments: of Megatron-LM. Without them it trains twelve iterations and saves after each fourth.
        steps: ``load:DIRECTORY``, ``load:DIRECTORY@ITERATION``, ``convert:DIRECTORY@ITERATION``, and ``train``. After
            ``set:NAME,NAME=VALUE`` these arguments are others than on the command line. With ``train:5=full,8=open``
            something happens to the disk of rank 1 before the forward pass of these iterations. What is saved in that
            iteration has no room (``full``), or is not written (``gate``) until that is allowed (``open``).

    Raises:
        AssertionError: a rank failed; the message is what the ranks printed.
    """
    directory.mkdir(parents=True)
    words = (*_ARGUMENTS.split(), *arguments, "--notes", directory, "--steps", *steps.split())
    output = run_command(*torchrun(2), "-m", "tests.megatron.training_job", *words, robust=False).output
    return Job([json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)], output)


Trained = Callable[[str, str], tuple[Job, Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Jobs that save after iterations 4, 8 and 12, by format and how, each with the place of its checkpoints. In the
    asynchronous ones rank 1 cannot write what is saved after iteration 4 until iteration 7."""
    assert importlib.util.find_spec("megatron.training") is not None, "run make test-compat"

    @cache
    def run(form: str, how: str) -> tuple[Job, Path]:
        directory = tmp_path_factory.mktemp(f"{form}_{how}")
        steps = "train:4=gate,7=open" if how == "async" else "train"
        arguments = (*_FORMATS[form], *_HOW[how], "--save", directory / "saved")
        return run_job(directory / "job", *arguments, steps=steps), directory / "saved"

    return run


@pytest.mark.parametrize("how", ["ours", "async"])
@pytest.mark.parametrize("form", _FORMATS)
def test_training_has_the_losses_of_a_job_without_us_and_the_tracker_moves_after_the_commit(
    trained: Trained, form: str, how: str
) -> None:
    (stock, _), (job, _) = trained(form, "stock"), trained(form, how)
    assert "robust_dcp" not in stock.output
    assert job.noted("error") == [None, None]
    assert [len(losses) for losses in job.noted("losses")] == [12, 12]
    assert job.noted("losses") == stock.noted("losses") and job.noted("digest") == stock.noted("digest")
    found = re.findall(r"saved .*iter_00000(\d\d) \(rank 0 of 2\): .*; plan (\w+): ", job.output)
    assert found == [("04", "built"), ("08", "reused"), ("12", "reused")]
    for trackers in job.noted("trackers"):
        if how == "async":  # the second save waits until the first is committed
            assert trackers[:7] == [None] * 7 and None not in trackers[8:]
        else:
            assert trackers == [None] * 4 + ["4"] * 4 + ["8"] * 4
    assert [job.noted(key) for key in ("early", "processes", "tracker")] == [[[], []], [0, 0], ["12", "12"]]


@pytest.mark.parametrize(("saved", "by"), [("async", "ours"), ("async", "stock"), ("stock", "async")])
@pytest.mark.parametrize("form", _FORMATS)
def test_a_job_that_goes_on_from_what_either_has_saved_has_the_same_losses(
    tmp_path: Path, trained: Trained, form: str, saved: str, by: str
) -> None:
    (stock, _), (_, directory) = trained(form, "stock"), trained(form, saved)
    iteration = 4 if form == "torch_dist" else 8
    arguments = (*_FORMATS[form], *_HOW[by], "--save", tmp_path / "saved")
    job = run_job(tmp_path / "job", *arguments, steps=f"load:{directory}@{iteration} train")
    assert ("robust_dcp" in job.output) == (by != "stock")
    assert job.noted("iteration") == [iteration, iteration]
    assert job.noted("losses", 1) == [losses[iteration:] for losses in stock.noted("losses")]
    assert job.noted("digest", 1) == stock.noted("digest")


@pytest.mark.parametrize(("form", "how"), [("torch_dist", "ours"), ("torch_dist", "async"), ("torch_dcp", "async")])
def test_with_warn_training_goes_on_over_a_full_disk_and_the_next_save_works(
    tmp_path: Path, trained: Trained, form: str, how: str
) -> None:
    arguments = (*_FORMATS[form], *_HOW[how], "--ckpt-save-failure", "warn", "--save", tmp_path / "saved")
    job = run_job(tmp_path / "job", *arguments, steps=f"train:8=full load:{tmp_path / 'saved'}")
    stock, _ = trained(form, "stock")
    assert job.noted("error") == [None, None] and job.noted("losses") == stock.noted("losses")
    assert "No space left on device" in job.output and _GOES_ON in job.output
    assert all("8" not in trackers for trackers in job.noted("trackers"))
    assert not (tmp_path / "saved" / "iter_0000008" / ".metadata").exists()
    assert (job.noted("tracker"), job.noted("iteration", 1)) == (["12", "12"], [12, 12])
    assert job.noted("digest", 1) == stock.noted("digest")


@pytest.mark.parametrize("how", ["ours", "async"])
def test_what_fails_is_the_same_exception_on_all_ranks(tmp_path: Path, trained: Trained, how: str) -> None:
    """A full disk ends training. A file that is not as it was saved is not loaded."""
    saved = tmp_path / "saved"
    arguments = (*_FORMATS["torch_dist"], *_HOW[how], "--ckpt-fully-parallel-load", "--save", saved)
    job = run_job(tmp_path / "job", *arguments, steps="train:8=full")
    of_rank_0, of_rank_1 = job.noted("error")
    assert of_rank_0 == of_rank_1
    assert of_rank_0[0] == "StorageError" and "No space left on device" in of_rank_0[1] and of_rank_0[2] == [1]
    assert job.noted("tracker") == ["4", "4"]
    (damaged,) = (saved / "iter_0000004").glob("__1_0.*")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    job = run_job(tmp_path / "load", *arguments, steps=f"load:{saved}")
    of_rank_0, of_rank_1 = job.noted("error")
    assert of_rank_0 == of_rank_1 and of_rank_0[0] == "RefusedByMegatron"
    assert re.search(r"__1_0\.\w+\.distcp: expected ", of_rank_0[1])


def test_without_a_persistent_worker_megatron_saves_while_training_stands(tmp_path: Path, trained: Trained) -> None:
    arguments = (*_FORMATS["torch_dist"], *_ASYNC[:-1], "--save", tmp_path / "saved")
    job = run_job(tmp_path / "job", *arguments, steps="train")
    assert "Disabling --async-save" in job.output
    assert job.noted("trackers") == [[None] * 4 + ["4"] * 4 + ["8"] * 4] * 2
    assert job.noted("tracker") == ["12", "12"]
    assert job.noted("losses") == trained("torch_dist", "stock")[0].noted("losses")


def test_a_resume_that_proves_itself_names_the_one_state_that_megatron_does_not_load(
    tmp_path: Path, trained: Trained
) -> None:
    """Without Apex and Transformer Engine that is the number of steps of Adam. All the rest is compared and equal."""
    for saved in ("stock", "ours"):
        _, directory = trained("torch_dist", saved)
        arguments = (*_FORMATS["torch_dist"], *_OURS, "--ckpt-prove-resume", "--save", tmp_path / "saved")
        job = run_job(tmp_path / saved, *arguments, steps=f"load:{directory}@8")
        of_rank_0, of_rank_1 = job.noted("error")
        assert of_rank_0 == of_rank_1 and "iter_0000008: 1 key different" in of_rank_0[1], of_rank_0
        key = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
        assert f"{key!r} ([0]['param_groups'][0]['step']: 1.0 here, 9.0 in the checkpoint" in of_rank_0[1]


_LOADS = "set:auto_detect_ckpt_format set:finetune set:no_load_optim set:no_load_rng set:no_load_optim,no_load_rng"
_CONVERSIONS = """
set:ckpt_convert_format=torch,ckpt_convert_save={to} convert:{saved}@8
set:auto_detect_ckpt_format,no_load_optim load:{to}/torch@8 train
set:ckpt_format=torch,use_dist_ckpt=,no_load_optim,ckpt_convert_format=torch_dist,ckpt_convert_save={to}
convert:{to}/torch@8 set: load:{to}/torch_dist@8 train
"""
"""With torch's Adam Megatron does not load an optimizer of the format ``torch``: that has no number of steps."""


@pytest.mark.parametrize("form", _FORMATS)
def test_arguments_of_loads_and_conversions_do_what_they_do_without_us(
    tmp_path: Path, trained: Trained, form: str
) -> None:
    """Each step goes on from where the one before it has ended, so that what a load leaves alone counts, too."""
    _, saved = trained(form, "stock")
    steps = " ".join(f"{arguments} load:{saved}@8 train" for arguments in _LOADS.split())
    jobs = []
    for how in ("stock", "ours"):
        conversions = _CONVERSIONS.format(saved=saved, to=tmp_path / how) if form == "torch_dist" else ""
        arguments = (*_FORMATS[form], *_HOW[how], "--save", tmp_path / how / "saved")
        jobs.append(run_job(tmp_path / how / "job", *arguments, steps=f"{steps} {conversions}"))
    stock, ours = jobs
    assert "robust_dcp" not in stock.output and "loaded " in ours.output
    for number, words in enumerate(f"{steps} {conversions}".split()):
        for key in ("error", "iteration", "losses", "digest", "tracker"):
            assert ours.noted(key, number) == stock.noted(key, number), (words, key)
        assert stock.noted("error", number) == [None, None], words


@pytest.mark.skipif(not can_become_node(), reason="neither root nor user namespaces: no process can have its own drive")
@pytest.mark.parametrize("how", ["ours", "async"])
def test_a_job_on_node_drives_goes_on_after_a_node_was_lost_and_has_the_same_losses(
    tmp_path: Path, trained: Trained, how: str
) -> None:
    stock, _ = trained("torch_dist", "stock")
    # Nodes that do not share a directory cannot read each other's files, which --verify-integrity asks for.
    format_words = [word for word in _FORMATS["torch_dist"] if word != "--verify-integrity"]
    words = (*format_words, *_HOW[how], "--ckpt-parity-nodes", "2", "--save", tmp_path / "saved")
    job = run_job(tmp_path / "job", *words, "--node-drives", tmp_path / "nodes", steps="train")
    assert job.noted("losses") == stock.noted("losses") and job.noted("tracker") == ["12", "12"]
    for lost in range(2):
        drives = tmp_path / f"without_{lost}"
        shutil.copytree(tmp_path / "nodes", drives)
        for node in drives.iterdir():  # the job was killed before its last save
            shutil.rmtree(node / "iter_0000012")
            (node / "latest_checkpointed_iteration.txt").write_text("8")
        shutil.rmtree(drives / str(lost))
        steps = f"load:{tmp_path / 'saved'} train"
        resumed = run_job(tmp_path / f"resumed_{lost}", *words, "--node-drives", drives, steps=steps)
        assert resumed.noted("error", 0) == resumed.noted("error", 1) == [None, None]
        assert resumed.noted("iteration") == [8, 8]
        assert resumed.noted("losses", 1) == [losses[8:] for losses in stock.noted("losses")]
        assert resumed.noted("digest", 1) == stock.noted("digest")
        assert all((node / "iter_0000012" / ".metadata").exists() for node in drives.iterdir())
