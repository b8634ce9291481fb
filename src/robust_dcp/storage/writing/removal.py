"""How what a save has made, or what its commit replaces, is removed.

Owns what counts as removed, the order for files on other mounts, and the words for what stays. Never decides what may
go (``leftovers``, ``save_directory``).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable
from typing import Final

from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import check_relative_path
from robust_dcp.storage.writing.stripes import remove_target

__all__ = ["is_gone", "is_gone_or_told", "name_left_over", "remove_data_files"]

logger = logging.getLogger(__name__)

_SHOWN: Final = 20


def is_gone(remove: Callable[[str], None], path: str, harmless: Collection[int] = (errno.ENOENT,)) -> bool:
    """Remove ``path``; whether that worked, or failed as it may."""
    try:
        remove(path)
    except StorageError as error:
        return error.errno in harmless
    return True


def is_gone_or_told(remove: Callable[[str], None], path: str) -> bool:
    """Remove ``path`` if that is possible; whether it is gone. The log says so if it is not."""
    try:
        remove(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return True
        logger.warning("not removed, which costs space and nothing else: %s", error.message)
        return False
    return True


def remove_data_files(disk: Disk, directory: str, files: Iterable[str], *, keep: Collection[str] = ()) -> list[str]:
    """Remove files that no committed checkpoint names (any more); after a commit call it when that has returned.

    A file that cannot be removed stays: the checkpoint is right, only larger on disk. One on another mount goes before
    the link to it: a link to nothing is found and removed by the next commit, a file without a link by nobody.

    Args:
        files: relative paths, of the old checkpoint or of saves that failed.
        keep: relative paths that the committed metadata names; these are never removed.

    Returns:
        The relative paths that are still there.

    Raises:
        UnsafeCheckpoint: a path leaves the directory.
    """
    doomed = sorted({check_relative_path(path, file=directory) for path in files} - set(keep))

    def remains(name: str) -> bool:
        is_link_free = is_gone_or_told(lambda name: remove_target(disk, directory, name), name)
        return not (is_link_free and is_gone_or_told(disk.unlink, os.path.join(directory, name)))

    return list(filter(remains, doomed))


def name_left_over(error: BaseException, paths: Collection[str]) -> None:
    """Name in the error of a failed save what it has made and could not remove."""
    if not paths:
        return
    named = sorted(set(paths))
    shown = ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")
    told = f"what the failed save has made and could not remove: {shown}; the next save into that directory tries again"
    if isinstance(error, RobustCheckpointError):
        error.message = f"{error.message}; {told}"
    else:
        logger.warning("%s", told)
