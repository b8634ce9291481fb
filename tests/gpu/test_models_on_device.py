"""Models that train on a device: FSDP2 with the backend of the device, and Megatron-Core's sharded state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import robust_dcp
from robust_dcp.testing.ranks import run_ranks, values
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu


def begin_with_the_backend_of_the_device() -> None:
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")


def trained_model(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    loss = torch.zeros(())
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 64, generator=generator).to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def resume(directory: str, how: str) -> list[float]:
    begin_with_the_backend_of_the_device()
    model, optimizer = trained_model(3)
    if how == "save":
        robust_dcp.save(state_of(model, optimizer), checkpoint_id=directory)
    else:
        saving = robust_dcp.async_save(state_of(model, optimizer), checkpoint_id=directory, staging=how)
        if how == "lazy":
            saving.wait_staged()
            saving = saving.upload_completion
    goes_on = train(model, optimizer, 4)
    if how != "save":
        saving.result(timeout=60)
    other, other_optimizer = trained_model(1)
    state = state_of(other, other_optimizer)
    robust_dcp.load(state, checkpoint_id=directory)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    resumed = train(other, other_optimizer, 4)
    dist.destroy_process_group()
    return [goes_on, resumed]


@pytest.mark.parametrize("how", ["save", "full", "lazy"])
def test_an_fsdp2_model_resumes_with_the_losses_that_it_would_have_had(tmp_path: Path, how: str) -> None:
    ((goes_on, resumed),) = values(run_ranks(1, resume, str(tmp_path / "checkpoint"), how, init=False))
    assert goes_on == resumed


def save_megatron(directory: str) -> bool:
    begin_with_the_backend_of_the_device()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from robust_dcp.megatron import RobustLoadStrategy, RobustSaveStrategy

    def sharded(value: float) -> dict[str, Any]:
        weight = torch.full((256, 64), value, device=DEVICE)
        return {"weight": ShardedTensor.from_rank_offsets("weight", weight, (0, dist.get_rank(), 1))}

    Path(directory).mkdir()
    dist_checkpointing.save(sharded(5.0), directory, RobustSaveStrategy())
    loaded = dist_checkpointing.load(sharded(0.0), directory, RobustLoadStrategy())
    same = torch.equal(loaded["weight"].cpu(), torch.full((256, 64), 5.0))
    dist.destroy_process_group()
    return same and loaded["weight"].device == DEVICE


def test_megatron_core_saves_and_loads_on_the_device(tmp_path: Path) -> None:
    assert values(run_ranks(1, save_megatron, str(tmp_path / "checkpoint"), init=False)) == [True]
