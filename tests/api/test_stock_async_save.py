"""Stock's ``async_save`` with our planner and writer, in a thread and in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from tests.harness.ranks import run_ranks, values

STEPS = 3


def own_state(step: float) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {"shared": torch.full((1000,), step), f"own.{rank}": torch.full((5000,), 10.0 * rank + step)}


def save_with_stock(directory: str, kind: str) -> bool:
    for step in range(STEPS):
        state = own_state(float(step))
        saving = dcp.async_save(
            state,
            storage_writer=RobustWriter(f"{directory}/{step}"),
            planner=RobustPlanner(timeout_seconds=60),
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        for tensor in state.values():
            tensor.fill_(-1.0)  # training goes on
        getattr(saving, "upload_completion", saving).result()
        dist.barrier()
    for step in range(STEPS):
        loaded = own_state(-2.0)
        robust_dcp.load(loaded, checkpoint_id=f"{directory}/{step}")
        assert all(torch.equal(loaded[key], value) for key, value in own_state(float(step)).items())
    return True


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_what_stock_saves_beside_training_by_our_plugins_is_what_was_there(tmp_path: Path, kind: str) -> None:
    assert all(values(run_ranks(2, save_with_stock, str(tmp_path), kind, timeout_seconds=160)))
