"""The note in a local checkpoint that says whether a copy of it is awaited.

The note is the file ``.robust_dcp.drain.json`` beside ``.metadata``. It counts for the ``.metadata`` that it was
written for: where a later save has replaced that one, nothing is awaited. Without the note a checkpoint loads as well;
only nobody knows of its copy. ``robust-dcp prune`` reads it without torch.

The note may have come with a checkpoint that somebody else has made, or with the copy of a whole run. So nothing is
ever copied to the place that it names: that place is only compared with the one that a job or a person has given. And
what the copy may replace there counts only in the directory that the note was written in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import partial
from typing import Final

import msgspec

from robust_dcp import errors
from robust_dcp.decoding import from_json
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, real_place
from robust_dcp.storage.files.small_files import read_hint

logger = logging.getLogger(__name__)

DRAIN_RECORD_NAME: Final = ".robust_dcp.drain.json"

_MAX_NBYTES: Final = 1 << 20
_TAIL_NBYTES: Final = 4096


class DrainRecord(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        target: where the copy was to go when the note was written.
        digest: :func:`digest_at` of the checkpoint that is copied.
        is_complete: whether all of it has arrived.
        replaces: digests of earlier checkpoints of this directory. If one of them is at the target, the copy takes its
            place.
        directory: the inode of the directory. A note that was copied along with its checkpoint lies in another one, and
            says nothing of what was there before.
    """

    target: str
    digest: str
    is_complete: bool = False
    replaces: tuple[str, ...] = ()
    directory: int = 0

    def __post_init__(self) -> None:
        if "\0" in self.target:
            raise ValueError("its target holds a NUL")


def digest_of(nbytes: int, end: bytes) -> str:
    """16 hexadecimal digits that tell a checkpoint from others.

    They are a digest of the length and the end of ``.metadata``, which holds the id of the save.
    """
    return hashlib.blake2b(nbytes.to_bytes(8, "little") + end[-_TAIL_NBYTES:], digest_size=8).hexdigest()


def digest_at(disk: Disk, path: str) -> str:
    """:func:`digest_of` the checkpoint in a directory.

    Raises:
        StorageError: it cannot be read.
    """
    return digest_of(*disk.read_end(os.path.join(path, METADATA_NAME), _TAIL_NBYTES))


def awaited_copy(disk: Disk, path: str) -> DrainRecord | None:
    """The record of a copy that was promised or begun, and has not arrived yet; ``None`` if there is none.

    Raises:
        StorageError: that cannot be read.
    """
    record = read_drain_record(disk, path)
    return None if record is None or record.is_complete or record.digest != digest_at(disk, path) else record


def read_drain_record(disk: Disk, path: str) -> DrainRecord | None:
    """The record in a directory, also of a checkpoint that was replaced; ``None`` if there is none that can be read.

    Raises:
        StorageError: the file system refuses.
    """
    note_path, decode = os.path.join(path, DRAIN_RECORD_NAME), partial(from_json, kind=DrainRecord)
    record = read_hint(disk, note_path, decode, what="the note of a copy", at_most=_MAX_NBYTES)
    if record is None or (record.directory and record.directory == inode_of(disk, path)):
        return record
    return msgspec.structs.replace(record, replaces=(), directory=0)


def announce_copy(disk: Disk, path: str, target: str, *, replaces: tuple[str, ...] = ()) -> DrainRecord:
    """Note in a checkpoint that it will be copied to ``target``, an absolute place, unless its note says so already.

    Args:
        replaces: digests of checkpoints of other directories whose copies to ``target`` this one takes the place of.

    Raises:
        StorageError: a call failed.
    """
    former, digest = read_drain_record(disk, path), digest_at(disk, path)
    goes_there = former is not None and real_place(former.target) == real_place(target)
    if former is not None and goes_there and former.digest == digest:
        return former
    if former is not None and goes_there and former.directory:
        replaces = (*replaces, *(() if former.is_complete else former.replaces), former.digest)
    record = DrainRecord(target, digest, replaces=replaces, directory=inode_of(disk, path))
    write_drain_record(disk, path, record)
    return record


def inode_of(disk: Disk, path: str) -> int:
    """The inode of a directory; 0 if there is none.

    Raises:
        StorageError: it cannot be looked at.
    """
    fingerprint = disk.fingerprint(path)
    return 0 if fingerprint is None else fingerprint[0]


def is_awaited(disk: Disk, path: str) -> bool:
    """Whether a copy of the checkpoint has not arrived yet. If that cannot be found out, it has not."""
    try:
        return awaited_copy(disk, path) is not None
    except errors.StorageError:
        return True


def note_arrival(disk: Disk, path: str, record: DrainRecord) -> None:
    """Note that the copy of a record has arrived, if it is awaited. If that cannot be noted, it is logged."""
    try:
        if awaited_copy(disk, path) == record:
            write_drain_record(disk, path, msgspec.structs.replace(record, is_complete=True))
    except errors.StorageError as error:
        logger.warning("%s has arrived at %s, and that cannot be noted: %s", path, record.target, error.message)


def write_drain_record(disk: Disk, path: str, record: DrainRecord) -> None:
    """Write it durably, in one step. A target that is no UTF-8 stands there in escapes.

    Raises:
        StorageError: a call failed.
    """
    data = json.dumps(msgspec.structs.asdict(record)).encode()
    disk.replace_file(os.path.join(path, DRAIN_RECORD_NAME), data)
