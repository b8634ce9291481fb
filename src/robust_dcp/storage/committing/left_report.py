"""Writes the report that a save leaves beside its checkpoint.

A report is for people. So whatever goes wrong here is one line in the log, and the save has succeeded all the same.
``save_directory`` calls this after the commit, while it still holds the lock of the directory and its journal stands.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.report_file import REPORT_NAME, SavedReport, encode_report
from robust_dcp.storage.files.disk import Disk

__all__ = ["NO_INDEX", "leave_report", "unfinished_report"]

logger = logging.getLogger(__name__)

NO_INDEX: Final = "the checkpoint has no index, as it could not be written; a load takes longer"


def unfinished_report(mark: str) -> str:
    """The name of the report of the save with this mark, while it is written."""
    return f"{REPORT_NAME}.{mark}.tmp"


def leave_report(disk: Disk, directory: str, mark: str, make: Callable[[], SavedReport]) -> bool:
    """Put the report into ``directory``, wholly or not at all, in the place of an older one.

    Nothing waits for the device. After a power cut the file may be empty or missing, and then nobody believes it.

    Args:
        mark: the mark of the save. It names the unfinished file, so that the journal of the save accounts for it.

    Returns:
        Whether it is there.
    """
    unfinished = os.path.join(directory, unfinished_report(mark))
    try:
        data = encode_report(make())
        try:
            file = disk.open_new(unfinished)
            try:
                disk.pwrite(file, data, 0)
            finally:
                disk.close(file)
            disk.rename(unfinished, os.path.join(directory, REPORT_NAME))
        except StorageError:
            with contextlib.suppress(StorageError):
                disk.unlink(unfinished)
            raise
    except Exception as error:  # the checkpoint is committed, so the save has succeeded
        logger.warning("%s is committed, but has no report of its save: %s", directory, error)
        return False
    return True
