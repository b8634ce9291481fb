"""Asks a file system to let two files share the same bytes on the device.

This module makes the system call, and knows which part of a range can be shared. It never decides whether bytes are
worth sharing. ``disk`` calls it.

The call is ``FICLONERANGE`` of ioctl_ficlonerange(2). XFS, Btrfs, bcachefs, OCFS2, ZFS and NFS 4.2 have it. It either
shares or fails. ``copy_file_range(2)`` is not used: where a file system cannot share, the kernel copies the bytes
itself, and nobody is told. That costs the write that was to be saved, and a read.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

__all__ = ["clone_range"]

_FICLONERANGE: Final = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range), linux/fs.h
_RANGE: Final = struct.Struct("=qQQQ")
_LARGEST_UNIT_NBYTES: Final = 64 << 10
"""No file system that shares has larger blocks. Network file systems report the size of a transfer instead."""


def clone_range(source_fd: int, target_fd: int, offset: int, nbytes: int) -> tuple[int, int]:
    """Let the target share a range of the source, at the same offset in both.

    Returns:
        The range that they share now, from its first byte to behind its last one: those blocks of the file system that
        lie completely in the range that was asked for. It is empty if there are none.

    Raises:
        OSError: this system or file system cannot do it, the files lie on two file systems, or the range does not exist
            in the source.
    """
    unit = os.fstatvfs(target_fd).f_frsize
    if not 0 < unit <= _LARGEST_UNIT_NBYTES:
        unit = 4096
    begin, end = -(-offset // unit) * unit, (offset + nbytes) // unit * unit
    if begin >= end:
        return offset, offset
    fcntl.ioctl(target_fd, _FICLONERANGE, _RANGE.pack(source_fd, begin, end - begin, begin))
    return begin, end
