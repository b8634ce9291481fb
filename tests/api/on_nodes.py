"""Ranks on pretended nodes that do not share the checkpoint's directory. Imported by the ranks of the tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp.testing.file_calls import FileCalls
from robust_dcp.testing.nodes import become_node

ROWS = 24


def start(path: str, nodes: str, placing: Sequence[str]) -> int:
    """Become the node that ``placing`` gives for this rank, and start the process group. Returns the rank."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(list(placing[:rank]).count(placing[rank]))
    os.environ["LOCAL_WORLD_SIZE"] = str(list(placing).count(placing[rank]))
    become_node(f"host-{placing[rank]}", path, Path(nodes, placing[rank]))
    dist.init_process_group("gloo")
    return rank


def values_of(step: int, *, more: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    state = {
        "weight": torch.randn(ROWS, 16, generator=generator),
        "embedding": torch.randn(ROWS, 3, generator=generator).to(torch.bfloat16),
        "shared": torch.arange(100) * step,
    }
    return {**state, **{f"more.{number}": torch.full((ROWS,), float(step + number)) for number in range(more)}}


def sharded(step: int, *, more: int = 0, blank: bool = False) -> dict[str, Any]:
    """The state dict of a step: some tensors are sharded over all ranks, one is replicated, and one is an object."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in values_of(step, more=more).items():
        full = torch.zeros_like(value) if blank else value
        state[name] = distribute_tensor(full, mesh, [Replicate() if name == "shared" else Shard(0)])
    return {**state, "step": -1 if blank else step, "text": "" if blank else f"step {step} " * 10}


def check(state: dict[str, Any], step: int, *, more: int = 0) -> None:
    for name, value in values_of(step, more=more).items():
        got = state[name].full_tensor()
        assert got.dtype == value.dtype and torch.equal(got.view(torch.uint8), value.view(torch.uint8)), name
    assert (state["step"], state["text"]) == (step, f"step {step} " * 10)


def save(path: str, nodes: str, placing: Sequence[str], steps: Sequence[int], more: Sequence[int] = ()) -> list[str]:
    """Save each of ``steps`` into the same checkpoint. Returns what became of the plan each time."""
    start(path, nodes, placing)
    plans = []
    for number, step in enumerate(steps):
        n_more = more[number] if more else 0
        plans.append(robust_dcp.save(sharded(step, more=n_more), checkpoint_id=f"{path}/ckpt").plan)
    return plans


def load(path: str, nodes: str, placing: Sequence[str], step: int, more: int = 0) -> tuple[int, int]:
    """Load and compare. Returns the bytes that came from other ranks, and the time that they were counted."""
    start(path, nodes, placing)
    state = sharded(step, more=more, blank=True)
    report = robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, step, more=more)
    return report.shared_nbytes, report.nbytes


def save_killed(
    path: str, nodes: str, placing: Sequence[str], killed_rank: int, killed_before: int | None
) -> tuple[int, list[str]]:
    """Save step 1, and then step 2, in which one rank is killed before one of its calls to the file system.

    Returns the number of calls, and the names of the errors of the second save."""
    rank = start(path, nodes, placing)
    robust_dcp.save(sharded(1), checkpoint_id=f"{path}/ckpt")
    calls = FileCalls(f"{path}/ckpt", killed_before if rank == killed_rank else None)
    try:
        robust_dcp.save(sharded(2), checkpoint_id=f"{path}/ckpt", timeout_seconds=20)
    except robust_dcp.errors.RobustCheckpointError as error:
        return calls.count, [type(error).__name__]
    return calls.count, []


def load_either(path: str, nodes: str, placing: Sequence[str], next_step: int) -> int:
    """Load what a killed save has left, then save and load another step. Returns which step was there."""
    start(path, nodes, placing)
    state = sharded(1, blank=True)
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    found: int = state["step"]
    check(state, found)
    robust_dcp.save(sharded(next_step), checkpoint_id=f"{path}/ckpt")
    state = sharded(next_step, blank=True)
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, next_step)
    return found
