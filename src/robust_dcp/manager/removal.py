"""Removes checkpoints that no policy keeps, and what crashed saves have left.

A checkpoint is first renamed to a name that no checkpoint has. Then its files are removed. If the process is killed in
between, the next removal finds the directory by its name and finishes the work. So at no moment does half a checkpoint
have its old name. A checkpoint that is being loaded stays. Of a crashed save only those files are removed that its
journal names.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOENT
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.manager.checkpoints import uncommitted_directories
from robust_dcp.manager.latest import LATEST_NAME
from robust_dcp.manager.paths import REMOVING_PREFIX
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.committing.directory_lock import DirectoryLock
from robust_dcp.storage.committing.journal import journals_in
from robust_dcp.storage.committing.leftovers import find_left_overs
from robust_dcp.storage.committing.removal import is_gone_or_told, remove_data_files
from robust_dcp.storage.files.being_loaded import not_being_loaded
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.paths import INDEX_NAME, LOCK_NAME, is_data_file
from robust_dcp.storage.files.what_is_there import TRACKER_NAME

__all__ = ["finish_removals", "remove_checkpoint", "sweep_crashed_saves"]

logger = logging.getLogger(__name__)


_UNFINISHED: Final = re.compile(rf"(?:{re.escape(LATEST_NAME)}|{re.escape(TRACKER_NAME)})\.[0-9a-f]{{16}}\.tmp")
_OLD_SECONDS: Final = 60.0


def remove_checkpoint(disk: Disk, path: str) -> bool:
    """Remove a checkpoint with all that lies in its directory.

    Returns:
        ``False`` if it is being loaded, or saved to, or if it is a symbolic link; then nothing has been touched.

    Raises:
        StorageError: a call failed. If the checkpoint has lost its name, :func:`finish_removals` goes on.
    """
    if os.path.islink(path):
        return False
    root, name = os.path.split(path)
    doomed = os.path.join(root, f"{REMOVING_PREFIX}{name}")
    if disk.exists(doomed):  # an earlier removal of that name was cut off
        _remove_tree(disk, doomed)
    with _alone(disk, path) as is_alone:
        if not is_alone:
            return False
        disk.rename(path, doomed)
    disk.fsync_directory(root)
    _remove_tree(disk, doomed)
    return True


def finish_removals(disk: Disk, root: str) -> None:
    """Remove what removals have left that were cut off. What cannot be removed is logged, and stays.

    Raises:
        StorageError: the root cannot be looked at.
    """
    for name in disk.list_directory(root):
        if name.startswith(REMOVING_PREFIX):
            try:
                _remove_tree(disk, os.path.join(root, name))
            except StorageError as error:
                logger.warning("%s is not removed: %s", name, error.message)


def sweep_crashed_saves(disk: Disk, root: str) -> list[str]:
    """Remove what crashed saves have left in directories that hold no checkpoint.

    Returns:
        The directories that are gone. One into which a save runs stays as it is, and so do files that are not ours.
        What cannot be removed is logged, and stays.

    Raises:
        StorageError: the root cannot be looked at.
    """
    now_seconds = disk.modified_seconds(root)
    for path in _unfinished_names(disk, root):
        if _is_old(disk, path, now_seconds):
            is_gone_or_told(disk.unlink, path)
    return [path for path in uncommitted_directories(disk, root) if _sweep_or_tell(disk, path, now_seconds)]


def _unfinished_names(disk: Disk, root: str) -> list[str]:
    """Files that were about to become ``latest`` or the tracker when their job was killed."""
    return [os.path.join(root, name) for name in disk.list_directory(root) if _UNFINISHED.fullmatch(name)]


def _is_old(disk: Disk, path: str, now_seconds: float) -> bool:
    """Whether no job that still runs can have made it just now. Nothing else tells that of an empty directory."""
    try:
        changed_seconds = os.lstat(path).st_mtime if os.path.islink(path) else disk.modified_seconds(path)
    except (OSError, StorageError):  # another manager has just renamed or removed it
        return False
    return changed_seconds < now_seconds - _OLD_SECONDS


def _sweep_or_tell(disk: Disk, path: str, now_seconds: float) -> bool:
    try:
        return not os.path.islink(path) and _sweep(disk, path, now_seconds)
    except StorageError as error:
        logger.warning("%s: leftovers of a crashed save are not removed: %s", path, error.message)
        return False


def _sweep(disk: Disk, path: str, now_seconds: float) -> bool:
    names = disk.list_directory(path)
    journals = journals_in(names)
    is_empty = set(names) <= {LOCK_NAME}
    if not journals and not (is_empty and _is_old(disk, path, now_seconds)):
        return False
    try:
        lock = DirectoryLock.take(disk, path, save_id="sweep")
    except StorageError:  # a save runs
        return False
    try:
        found = find_left_overs(disk, path, names, None, now_seconds=now_seconds, is_locked=lock.is_proof)
        if found.others:
            return False
        left = remove_data_files(disk, path, found.files)
        for name in {INDEX_NAME, REPORT_NAME} & set(names) if journals else ():  # killed right before its commit
            disk.unlink(os.path.join(path, name))
        for name in journals:
            if found.by_journal.get(name, frozenset()).isdisjoint(left):
                disk.unlink(os.path.join(path, name))
    finally:
        lock.release()
    if set(disk.list_directory(path)) - {LOCK_NAME}:
        return False
    if disk.exists(os.path.join(path, LOCK_NAME)):
        disk.unlink(os.path.join(path, LOCK_NAME))
    disk.rmdir(path)
    return True


@contextmanager
def _alone(disk: Disk, path: str) -> Iterator[bool]:
    """Whether nobody loads the checkpoint, nor saves to its directory, as long as the block lasts."""
    try:
        saving = DirectoryLock.take(disk, path, save_id="removal")
    except StorageError:
        yield False
        return
    try:
        with not_being_loaded(disk, path) as is_free:
            yield is_free
    finally:
        saving.release()


def _remove_tree(disk: Disk, path: str) -> None:
    """Files on other mounts first, because they are found by their links. Another process may do the same meanwhile.

    A symbolic link is removed, and what it leads to is not.
    """
    if os.path.islink(path):
        is_gone_or_told(disk.unlink, path)
        return
    try:
        names = disk.list_directory(path)
    except StorageError as error:
        if error.errno == ENOENT:
            return
        raise
    root, name = os.path.split(path)
    saved_as = os.path.join(root, name.removeprefix(REMOVING_PREFIX))
    remove_data_files(disk, path, filter(is_data_file, names), saved_as=saved_as)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error("remove", path, error) from error
