"""The note in a local checkpoint that says where it is copied to, and whether all of it has arrived.

The note is the file ``.robust_dcp.drain.json`` beside ``.metadata``. It counts for the save that it names, and for no
other: where a later save has replaced that one, nothing is awaited. Without the note a checkpoint loads as well; only
nobody knows of its copy. ``robust-dcp prune`` reads it without torch.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.commit import commit_metadata
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.files.whole_file import read_whole_file

__all__ = [
    "DRAIN_RECORD_NAME",
    "DrainRecord",
    "awaited_copy",
    "is_awaited",
    "note_arrival",
    "read_drain_record",
    "write_drain_record",
]

DRAIN_RECORD_NAME: Final = ".robust_dcp.drain.json"

_MAX_NBYTES: Final = 1 << 20
_WINDOW_NBYTES: Final = 1 << 20


class DrainRecord(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        target: where the copy is.
        save_id: of the save that is copied.
        is_complete: whether all of it has arrived.
    """

    target: str
    save_id: str
    is_complete: bool


def read_drain_record(disk: Disk, path: str) -> DrainRecord | None:
    """The record of a checkpoint; ``None`` if there is none, or none that can be understood.

    Raises:
        StorageError: it is there, and cannot be read.
    """
    path = os.path.join(path, DRAIN_RECORD_NAME)
    if not disk.exists(path):  # found out here, because our errors need torch
        return None
    try:
        data = read_whole_file(disk, path, _MAX_NBYTES)
        return None if data is None else msgspec.json.decode(data, type=DrainRecord)
    except (errors.CorruptCheckpoint, msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_awaited(disk: Disk, path: str) -> bool:
    """Whether a copy of the checkpoint was begun or promised, and has not arrived yet. If that cannot be found out, it
    is."""
    try:
        return awaited_copy(disk, path) is not None
    except errors.StorageError:
        return True


def awaited_copy(disk: Disk, path: str) -> DrainRecord | None:
    """The record of a copy that has not arrived yet, if it is of the save that the directory holds now.

    Raises:
        StorageError: as :func:`read_drain_record`.
    """
    record = read_drain_record(disk, path)
    if record is None or record.is_complete or not _is_of_save(disk, path, record.save_id):
        return None
    return record


def note_arrival(disk: Disk, path: str, record: DrainRecord) -> None:
    """Note that the copy of a record is complete. The record of a later save stays as it is.

    Raises:
        StorageError: as :func:`write_drain_record`.
    """
    if read_drain_record(disk, path) == record:
        write_drain_record(disk, path, msgspec.structs.replace(record, is_complete=True))


def write_drain_record(disk: Disk, path: str, record: DrainRecord) -> None:
    """Write it durably, in one step.

    Raises:
        StorageError: a call failed, or the name of the target is no text.
    """
    try:
        data = msgspec.json.encode(record)
    except UnicodeEncodeError as error:
        raise errors.StorageError(
            f"{path}: {record.target!r} cannot be noted, because it is no UTF-8; give the target another name",
            path=path,
            operation="write",
        ) from error
    commit_metadata(disk, path, data, name=DRAIN_RECORD_NAME)


def _is_of_save(disk: Disk, path: str, save_id: str) -> bool:
    """Whether the save of this id is what a directory holds. ``True`` if that cannot be found out.

    ``.metadata`` has the id as text, near its end. Nothing is decoded, because it may be large, and torch is not here.
    """
    path = os.path.join(path, METADATA_NAME)
    text = save_id.encode()
    window_nbytes = max(_WINDOW_NBYTES, 2 * len(text))
    try:
        file = disk.open_read(path)
        try:
            end = disk.size(file)
            while end > 0:
                start = max(end - window_nbytes, 0)
                window = bytearray(end - start)
                disk.pread_into(file, window, start)
                if text in window:
                    return True
                end = start + len(text) - 1 if start else 0
        finally:
            disk.close(file)
    except errors.StorageError:
        return True
    return False
