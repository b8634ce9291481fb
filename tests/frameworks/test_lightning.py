"""Lightning, unmodified: Fabric and Trainer, ``FSDPStrategy`` and ``ModelParallelStrategy``, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from tests.frameworks.both_sides import check_both_sides
from tests.frameworks.jobs import require, run_command, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def lightning() -> None:
    require("lightning")


@pytest.mark.parametrize("strategy", ["mp", "fsdp"])
@pytest.mark.parametrize("program", ["fabric", "lightning_trainer"])
def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(
    program: str, strategy: str, tmp_path: Path
) -> None:
    check_both_sides(program, strategy, directory=tmp_path, equal=[strategy])


def _consolidated(checkpoint: Path, framework: str, *, robust: bool) -> dict[str, Any]:
    path = checkpoint.parent / f"consolidated_{robust}"
    tool = f"lightning.{framework}.utilities.consolidate_checkpoint"
    run_command("-m", tool, checkpoint, "--output_file", path, robust=robust)
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    ("program", "strategy", "name", "framework"),
    [("fabric", "mp", "mp", "fabric"), ("lightning_trainer", "fsdp", "fsdp/last.ckpt", "pytorch")],
)
def test_lightning_consolidates_our_checkpoints_as_it_does_its_own(
    program: str, strategy: str, name: str, framework: str, tmp_path: Path
) -> None:
    """By ``_load_state_dict`` of torch, with a planner that makes its state dict from the metadata."""
    found = []
    for robust in (True, False):
        directory = tmp_path / f"{robust}"
        run_job(program, "save", strategy, directory, robust=robust)
        found.append(_consolidated(directory / name, framework, robust=robust))
    ours, stock = (dict(_pytree.tree_flatten_with_path(each)[0]) for each in found)
    assert ours.keys() == stock.keys()
    of_model = {path: value for path, value in ours.items() if "callbacks" not in _pytree.keystr(path)}
    tensors = [path for path, value in of_model.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4 + 3 * 4  # the weights; step, exp_avg and exp_avg_sq of each
    assert all(torch.equal(ours[path], stock[path]) for path in tensors)
