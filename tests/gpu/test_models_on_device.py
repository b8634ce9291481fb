"""Models that train on a device, with the backend of the device: FSDP2, and a GPT model of Megatron-Core."""

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
from tests.gpu.device import DEVICE
from tests.harness.ranks import run_ranks, values

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
        saving.wait_staged()
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


def resume_megatron(directory: str) -> tuple[list[str], list[str], set[str]]:
    """Save a GPT model and its distributed optimizer, load them into others; what differs, what was not loaded, and
    where the loaded tensors are."""
    begin_with_the_backend_of_the_device()
    from megatron.core import dist_checkpointing

    from demo import megatron_cpu
    from demo.megatron_model import Layout, Trainer
    from demo.megatron_truth import compare, gather_truth
    from robust_dcp.megatron import RobustLoadStrategy, RobustSaveStrategy

    if DEVICE.type == "cpu":
        megatron_cpu.install()

    def trainer(seed: int) -> Trainer:
        return Trainer(Layout(), seed=seed, n_layers=2, experts=0, device=DEVICE)

    saved = trainer(1)
    saved.train()
    truth = gather_truth(saved.sharded_state_dict())
    assert truth is not None
    Path(directory).mkdir()
    dist_checkpointing.save(saved.sharded_state_dict(), directory, RobustSaveStrategy())
    fresh = trainer(2)
    loaded = dist_checkpointing.load(fresh.sharded_state_dict(is_loading=True), directory, RobustLoadStrategy())
    devices = {value.device.type for value in loaded["model"].values() if isinstance(value, torch.Tensor)}
    fresh.model.load_state_dict(loaded.pop("model"))
    comparison = compare(fresh.sharded_state_dict(is_loading=True), loaded, truth).over_all_ranks()
    dist.destroy_process_group()
    return comparison["differing"], comparison["not_loaded"], devices


def test_a_megatron_core_model_and_its_optimizer_are_loaded_bit_for_bit_on_the_device(tmp_path: Path) -> None:
    (found,) = values(run_ranks(1, resume_megatron, str(tmp_path / "checkpoint"), init=False))
    assert found == ([], [], {DEVICE.type})
