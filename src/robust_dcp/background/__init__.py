"""Saves that run beside training: their copies of the data, their order, and the process that writes."""

from robust_dcp.background.save_queue import SaveQueue, finish_all, queue_of
from robust_dcp.background.staged_source import StagedSource
from robust_dcp.background.writer_process import WRITERS, WriteInProcess, refuse_disk

__all__ = ["WRITERS", "SaveQueue", "StagedSource", "WriteInProcess", "finish_all", "queue_of", "refuse_disk"]
