"""The note in a local checkpoint that says where it is copied to, and whether all of it has arrived.

The note is the file ``.robust_dcp.drain.json`` beside ``.metadata``. It counts for the save that it names, and for no
other. Without it a checkpoint loads as well; only nobody knows of its copy. ``robust-dcp prune`` reads it without
torch.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.commit import commit_metadata
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.whole_file import read_whole_file

__all__ = [
    "DRAIN_RECORD_NAME",
    "DrainRecord",
    "is_awaited",
    "note_arrival",
    "read_drain_record",
    "target_of",
    "write_drain_record",
]

DRAIN_RECORD_NAME: Final = ".robust_dcp.drain.json"

_MAX_NBYTES: Final = 1 << 20


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
    """The record of a checkpoint; ``None`` if there is none, or none that can be understood."""
    try:
        data = read_whole_file(disk, os.path.join(path, DRAIN_RECORD_NAME), _MAX_NBYTES)
        return None if data is None else msgspec.json.decode(data, type=DrainRecord)
    except (errors.RobustCheckpointError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_awaited(disk: Disk, path: str) -> bool:
    """Whether a copy of the checkpoint was begun or promised, and has not arrived yet."""
    return target_of(disk, path) is not None


def target_of(disk: Disk, path: str) -> str | None:
    """Where the copy of a checkpoint shall be that has not arrived yet."""
    record = read_drain_record(disk, path)
    return None if record is None or record.is_complete else record.target


def note_arrival(disk: Disk, path: str) -> None:
    """Note that the copy is complete. Raises the same as :func:`write_drain_record`."""
    record = read_drain_record(disk, path)
    if record is not None:
        write_drain_record(disk, path, DrainRecord(record.target, record.save_id, is_complete=True))


def write_drain_record(disk: Disk, path: str, record: DrainRecord) -> None:
    """Write it durably, in one step.

    Raises:
        StorageError: a call failed.
    """
    commit_metadata(disk, path, msgspec.json.encode(record), name=DRAIN_RECORD_NAME)
