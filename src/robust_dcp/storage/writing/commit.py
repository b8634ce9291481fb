"""The moment at which a save counts: ``.metadata`` replaced in one durable step, and what is removed afterwards.

Owns the order of the system calls. Never touches a data file of a committed checkpoint before the next is durable.
The coordinator calls it once every rank has written, fsynced and closed its data files.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import (
    METADATA_NAME,
    SAFETENSORS_SUFFIX,
    check_relative_path,
    is_data_file,
    parse_data_file_name,
)
from robust_dcp.storage.layouts import FileName
from robust_dcp.storage.layouts.read_head import read_head

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BEFORE_RENAME", "commit_metadata", "keep_beside", "remove_superseded", "unreferenced_files"]

logger = logging.getLogger(__name__)

_RENAME_DATA: Final = "give data files their names"
BEFORE_RENAME: Final = frozenset({"create", "write", "fsync", "close", _RENAME_DATA})
"""Operations (of a ``StorageError``) whose failure in :func:`commit_metadata` leaves the old checkpoint the only one.
After any other both may be found later, and the data files of both have to stay."""

# Ours, and stock's .metadata.tmp.
_TEMPORARY: Final = re.compile(r"(?:(?:__\d+)?\.metadata|\.robust_dcp\.plan)\.(?:[0-9a-f]{16}\.)?tmp")


def commit_metadata(
    disk: Disk,
    directory: str,
    encoded: Buffer | Sequence[Buffer],
    *,
    name: str = METADATA_NAME,
    renames: Sequence[FileName] = (),
) -> None:
    """Make ``encoded`` (in parts that follow each other) the metadata of the checkpoint in ``directory``, wholly or not
    at all.

    The calls, in this order; killed or powered off between any two, the directory loads as before up to 6 and as the
    new checkpoint after 7, and in between as one of the two:

    1. create ``.metadata.<random>.tmp`` (exclusively: no left-over of a killed save is written to)
    2. write it
    3. fsync it: its bytes are durable
    4. close it; give each data file its name, where the layout has another one until then
    5. fsync the directory: the names of the new data files are durable
    6. rename it to ``.metadata``, over the old one
    7. fsync the directory: the rename is durable

    Args:
        renames: the data files whose names change with the commit.

    Raises:
        StorageError: a call failed. Up to call 5 the old checkpoint is untouched, and the temporary file and what call
            4 has renamed are removed. If call 6 or 7 failed, either may be found later: both are complete, so keep
            the data files of both.
    """
    temporary = os.path.join(directory, f"{name}.{secrets.token_hex(8)}.tmp")
    file = disk.open_new(temporary)
    renamed: list[str] = []
    try:
        try:
            disk.pwrite(file, encoded, 0)
            disk.fsync(file)
        finally:
            disk.close(file)
        _rename_data(disk, directory, renames, renamed)
        disk.fsync_directory(directory)
        renamed = []  # from here on they may be a committed checkpoint's
        disk.rename(temporary, os.path.join(directory, name))
    except BaseException:
        _remove(disk, temporary)
        for path in renamed:
            _remove(disk, path)
        raise
    disk.fsync_directory(directory)


def _rename_data(disk: Disk, directory: str, renames: Sequence[FileName], renamed: list[str]) -> None:
    """Rename, and note in ``renamed`` what has got its name."""
    for name in renames:
        if name.written == name.committed:
            continue
        path = os.path.join(directory, name.committed)
        try:
            disk.rename(os.path.join(directory, name.written), path)
        except StorageError as error:
            raise StorageError(error.message, path=error.path, errno=error.errno, operation=_RENAME_DATA) from error
        renamed.append(path)


def keep_beside(disk: Disk, directory: str, data: bytes, *, name: str) -> None:
    """Put a file beside a committed checkpoint that it can do without: in one step, but without waiting for the disk.

    Raises:
        StorageError: a call failed; the file is as before, or gone.
    """
    temporary = os.path.join(directory, f"{name}.{secrets.token_hex(8)}.tmp")
    file = disk.open_new(temporary)
    try:
        try:
            disk.pwrite(file, data, 0)
        finally:
            disk.close(file)
        disk.rename(temporary, os.path.join(directory, name))
    except BaseException:
        _remove(disk, temporary)
        raise


def remove_superseded(disk: Disk, directory: str, files: Iterable[str], *, keep: Collection[str] = ()) -> list[str]:
    """Remove data files that no committed checkpoint names any more; call it after :func:`commit_metadata` returned.

    A file that cannot be removed is logged and stays: the checkpoint is committed and right, only larger on disk.

    Args:
        files: relative paths, of the old checkpoint and of saves that failed.
        keep: relative paths that the committed metadata names; these are never removed.

    Returns:
        The relative paths that are still there.

    Raises:
        UnsafeCheckpoint: a path leaves the directory.
    """
    doomed = sorted({check_relative_path(path, file=directory) for path in files} - set(keep))
    return [path for path in doomed if not _remove(disk, os.path.join(directory, path))]


def unreferenced_files(disk: Disk, directory: str, referenced: Collection[str]) -> list[str]:
    """The data files and temporary metadata files in ``directory`` that ``referenced`` does not list.

    They are of saves that failed or were killed, or of one that is running right now: only the owner of the directory
    knows that none is. Of safetensors files those count that are marked as ours: torch's writer gives the same names.
    """
    return [
        name
        for name in disk.list_directory(directory)
        if name not in referenced and (_TEMPORARY.fullmatch(name) or _is_ours(disk, directory, name))
    ]


def _is_ours(disk: Disk, directory: str, name: str) -> bool:
    """Whether a file is known to be no other program's."""
    if not is_data_file(name):
        return False
    if parse_data_file_name(name) is not None or not name.endswith(SAFETENSORS_SUFFIX):
        return True
    path = os.path.join(directory, name)
    if not disk.exists(path):  # the link of a stripe whose file is gone
        return True
    try:
        return read_head(disk, path).is_of_checkpoint
    except CorruptCheckpoint:  # ours have their names only once they are durable
        return False


def _remove(disk: Disk, path: str) -> bool:
    """Remove ``path`` if that is possible; whether it is gone."""
    try:
        disk.unlink(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return True
        logger.warning("not removed, which costs space and nothing else: %s", error.message)
        return False
    return True
