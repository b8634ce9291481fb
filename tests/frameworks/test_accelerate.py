"""Accelerate and the ``Trainer`` of transformers, unmodified: weights sharded by FSDP2, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.frameworks.jobs import checkpoints_in, is_ours, require, run_command, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def accelerate() -> None:
    require("accelerate", "transformers")


@pytest.mark.parametrize(
    ("program", "name", "checkpoints"), [("hf_accelerate", "state", 2), ("hf_trainer", "trainer", 4)]
)
def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(
    program: str, name: str, checkpoints: int, tmp_path: Path
) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    for robust, directory in ((True, ours), (False, stock)):
        saved = run_job(program, "save", directory, robust=robust)
        written = checkpoints_in(directory)
        assert len(written) == checkpoints and all(is_ours(path) is robust for path in written)
        assert saved.announcements == robust
        assert saved.stays_stock == []
    loaded = run_job(program, "load", ours, stock, robust=True)
    assert (loaded.equal, loaded.announcements, loaded.stays_stock) == ([name] * 2, 1, [])
    loaded = run_job(program, "load", ours, robust=False)
    assert (loaded.equal, loaded.announcements) == ([name], 0)


def test_accelerate_merge_weights_reads_our_checkpoints(tmp_path: Path) -> None:
    """By ``_load_state_dict`` of torch, with a planner that makes its state dict from the metadata."""
    merged = []
    for robust in (True, False):
        directory = tmp_path / f"{robust}"
        run_job("hf_accelerate", "save", directory, robust=robust)
        weights, path = directory / "state" / "pytorch_model_fsdp_0", directory / "merged"
        run_command("-m", "accelerate.commands.accelerate_cli", "merge-weights", weights, path, robust=robust)
        merged.append(load_file(path / "model.safetensors"))
    ours, stock = merged
    assert ours.keys() == stock.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(ours[key].equal(stock[key]) for key in ours)
