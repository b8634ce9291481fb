"""What the suites run on ranks: save, load, and list what differs. Called by the suites."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from robust_dcp.testing.fingerprints import differences
from robust_dcp.testing.state_dicts import KINDS, full_tensor

__all__ = ["Plugins", "load", "rows", "save", "save_and_load_kind", "save_and_load_step"]

StateDict = dict[str, Any]


class Plugins(Protocol):
    """The plugins under test. Each call makes a new one."""

    def writer(self, path: Path) -> dcp.StorageWriter: ...

    def reader(self, path: Path) -> dcp.StorageReader: ...

    def save_planner(self) -> dcp.SavePlanner: ...

    def load_planner(self) -> dcp.LoadPlanner: ...


def save(plugins: Plugins, state_dict: StateDict, path: Path) -> None:
    """Save with stock's ``save`` from all ranks, or from this process if there are no ranks."""
    os.makedirs(path, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock says that it saves from one process
        dcp.save(state_dict, storage_writer=plugins.writer(path), planner=plugins.save_planner())


def load(plugins: Plugins, state_dict: StateDict, path: Path) -> None:
    """Load with stock's ``load``, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state_dict, storage_reader=plugins.reader(path), planner=plugins.load_planner())


def save_and_load_kind(plugins: Plugins, kind: str, directory: Path) -> list[str]:
    """Save and load one kind of :data:`KINDS`, and list what differs, in words."""
    expected, found = KINDS[kind](1), KINDS[kind](0)
    save(plugins, expected, directory / kind)
    load(plugins, found, directory / kind)
    return differences(expected, found)


def rows(step: int) -> StateDict:
    """A state dict that has the same contents for any number of ranks.

    It has a tensor with its rows divided between all ranks, a replicated tensor, and an object.
    """
    full = full_tensor("rows", (12, 3), step)
    sharded: Any = full.clone()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    return {"rows": sharded, "replicated": torch.full((5,), float(step)), "step": step}


def save_and_load_step(plugins: Plugins, path: Path, saved: int | None, expected: int) -> list[str]:
    """Save :func:`rows` of step ``saved`` (nothing if ``None``), load, and list what differs from step ``expected``."""
    if saved is not None:
        save(plugins, rows(saved), path)
    found = rows(-1)
    load(plugins, found, path)
    return differences(rows(expected), found)
