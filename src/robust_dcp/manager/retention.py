"""Removes the checkpoints of a series that no policy keeps, and what its crashed saves have left.

Only what carries our mark is removed: a checkpoint whose ``.metadata`` is ours, files with the mark of a
crashed save, and directories that an earlier removal has renamed. Whatever else lies below the root stays as it is.

A checkpoint is first renamed to a name that no checkpoint has. Then its files are removed. If the process is killed in
between, the next removal finds the directory by its name and finishes the work. So at no moment does half a checkpoint
have its old name. A checkpoint that is being loaded or saved to stays.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOENT
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.manager.series import KeepPolicy, Series, is_marked
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.committing.cleaning import find_left_overs, is_gone, remove_data_files
from robust_dcp.storage.committing.saving_file import claimed, not_being_loaded, saving_files_in
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, REMOVING_PREFIX, is_data_file

__all__ = ["Pruned", "prune", "remove_checkpoint"]

logger = logging.getLogger(__name__)

_OLD_SECONDS: Final = 60.0
"""Nothing tells whether the save still runs that has made a name without a journal beside it. One that is older than
this has lost it."""


@dataclass(frozen=True)
class Pruned:
    """Paths of directories.

    Attributes:
        removed: checkpoints that are gone.
        in_use: checkpoints that stay for now, because they are being loaded or saved.
        swept: leftovers of crashed saves that are gone.
        failed: checkpoints that could not be removed. The log says why.
    """

    removed: tuple[str, ...]
    in_use: tuple[str, ...]
    swept: tuple[str, ...]
    failed: tuple[str, ...] = ()


def prune(series: Series, policies: Sequence[KeepPolicy], *, only: Collection[str] | None = None) -> Pruned:
    """Remove what no policy keeps, and what crashed saves and removals that were cut off have left.

    Links, directories without a trace of us, and files that are not ours stay as they are. What cannot be removed is
    logged, and all else is removed all the same.

    Args:
        only: paths of checkpoints; no others are removed. ``None`` for no such limit.

    Raises:
        StorageError: the root cannot be looked at.
    """
    disk, root = series.disk, series.root
    if not disk.exists(root):  # nothing was saved yet
        return Pruned((), (), ())
    # Files and links that were about to become ``latest`` or the tracker when their job was killed.
    named = map(re.escape, filter(None, (series.latest_name, series.tracker_name)))
    unfinished = re.compile(rf"(?:{'|'.join(named)})\.[0-9a-f]{{16}}\.tmp")
    now_seconds = disk.modified_seconds(root)
    for name in disk.list_directory(root):
        path = os.path.join(root, name)
        if name.startswith(REMOVING_PREFIX) and series.step_of(name.removeprefix(REMOVING_PREFIX)) is not None:
            with _telling(path):
                _remove_tree(disk, path)
        elif unfinished.fullmatch(name):
            with suppress(FileNotFoundError):  # another manager has just renamed it
                if os.lstat(path).st_mtime < now_seconds - _OLD_SECONDS:
                    is_gone(disk.unlink, path, tells=True)
    swept: list[str] = []
    for path in series.directories():
        with _telling(f"what a crashed save has left in {path}"):
            if not os.path.islink(path) and _sweep(disk, path):
                swept.append(path)
    removed: list[str] = []
    in_use: list[str] = []
    failed = [each.path for each in (series.unkept(policies) if policies else ()) if only is None or each.path in only]
    for path in tuple(failed):
        with _telling(path):
            (removed if remove_checkpoint(disk, path) else in_use).append(path)
            failed.remove(path)
    return Pruned(tuple(removed), tuple(in_use), tuple(swept), tuple(failed))


@contextmanager
def _telling(what: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("%s is not removed: %s", what, error.message)


def remove_checkpoint(disk: Disk, path: str) -> bool:
    """Remove a checkpoint with all that lies in its directory.

    Returns:
        ``False`` if it is being loaded or saved to, is a symbolic link, or does not carry our mark; then nothing has
        been touched.

    Raises:
        StorageError: a call failed. If the checkpoint has lost its name, the next :func:`prune` goes on.
    """
    if os.path.islink(path):
        return False
    root, name = os.path.split(path)
    doomed = os.path.join(root, f"{REMOVING_PREFIX}{name}")
    if disk.exists(doomed):  # an earlier removal of that name was cut off
        _remove_tree(disk, doomed)
    try:
        with claimed(disk, path), not_being_loaded(disk, path) as is_free:
            if not is_free or not is_marked(disk, path):  # stock may have saved over it meanwhile
                return False
            disk.rename(path, doomed)
    except StorageError as error:
        if error.operation == "begin":  # a save runs
            return False
        raise
    disk.fsync_directory(root)
    _remove_tree(disk, doomed)
    return True


def _sweep(disk: Disk, path: str) -> bool:
    """Remove what crashed saves have left in a directory that holds no checkpoint. Returns whether it is gone."""
    names = disk.list_directory(path)
    if METADATA_NAME in names or not saving_files_in(names):
        return False
    try:
        with claimed(disk, path) as saves:
            found = find_left_overs(names, (), saves)
            if found.others:
                return False
            left = remove_data_files(disk, path, found.files)
            for name in {INDEX_NAME, REPORT_NAME} & set(names):  # killed right before its commit
                disk.unlink(os.path.join(path, name))
            for name, files in found.by_save.items():
                if files.isdisjoint(left):
                    disk.unlink(os.path.join(path, name))
    except StorageError as error:
        if error.operation == "begin":  # a save runs
            return False
        raise
    if disk.list_directory(path):
        return False
    disk.rmdir(path)
    return True


def _remove_tree(disk: Disk, path: str) -> None:
    """Files on other mounts first, because they are found by their links. Another process may do the same meanwhile.

    A symbolic link is removed, and what it leads to is not.
    """
    if os.path.islink(path):
        is_gone(disk.unlink, path, tells=True)
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
