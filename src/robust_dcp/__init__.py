"""Saves and loads PyTorch distributed checkpoints: validated plans, exchanges that end, durable commits."""

from robust_dcp.api import load, save
from robust_dcp.async_save import AsyncSave, async_save, finish_async_saves
from robust_dcp.comm import Channel
from robust_dcp.drain import CopyOptions, CopyResult, copy_checkpoint, nearest_copy
from robust_dcp.errors import (
    CorruptCheckpoint,
    ExchangeError,
    ExchangeTimeout,
    PlanConflict,
    RobustCheckpointError,
    StorageError,
    StructureChanged,
    UnsafeCheckpoint,
)
from robust_dcp.installation import install, uninstall
from robust_dcp.manager import Checkpoint, CheckpointManager, KeepBest, KeepEvery, KeepLast, KeepPolicy
from robust_dcp.plan.load_planner import RobustLoadPlanner
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.plan.structure import StructureSignature
from robust_dcp.report import LoadReport, SaveReport
from robust_dcp.storage import ReadOptions, RobustReader, RobustWriter, WriteOptions
from robust_dcp.version import __version__

__all__ = [
    "AsyncSave",
    "Channel",
    "Checkpoint",
    "CheckpointManager",
    "CopyOptions",
    "CopyResult",
    "CorruptCheckpoint",
    "ExchangeError",
    "ExchangeTimeout",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "LoadReport",
    "PlanConflict",
    "ReadOptions",
    "RobustCheckpointError",
    "RobustLoadPlanner",
    "RobustPlanner",
    "RobustReader",
    "RobustWriter",
    "SaveReport",
    "StorageError",
    "StructureChanged",
    "StructureSignature",
    "UnsafeCheckpoint",
    "WriteOptions",
    "__version__",
    "async_save",
    "copy_checkpoint",
    "finish_async_saves",
    "install",
    "load",
    "nearest_copy",
    "save",
    "uninstall",
]
