"""Copies of a manager's checkpoints that were begun and have not arrived: their job was killed, or the store failed.

They go on in the background, on the coordinator alone, whenever the manager saves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from robust_dcp.background import queue_of
from robust_dcp.drain import CopyOptions, awaited_copy, copy_checkpoint, is_awaited
from robust_dcp.errors import RobustCheckpointError
from robust_dcp.manager.checkpoints import Checkpoint
from robust_dcp.storage.files.being_loaded import not_being_loaded
from robust_dcp.storage.files.disk import Disk

__all__ = ["resume_drains"]

logger = logging.getLogger(__name__)


def resume_drains(disk: Disk, checkpoints: Sequence[Checkpoint], options: CopyOptions) -> None:
    """Go on with the copies of these checkpoints that nobody works on. Returns at once."""
    paths = [each.path for each in checkpoints if is_awaited(disk, each.path)]
    queue = queue_of((os.getpid(),), "resumed drain")
    if paths and not queue.n_under_way:
        queue.submit(lambda: _resume_all(disk, paths, options))


def _resume_all(disk: Disk, paths: Sequence[str], options: CopyOptions) -> None:
    for path in paths:
        _resume(disk, path, options)


def _resume(disk: Disk, path: str, options: CopyOptions) -> None:
    """An error is logged, and the next save tries again: the checkpoint stays until its copy has arrived."""
    try:
        with not_being_loaded(disk, path) as is_free:
            awaited = awaited_copy(disk, path) if is_free else None  # a drain holds it as a load does
        if awaited is None:
            return
        copied = copy_checkpoint(path, awaited.target, options=options, disk=disk)
        logger.info("%s has arrived at %s, after a drain that was cut off: %d files", path, copied.target, copied.files)
    except (RobustCheckpointError, ValueError) as error:
        logger.warning("%s: its copy is still not complete: %s", path, error)
