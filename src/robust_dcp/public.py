"""The public names of what a save or a load needs. The package imports them from here when one is first used.

``as`` says that a name is meant for others: without it type checkers take it for one of this module's own.
"""
# ruff: noqa: PLC0414

from robust_dcp.api import load as load
from robust_dcp.api import save as save
from robust_dcp.asynchronous import AsyncSave as AsyncSave
from robust_dcp.asynchronous import async_save as async_save
from robust_dcp.comm.channel import Channel as Channel
from robust_dcp.drain.copy import CopyResult as CopyResult
from robust_dcp.drain.copy import copy_checkpoint as copy_checkpoint
from robust_dcp.errors import CorruptCheckpoint as CorruptCheckpoint
from robust_dcp.errors import ExchangeError as ExchangeError
from robust_dcp.errors import ExchangeTimeout as ExchangeTimeout
from robust_dcp.errors import PlanConflict as PlanConflict
from robust_dcp.errors import RobustCheckpointError as RobustCheckpointError
from robust_dcp.errors import StorageError as StorageError
from robust_dcp.errors import StructureChanged as StructureChanged
from robust_dcp.errors import UnsafeCheckpoint as UnsafeCheckpoint
from robust_dcp.events import Event as Event
from robust_dcp.events import on_event as on_event
from robust_dcp.plan.load_planner import RobustLoadPlanner as RobustLoadPlanner
from robust_dcp.plan.save_planner import RobustPlanner as RobustPlanner
from robust_dcp.plan.state_dict import StructureSignature as StructureSignature
from robust_dcp.report import LoadReport as LoadReport
from robust_dcp.report import SaveReport as SaveReport
from robust_dcp.save_queue import finish_async_saves as finish_async_saves
from robust_dcp.storage.options import ReadOptions as ReadOptions
from robust_dcp.storage.options import WriteOptions as WriteOptions
from robust_dcp.storage.reader import RobustReader as RobustReader
from robust_dcp.storage.remote import CopyOptions as CopyOptions
from robust_dcp.storage.writer import RobustWriter as RobustWriter
