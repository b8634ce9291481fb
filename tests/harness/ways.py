"""The ways to save and to load that have to understand each other: ours, stock, and stock with our parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import robust_dcp
from robust_dcp import RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter

__all__ = ["LOADERS", "OTHER_SAVERS", "SAVERS"]

StateDict = dict[str, Any]
Way = Callable[[StateDict, str], Any]

SAVERS: dict[str, Way] = {
    "ours": lambda state_dict, path: robust_dcp.save(state_dict, checkpoint_id=path),
    "stock": lambda state_dict, path: dcp.save(state_dict, checkpoint_id=path),
    "stock + writer": lambda state_dict, path: dcp.save(state_dict, storage_writer=RobustWriter(path)),
    "stock + planner": lambda state_dict, path: dcp.save(state_dict, checkpoint_id=path, planner=RobustPlanner()),
    "stock + both": lambda state_dict, path: dcp.save(
        state_dict, storage_writer=RobustWriter(path), planner=RobustPlanner()
    ),
    "stock no_dist + both": lambda state_dict, path: dcp.save(
        state_dict, storage_writer=RobustWriter(path), planner=RobustPlanner(), no_dist=True
    ),
}

LOADERS: dict[str, Way] = {
    "ours": lambda state_dict, path: robust_dcp.load(state_dict, checkpoint_id=path),
    "ours + stock reader": lambda state_dict, path: robust_dcp.load(
        state_dict, storage_reader=dcp.FileSystemReader(path), planner=dcp.DefaultLoadPlanner()
    ),
    "switch": lambda state_dict, path: _by_switch(dcp.load, state_dict, path),
    "stock": lambda state_dict, path: dcp.load(state_dict, checkpoint_id=path),
    "stock + reader": lambda state_dict, path: dcp.load(state_dict, storage_reader=RobustReader(path)),
    "stock + planner": lambda state_dict, path: dcp.load(state_dict, checkpoint_id=path, planner=RobustLoadPlanner()),
    "stock no_dist + both": lambda state_dict, path: dcp.load(
        state_dict, storage_reader=RobustReader(path), planner=RobustLoadPlanner(), no_dist=True
    ),
}

OTHER_SAVERS: dict[str, Way] = {
    "switch": lambda state_dict, path: _by_switch(dcp.save, state_dict, path),
    "async": lambda state_dict, path: _beside_training(robust_dcp.async_save, state_dict, checkpoint_id=path),
    "async process": lambda state_dict, path: _beside_training(
        robust_dcp.async_save, state_dict, checkpoint_id=path, executor="process"
    ),
    "stock async + both": lambda state_dict, path: _stock_async(state_dict, path, "thread"),
    "stock async process + both": lambda state_dict, path: _stock_async(state_dict, path, "process"),
    "safetensors": lambda state_dict, path: robust_dcp.save(
        state_dict, storage_writer=RobustWriter(path, layout="safetensors")
    ),
}


def _by_switch(call: Callable[..., Any], state_dict: StateDict, path: str) -> None:
    """Stock's own call, under the name that it has in the program after ``install``."""
    robust_dcp.install()
    try:
        getattr(dcp, call.__name__)(state_dict, checkpoint_id=path)
    finally:
        robust_dcp.uninstall()


def _stock_async(state_dict: StateDict, path: str, kind: str) -> None:
    writer, planner = RobustWriter(path), RobustPlanner()
    kind_of = AsyncCheckpointerType(kind)
    _beside_training(
        dcp.async_save, state_dict, storage_writer=writer, planner=planner, async_checkpointer_type=kind_of
    )


def _beside_training(call: Callable[..., Any], state_dict: StateDict, **arguments: Any) -> None:
    """Overwrite what is saved as soon as the call has returned, and put it back when the save is over."""
    saving = call(state_dict, **arguments)
    tensors = {key: each for key, each in state_dict.items() if type(each) is torch.Tensor and not each.requires_grad}
    writable = [each for each in tensors.values() if not each.is_quantized and each.is_contiguous()]
    kept = [each.clone() for each in writable]
    for each in writable:
        each.zero_()
    getattr(saving, "upload_completion", saving).result()
    for each, before in zip(writable, kept, strict=True):
        each.copy_(before)
