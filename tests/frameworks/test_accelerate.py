"""Accelerate and the ``Trainer`` of transformers, unmodified: weights sharded by FSDP2, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.frameworks.both_sides import check_both_sides
from tests.frameworks.jobs import require, run_command, run_job

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
    assert len(check_both_sides(program, directory=tmp_path, equal=[name])) == checkpoints


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
