"""Saves and loads PyTorch distributed checkpoints: validated plans, exchanges that end, durable commits."""

from typing import TYPE_CHECKING

from robust_dcp.on_demand import names_from
from robust_dcp.version import __version__

if TYPE_CHECKING:
    from robust_dcp.api import load, save
    from robust_dcp.asynchronous import AsyncSave, async_save, finish_async_saves
    from robust_dcp.comm.channel import Channel
    from robust_dcp.drain.copy import CopyResult, copy_checkpoint
    from robust_dcp.drain.nearest import nearest_copy
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
    from robust_dcp.events import Event, on_event
    from robust_dcp.installation import install, uninstall
    from robust_dcp.manager.manager import CheckpointManager
    from robust_dcp.manager.series import Checkpoint, KeepBest, KeepEvery, KeepLast, KeepPolicy
    from robust_dcp.plan.load_planner import RobustLoadPlanner
    from robust_dcp.plan.save_planner import RobustPlanner
    from robust_dcp.plan.signature import StructureSignature
    from robust_dcp.report import LoadReport, SaveReport
    from robust_dcp.storage.reader import RobustReader
    from robust_dcp.storage.reading.read_options import ReadOptions
    from robust_dcp.storage.remote import CopyOptions
    from robust_dcp.storage.writer import RobustWriter
    from robust_dcp.storage.writing.write_options import WriteOptions

__all__ = [
    "AsyncSave",
    "Channel",
    "Checkpoint",
    "CheckpointManager",
    "CopyOptions",
    "CopyResult",
    "CorruptCheckpoint",
    "Event",
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
    "on_event",
    "save",
    "uninstall",
]

__getattr__, __dir__ = names_from(
    __name__,
    {
        "robust_dcp.api": ("load", "save"),
        "robust_dcp.asynchronous": ("AsyncSave", "async_save", "finish_async_saves"),
        "robust_dcp.comm.channel": ("Channel",),
        "robust_dcp.drain.copy": ("CopyResult", "copy_checkpoint"),
        "robust_dcp.drain.nearest": ("nearest_copy",),
        "robust_dcp.errors": (
            "CorruptCheckpoint",
            "ExchangeError",
            "ExchangeTimeout",
            "PlanConflict",
            "RobustCheckpointError",
            "StorageError",
            "StructureChanged",
            "UnsafeCheckpoint",
        ),
        "robust_dcp.events": ("Event", "on_event"),
        "robust_dcp.installation": ("install", "uninstall"),
        "robust_dcp.manager.manager": ("CheckpointManager",),
        "robust_dcp.manager.series": ("Checkpoint", "KeepBest", "KeepEvery", "KeepLast", "KeepPolicy"),
        "robust_dcp.plan.load_planner": ("RobustLoadPlanner",),
        "robust_dcp.plan.save_planner": ("RobustPlanner",),
        "robust_dcp.plan.signature": ("StructureSignature",),
        "robust_dcp.report": ("LoadReport", "SaveReport"),
        "robust_dcp.storage.reader": ("RobustReader",),
        "robust_dcp.storage.reading.read_options": ("ReadOptions",),
        "robust_dcp.storage.remote": ("CopyOptions",),
        "robust_dcp.storage.writer": ("RobustWriter",),
        "robust_dcp.storage.writing.write_options": ("WriteOptions",),
    },
)
