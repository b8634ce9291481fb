"""What a file system asks of direct I/O: where in memory and in the file it may begin.

Owns the question to the kernel, statx(2). Never opens a file. Called by ``storage.disk`` for every file that it opens
for direct I/O.
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

# linux/stat.h, linux/fcntl.h: the same numbers on all architectures.
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_NBYTES: Final = 256
_MASK_AT: Final = 0
_DIO_ALIGN_AT: Final = 0x98


@dataclass(frozen=True)
class Alignment:
    """What direct I/O on a file needs: powers of two, in bytes.

    Attributes:
        memory: addresses are multiples of it.
        offset: offsets in the file, and lengths, are multiples of it.
    """

    memory: int
    offset: int


BUFFERED: Final = Alignment(memory=1, offset=1)
"""What buffered I/O needs: nothing."""

UNKNOWN: Final = Alignment(memory=4096, offset=4096)
"""For kernels that cannot be asked (older than 6.1): enough for every device whose logical blocks are no larger than
a page. Where it is not enough, the first write fails with EINVAL, and the file goes on buffered."""


def alignment_of(fd: int) -> Alignment | None:
    """What direct I/O on an open file needs; ``None`` if its file system says that it has none (tmpfs, say)."""
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
    """Whether a file is in memory. tmpfs takes O_DIRECT from Linux 6.6 on, says nothing of alignment, and copies."""
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
    """A function of the C library, or ``None`` where it has none of that name."""
    if os.name != "posix":
        return None
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
