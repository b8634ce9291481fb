"""Removes files that a failed save has made, or that a commit has replaced.

This module owns what counts as removed, the order of removals for files on other mounts, and the messages about files
that stay. It never decides which files may be removed: ``leftovers`` and ``save_directory`` do.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable
from typing import Final

from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.stripes import remove_target
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import check_relative_path

__all__ = ["is_gone", "is_gone_or_told", "name_left_over", "remove_data_files"]

logger = logging.getLogger(__name__)

_SHOWN: Final = 20


def is_gone(remove: Callable[[str], None], path: str, harmless: Collection[int] = (errno.ENOENT,)) -> bool:
    """Remove ``path``. Returns whether that worked, or failed with one of the ``harmless`` errors."""
    try:
        remove(path)
    except errors.StorageError as error:
        return error.errno in harmless
    return True


def is_gone_or_told(remove: Callable[[str], None], path: str) -> bool:
    """Remove ``path`` if that is possible. Returns whether it is gone; if not, this is logged."""
    try:
        remove(path)
    except errors.StorageError as error:
        if error.errno == errno.ENOENT:
            return True
        logger.warning("not removed, which costs space and nothing else: %s", error.message)
        return False
    return True


def remove_data_files(
    disk: Disk, directory: str, files: Iterable[str], *, keep: Collection[str] = (), saved_as: str | None = None
) -> list[str]:
    """Remove files that no committed checkpoint names any more. After a commit, call this only once the commit has
    returned.

    A file that cannot be removed stays: the checkpoint is right, and only takes more space. A file on another mount is
    removed before the link to it. If we are killed in between, the next commit finds and removes a link without a file,
    but nobody would find a file without a link.

    Args:
        files: relative paths of files of the old checkpoint or of saves that failed.
        keep: relative paths that the committed metadata names. These are never removed.
        saved_as: the path that the directory had when its files were written, if it was renamed.

    Returns:
        The relative paths that are still there.

    Raises:
        UnsafeCheckpoint: a path leads out of the directory.
    """
    doomed = sorted({check_relative_path(path, file=directory) for path in files} - set(keep))

    def remains(name: str) -> bool:
        is_link_free = is_gone_or_told(lambda name: remove_target(disk, directory, name, saved_as), name)
        return not (is_link_free and is_gone_or_told(disk.unlink, os.path.join(directory, name)))

    return list(filter(remains, doomed))


def name_left_over(error: BaseException, paths: Collection[str]) -> None:
    """Add to the error of a failed save which files it has made and could not remove."""
    if not paths:
        return
    named = sorted(set(paths))
    shown = ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")
    told = f"what the failed save has made and could not remove: {shown}; the next save into that directory tries again"
    if isinstance(error, errors.RobustCheckpointError):
        error.message = f"{error.message}; {told}"
    else:
        logger.warning("%s", told)
