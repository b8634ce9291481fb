"""Reads the small files beside the data of a checkpoint: who saves, what is the latest, whether a copy is awaited.

Somebody else may have made them, or a device may have damaged them. So each is read with a bound for its length, and is
a hint: whoever reads one compares what it says with what is there, and never takes from it where something goes.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from robust_dcp import errors
from robust_dcp.storage.files.disk import Disk

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_REGULAR_FILE: Final = (errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP)
"""What the system says of a directory, a FIFO, a device, a socket, and of a link that is not followed."""


def read_small_file(
    disk: Disk,
    path: str,
    decode: Callable[[bytes], T],
    *,
    what: str,
    at_most: int,
    read: Callable[[], bytes | None] | None = None,
) -> T | None:
    """What a file says; ``None`` if there is none, which is found out without our errors, because they need torch.

    Args:
        decode: gives the value, or raises ``ValueError``.
        what: the kind of file, in words, for the error.
        at_most: how many bytes it may have.
        read: reads it, if that is more than to read what has this path.

    Raises:
        CorruptCheckpoint: it is no regular file, too long, or cannot be decoded.
        StorageError: the file system refuses.
    """
    if read is None and not disk.exists(path):
        return None
    reason = "what is no regular file"
    try:
        data = disk.read_file(path, at_most) if read is None else read()
    except errors.StorageError as error:
        if error.errno not in NO_REGULAR_FILE:
            raise
    else:
        try:
            return None if data is None else decode(data)
        except ValueError as error:
            reason = str(error)
    raise errors.CorruptCheckpoint.of_file(path, what, f"{reason:.300}")


def read_hint(disk: Disk, path: str, decode: Callable[[bytes], T], *, what: str, at_most: int) -> T | None:
    """As :func:`read_small_file`, for a file that can be done without: if it cannot be used, it is passed over, with a
    line in the log.

    Raises:
        StorageError: the file system refuses.
    """
    try:
        return read_small_file(disk, path, decode, what=what, at_most=at_most)
    except errors.CorruptCheckpoint as error:
        pass_over(path, f"expected {error.expected}, found {error.found:.300}")
        return None


@functools.lru_cache(maxsize=1024)  # a file is looked at several times in a save
def pass_over(path: str, reason: str) -> None:
    """Log, once, that what a file says does not count."""
    logger.warning("%s is passed over: %s", path, reason)
