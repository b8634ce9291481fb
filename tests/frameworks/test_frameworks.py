"""Frameworks, unmodified, on two ranks of gloo: saved by robust_dcp or by stock, and loaded by either, training is the
same. ``make test-frameworks`` runs it for each framework in turn, with ``-k``: only that one is on the path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree

from tests.frameworks.jobs import PROGRAMS, Job, checkpoints_in, is_ours, run_command, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("program", "name", "n_checkpoints"),
    [
        pytest.param("hf_accelerate", "state", 2, id="accelerate"),
        pytest.param("hf_trainer", "trainer", 4, id="accelerate-transformers"),
        pytest.param("fabric", "mp", 1, id="lightning-fabric-mp"),
        pytest.param("fabric", "fsdp", 1, id="lightning-fabric-fsdp"),
        pytest.param("lightning_trainer", "mp", 3, id="lightning-trainer-mp"),
        pytest.param("lightning_trainer", "fsdp", 3, id="lightning-trainer-fsdp"),
        pytest.param("ao", "sync", 1, id="torchao"),
        pytest.param("tnt", "sync", 6, id="torchtnt-sync"),
        pytest.param("tnt", "async", 6, id="torchtnt-async"),
        pytest.param("tune", "sync", 2, id="torchtune-sync"),
        pytest.param("tune", "async", 2, id="torchtune-async"),
    ],
)
def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(
    program: str, name: str, n_checkpoints: int, tmp_path: Path
) -> None:
    """The variable alone decides who writes. Losses are the same with it and without, and after a load of either."""
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    losses = []
    for robust, place in ((True, ours), (False, stock)):
        saved = run_job(program, "save", name, place, robust=robust)
        assert [is_ours(path) for path in checkpoints_in(place)] == [robust] * n_checkpoints
        assert (saved.announcements, saved.stays_stock) == (robust, [])
        losses.append(saved.losses)
    assert losses[0] == losses[1] != []
    by_stock = run_job(program, "load", name, ours, robust=False)
    assert (by_stock.equal, by_stock.announcements) == ([name], 0)
    by_ours = run_job(program, "load", name, ours, stock, robust=True)
    assert (by_ours.equal, by_ours.announcements, by_ours.stays_stock) == ([name, name], 1, [])
    assert by_ours.losses == 2 * by_stock.losses != []


_CONSOLIDATE = "lightning.{}.utilities.consolidate_checkpoint"


@pytest.mark.parametrize(
    ("program", "name", "tool", "checkpoint", "n_tensors"),
    [
        pytest.param(
            *("hf_accelerate", "state", "accelerate.commands.accelerate_cli", "pytorch_model_fsdp_0", 4),
            id="accelerate",
        ),
        # Four weights, and step, exp_avg and exp_avg_sq of each.
        pytest.param("fabric", "mp", _CONSOLIDATE.format("fabric"), "", 16, id="lightning-fabric"),
        pytest.param(
            "lightning_trainer", "fsdp", _CONSOLIDATE.format("pytorch"), "last.ckpt", 16, id="lightning-trainer"
        ),
    ],
)
def test_tools_of_frameworks_make_whole_files_of_our_checkpoints_as_of_their_own(
    program: str, name: str, tool: str, checkpoint: str, n_tensors: int, tmp_path: Path
) -> None:
    """By ``_load_state_dict`` of torch, with a planner that makes its state dict from the metadata."""
    found: list[dict[Any, torch.Tensor]] = []
    for robust in (True, False):
        directory = tmp_path / f"{robust}"
        run_job(program, "save", name, directory, robust=robust)
        source, path = directory / name / checkpoint, directory / "whole"
        words = ("merge-weights", source, path) if "accelerate" in tool else (source, "--output_file", path)
        run_command("-m", tool, *words, robust=robust)
        whole = torch.load(path, weights_only=False) if path.is_file() else load_file(path / "model.safetensors")
        leaves = _pytree.tree_flatten_with_path(whole)[0]
        of_training = [leaf for leaf in leaves if "callbacks" not in _pytree.keystr(leaf[0])]
        found.append({key: value for key, value in of_training if isinstance(value, torch.Tensor)})
    ours, stock = found
    assert len(ours) == n_tensors and ours.keys() == stock.keys()
    assert all(torch.equal(ours[key], stock[key]) for key in ours)


def test_an_async_save_with_8_bit_adam_of_torchao_holds_what_a_save_holds(tmp_path: Path) -> None:
    """Stock's own async save writes NaN in place of 8-bit states, so it is not compared with."""
    run_job("ao", "save", "async", tmp_path, robust=True)
    for robust in (True, False):
        assert run_job("ao", "load", "async", tmp_path, robust=robust).equal == ["async"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan_goes_on_from_what_either_side_has_written(mode: str, tmp_path: Path) -> None:
    losses = []
    for robust, directory in ((True, tmp_path / "ours"), (False, tmp_path / "stock")):
        saved = run_job("titan_trainer", "save", mode, directory, robust=robust)
        written = checkpoints_in(directory)
        assert [path.name for path in written] == ["step-1", "step-2", "step-3"]
        assert all(is_ours(path) is robust for path in written)
        assert (saved.announcements, saved.stays_stock) == (robust, [])
        loaded = run_job("titan_trainer", "load", mode, directory, robust=not robust)
        assert (loaded.equal, loaded.announcements) == ([mode], not robust)
        assert is_ours(directory / mode / "step-4") is not robust
        losses.append((saved.losses, loaded.losses))
    assert losses[0] == losses[1]
    assert [len(told) for told in losses[0]] == [3, 1]


def test_megatron_bridge_trains_the_same_and_goes_on_from_what_either_side_has_written(tmp_path: Path) -> None:
    """Its own ``pretrain``. Dropout is on, so losses also tell whether random numbers are what they should be."""

    def run(*runs: str, robust: bool) -> None:
        job: Job = run_job("megatron_bridge", tmp_path, *runs, robust=robust)
        # A process that is started for an asynchronous save would import torch too, and say it once more.
        takes_over = job.output.count("is the planner of Megatron's checkpoints")
        assert (takes_over, job.announcements, job.stays_stock) == (robust, robust, [])

    def noted(name: str) -> list[dict[str, Any]]:
        return [json.loads((tmp_path / name / f"notes.{rank}.json").read_text()) for rank in range(2)]

    run("save:stock", robust=False)
    run("save:sync", "save:async", "load:stock@4", robust=True)
    run("load:sync@4", "load:async@4", robust=False)
    whole = noted("stock")
    assert [list(rank["losses"]) for rank in whole] == [["1", "2", "3", "4", "5", "6"]] * 2
    for name in ("stock", "sync", "async"):
        written = checkpoints_in(tmp_path / name)
        assert [path.name for path in written] == ["iter_0000002", "iter_0000004", "iter_0000006"]
        assert [is_ours(path) for path in written] == [name != "stock"] * 3
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == "6"
        assert noted(name) == whole
        assert [is_ours(path) for path in checkpoints_in(tmp_path / f"after-{name}@4")] == [name == "stock"]
        for before, after in zip(whole, noted(f"after-{name}@4"), strict=True):
            assert (after["start"], after["digest"]) == (4, before["digest"])
            assert after["losses"] == {step: before["losses"][step] for step in ("5", "6")}


def test_verl_loads_what_either_side_has_written(tmp_path: Path) -> None:
    """Its ``MegatronCheckpointManager``, in two workers, which get the variable in Ray's ``runtime_env``."""

    def run(*words: str) -> list[str]:
        job = run_command(PROGRAMS / "verl_workers.py", tmp_path, *words, robust=False)
        assert (job.announcements, job.stays_stock) == ("ROBUST_DCP=1" in words, [])
        return job.equal

    run("save:stock")
    assert run("ROBUST_DCP=1", "ROBUST_DCP_PROVE=1", "save:sync", "save:async", "load:stock") == ["stock"]
    for name in ("stock", "sync", "async"):
        written = checkpoints_in(tmp_path / name)
        steps = [tmp_path / name / f"global_step_{step}" / "actor" for step in (2, 3)]
        assert written == [step / part / "dist_ckpt" for step in steps for part in ("extra", "model", "optimizer")]
        assert {is_ours(path) for path in written} == {name != "stock"}
    assert run("load:sync", "load:async") == ["async", "sync"]
    digests = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("stock", "sync", "async")]
    assert digests[0] == digests[1] == digests[2]
