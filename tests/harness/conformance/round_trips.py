"""What the suites do on ranks: save one way, load another, and say what differs. Called by the suites."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness.fingerprints import differences
from tests.harness.state_dicts import KINDS, full_tensor

__all__ = ["Plugins", "load", "rows", "save", "save_and_load_kind", "save_and_load_step"]

StateDict = dict[str, Any]


class Plugins:
    """What a suite tries. It makes new plugins for each call, on each rank."""

    def writer(self, path: Path) -> dcp.StorageWriter:
        """A new writer of a checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} has to say how its writer is made: def writer(self, path)")

    def reader(self, path: Path) -> dcp.StorageReader:
        """A new reader of it."""
        raise NotImplementedError(f"{type(self).__name__} has to say how its reader is made: def reader(self, path)")

    def save_planner(self) -> dcp.SavePlanner:
        """A new planner of saves: stock's, if the class does not say otherwise."""
        return dcp.DefaultSavePlanner()

    def load_planner(self) -> dcp.LoadPlanner:
        """A new planner of loads: stock's, if the class does not say otherwise."""
        return dcp.DefaultLoadPlanner()


def save(plugins: Plugins, state_dict: StateDict, path: Path) -> None:
    """Save by stock's ``save``, from all ranks, or from this process if it is alone."""
    os.makedirs(path, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock says that it saves from one process
        dcp.save(state_dict, storage_writer=plugins.writer(path), planner=plugins.save_planner())


def load(plugins: Plugins, state_dict: StateDict, path: Path) -> None:
    """Load by stock's ``load``, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state_dict, storage_reader=plugins.reader(path), planner=plugins.load_planner())


def save_and_load_kind(plugins: Plugins, kind: str, directory: Path) -> list[str]:
    """What of one kind of :data:`KINDS` comes back otherwise than it was saved, in words."""
    expected, found = KINDS[kind](1), KINDS[kind](0)
    save(plugins, expected, directory / kind)
    return _load_and_compare(plugins, found, directory / kind, expected)


def rows(step: int) -> StateDict:
    """A tensor whose rows are divided between all ranks, a replicated one, and an object: the same for any job."""
    full = full_tensor("rows", (12, 3), step)
    sharded: Any = full.clone()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    return {"rows": sharded, "replicated": torch.full((5,), float(step)), "step": step}


def save_and_load_step(plugins: Plugins, path: Path, saved: int | None, expected: int) -> list[str]:
    """Save :func:`rows` of a step, or nothing; load them, and say what differs from those of ``expected``."""
    if saved is not None:
        save(plugins, rows(saved), path)
    return _load_and_compare(plugins, rows(-1), path, rows(expected))


def _load_and_compare(plugins: Plugins, found: StateDict, path: Path, expected: StateDict) -> list[str]:
    """What comes back otherwise than ``expected``. A load that raises is one such thing: all ranks raise the same, with
    the tracebacks of all, so it is told in a few lines."""
    try:
        load(plugins, found, path)
    except CheckpointException as error:
        return [f"loading what was saved raised on {each}" for each in _in_words(error)]
    return differences(expected, found)


def _in_words(error: CheckpointException) -> list[str]:
    """Each exception that ranks have raised, with the innermost of its frames: ``ranks [0, 1]: KeyError: …``."""
    ranks: dict[str, list[int]] = {}
    for rank, (cause, stack) in error.failures.items():
        where = f" ({stack[-1].filename}:{stack[-1].lineno}, {stack[-1].name})" if stack else ""
        ranks.setdefault(f"{type(cause).__name__}: {cause}{where}", []).append(rank)
    return [f"ranks {where}: {what}" for what, where in ranks.items()] or [f"this rank: {error}"]
