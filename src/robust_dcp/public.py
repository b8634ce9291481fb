"""The public names, which the package imports from here when one of them is first used."""
# ruff: noqa: F401

from robust_dcp.api import load, save
from robust_dcp.asynchronous import AsyncSave, async_save
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
from robust_dcp.save_queue import finish_async_saves
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.read_options import ReadOptions
from robust_dcp.storage.remote import CopyOptions
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.write_options import WriteOptions
