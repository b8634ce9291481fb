"""What there is to a ``.metadata`` besides its contents: the checksum behind its pickle, whose it is, and whether loads
need it.

``robust-dcp ls`` asks that without torch, so this module imports none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from robust_dcp import errors
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.records.checksum import crc32

_MAGIC: Final = b"\nRDCPMD2"
# This follows the pickle, where pickle.load does not look: magic, length of the pickle, CRC-32 of the pickle.
_TRAILER: Final = struct.Struct("<8sQI")
TRAILER_NBYTES: Final = _TRAILER.size

_END: Final = b"ub."
"""How the pickle of a ``Metadata`` ends, with whatever pickler: its attributes are set, and that is all."""


def trailer_of(nbytes: int, crc: int) -> bytes:
    """The bytes that follow a pickle of ``nbytes`` bytes with CRC-32 ``crc``. By them we notice each flipped bit."""
    return _TRAILER.pack(_MAGIC, nbytes, crc)


def files_are_marked(data: bytes) -> bool:
    """Whether ``data`` ends in our trailer: each data file that this ``.metadata`` names has the mark of its save."""
    return data[-_TRAILER.size :].startswith(_MAGIC)


def is_cut_off(nbytes: int, end: bytes) -> bool:
    """Whether a ``.metadata`` of ``nbytes`` bytes that ends in ``end`` is shorter than it was written.

    A cut file that ends in a name such as ``sub.`` is not noticed here, if it is as stock writes it.
    """
    if files_are_marked(end):
        return bool(_TRAILER.unpack(end[-_TRAILER.size :])[1] != nbytes - _TRAILER.size)
    return not end.endswith(_END)


def pickle_in(data: bytes, file: str) -> bytes:
    """The pickle in ``data``, after a comparison with the trailer if there is one.

    Raises:
        CorruptCheckpoint: the file is empty, or differs from what the trailer says.
    """
    if not data:
        raise errors.CorruptCheckpoint.of_file(
            file, "a pickle", "an empty file (a save that lost power before it was on disk)"
        )
    if len(data) < _TRAILER.size or not files_are_marked(data):
        return data
    _, nbytes, expected = _TRAILER.unpack(data[-_TRAILER.size :])
    pickled = data[: -_TRAILER.size]
    found = crc32(pickled)
    if nbytes != len(pickled) or found != expected:
        raise errors.CorruptCheckpoint.of_file(
            file, f"{nbytes} bytes with CRC-32 {expected:08x}", f"{len(pickled)} bytes with CRC-32 {found:08x}"
        )
    return pickled


# Loads: a lock on ``.metadata``, which exists anyway. So nothing is written into a checkpoint, which may be read-only.


@contextmanager
def needed_for_a_load(disk: Disk, directory: str) -> Iterator[None]:
    """Keep a checkpoint from being removed by :mod:`robust_dcp.manager` while the block runs. On a file system without
    locks the block runs anyway.
    """
    file = None
    try:
        file = disk.open_read(os.path.join(directory, METADATA_NAME))
        disk.lock(file, shared=True)
    except errors.StorageError:  # not ``suppress``, which would import the errors, and torch, although nothing is wrong
        pass
    try:
        yield
    finally:
        if file is not None:
            disk.close(file)


@contextmanager
def not_being_loaded(disk: Disk, directory: str) -> Iterator[bool]:
    """Give ``True`` if no load uses the checkpoint. Then none can take the lock while the block runs.

    Raises:
        StorageError: ``.metadata`` cannot be opened.
    """
    path = os.path.join(directory, METADATA_NAME)
    flags = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY  # NFS locks no other file for one process alone
    with disk.reading(path, flags=flags) as file:
        yield disk.lock(file) is not False
