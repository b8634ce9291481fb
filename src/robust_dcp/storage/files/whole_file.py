"""Reads small files as a whole: those that Megatron writes beside a checkpoint.

Before it allocates memory, it checks that the file is a regular one and not too long.
"""

from __future__ import annotations

from errno import ENOENT

from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk

__all__ = ["read_whole_file"]


def read_whole_file(disk: Disk, path: str, max_nbytes: int) -> bytes | None:
    """The bytes of a file; ``None`` if it does not exist.

    Raises:
        StorageError: it is not a regular file, or cannot be read.
        CorruptCheckpoint: it is longer than ``max_nbytes``.
    """
    try:
        opened = disk.open_read(path)
    except errors.StorageError as error:
        if error.errno == ENOENT:
            return None
        raise
    try:
        nbytes = disk.size(opened)
        if nbytes > max_nbytes:
            raise errors.CorruptCheckpoint(
                f"{path} cannot be used: expected at most {max_nbytes} bytes, found {nbytes}; take another checkpoint, "
                "or restore the file",
                file=path,
                expected=f"at most {max_nbytes} bytes",
                found=f"{nbytes} bytes",
            )
        buffer = bytearray(nbytes)
        found = disk.pread_into(opened, buffer, 0)
    finally:
        disk.close(opened)
    return bytes(buffer[:found])
