"""The alignment that a file system needs for direct I/O, in memory and in the file.

This module asks the kernel with statx(2). It never opens a file. ``files.posix_disk`` calls it for every file that it
opens for direct I/O.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

__all__ = ["BUFFERED", "UNKNOWN", "Alignment", "alignment_of"]

# From linux/stat.h and linux/fcntl.h. The numbers are the same on all architectures.
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_NBYTES: Final = 256
_MASK_AT: Final = 0
_DIO_ALIGN_AT: Final = 0x98


@dataclass(frozen=True)
class Alignment:
    """The alignment that direct I/O on a file needs. Both values are powers of two, in bytes.

    Attributes:
        memory: addresses must be multiples of it.
        offset: offsets in the file, and lengths, must be multiples of it.
    """

    memory: int
    offset: int


BUFFERED: Final = Alignment(memory=1, offset=1)
"""Buffered I/O needs no alignment."""

UNKNOWN: Final = Alignment(memory=4096, offset=4096)
"""For kernels before 6.1, which cannot be asked. It is enough for every device with logical blocks of at most a page.
Where it is not enough, the first write fails with EINVAL, and the file goes on buffered.
"""


def alignment_of(fd: int) -> Alignment | None:
    """The alignment for direct I/O on an open file; ``None`` if its file system has no direct I/O (tmpfs, for
    example).
    """
    statx = _statx()
    if statx is None:
        return UNKNOWN
    answer = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return UNKNOWN
    (mask,) = struct.unpack_from("=I", answer, _MASK_AT)
    if not mask & _STATX_DIOALIGN:
        return None if _is_tmpfs(fd) else UNKNOWN
    memory, offset = struct.unpack_from("=II", answer, _DIO_ALIGN_AT)
    return Alignment(memory, offset) if memory and offset else None


def _is_tmpfs(fd: int) -> bool:
    """Whether a file is on tmpfs. From Linux 6.6 on, tmpfs accepts O_DIRECT, reports no alignment, and copies all the
    same.
    """
    statfs = _statfs()
    answer = ctypes.create_string_buffer(_STATX_NBYTES)
    if statfs is None or statfs(fd, answer) != 0:
        return False
    (kind,) = struct.unpack_from("=l", answer, 0)
    return bool(kind == 0x01021994)


@cache
def _statx() -> Callable[[int, bytes, int, int, object], int] | None:
    return _c_function("statx", (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p))


@cache
def _statfs() -> Callable[[int, object], int] | None:
    return _c_function("fstatfs", (ctypes.c_int, ctypes.c_char_p))


def _c_function(name: str, arguments: tuple[type, ...]) -> Callable[..., int] | None:
    """A function of the C library, or ``None`` if it has no function of that name."""
    if os.name != "posix":
        return None
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
