"""The ways to save and to load that have to understand each other: ours, stock, and stock with our parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter

__all__ = ["LOADERS", "SAVERS"]

StateDict = dict[str, Any]

SAVERS: dict[str, Callable[[StateDict, str], Any]] = {
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

LOADERS: dict[str, Callable[[StateDict, str], Any]] = {
    "ours": lambda state_dict, path: robust_dcp.load(state_dict, checkpoint_id=path),
    "ours + stock reader": lambda state_dict, path: robust_dcp.load(
        state_dict, storage_reader=dcp.FileSystemReader(path), planner=dcp.DefaultLoadPlanner()
    ),
    "stock": lambda state_dict, path: dcp.load(state_dict, checkpoint_id=path),
    "stock + reader": lambda state_dict, path: dcp.load(state_dict, storage_reader=RobustReader(path)),
    "stock + planner": lambda state_dict, path: dcp.load(state_dict, checkpoint_id=path, planner=RobustLoadPlanner()),
    "stock no_dist + both": lambda state_dict, path: dcp.load(
        state_dict, storage_reader=RobustReader(path), planner=RobustLoadPlanner(), no_dist=True
    ),
}
