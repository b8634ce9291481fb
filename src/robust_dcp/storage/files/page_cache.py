"""What of a file the page cache holds, asked without reading it.

Owns the two questions that Linux has for that: cachestat(2), and mincore(2) where there is no cachestat. Never opens a
file, and leaves the cache as it is. Called by ``disk``.

To ask by reading (one byte with ``RWF_NOWAIT``, say) would change the answer: the kernel begins to read ahead, and
what is asked next finds these pages in the cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np

__all__ = ["cached_nbytes"]

_CACHESTAT: Final = 451
_SAME_NUMBER_ON: Final = ("x86_64", "aarch64", "ppc64le", "s390x", "riscv64", "loongarch64")
"""Machines on which cachestat(2) has this number; on others it is not asked."""


class _Range(ctypes.Structure):
    """``struct cachestat_range`` of linux/mman.h."""

    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """``struct cachestat`` of linux/mman.h. Only ``nr_cache`` is of use here."""

    _fields_ = (
        ("nr_cache", ctypes.c_uint64),
        ("nr_dirty", ctypes.c_uint64),
        ("nr_writeback", ctypes.c_uint64),
        ("nr_evicted", ctypes.c_uint64),
        ("nr_recently_evicted", ctypes.c_uint64),
    )


def cached_nbytes(fd: int, offset: int, nbytes: int) -> int:
    """How many of ``nbytes`` bytes at ``offset`` are in the page cache, in whole pages and no more than ``nbytes``.

    Linux tells this only to who owns the file or may write to it. To others mincore(2) says that all of it is there
    (Linux 5.2 and newer), and so does this function: what we cannot know is then read through the cache, as stock
    reads it.
    """
    if nbytes <= 0:
        return 0
    pages = _by_cachestat(fd, offset, nbytes)
    if pages is None:
        pages = _by_mincore(fd, offset, nbytes)
    return nbytes if pages is None else min(nbytes, pages * mmap.PAGESIZE)


def _by_cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    """Pages of the range that are in the cache; ``None`` where the kernel does not say.

    It does not before Linux 6.5 (ENOSYS), in some sandboxes and for files of others (EPERM), and for file systems
    without the usual page cache (EOPNOTSUPP).
    """
    cachestat = _cachestat()
    if cachestat is None:
        return None
    answer = _Pages()
    if cachestat(_CACHESTAT, fd, ctypes.byref(_Range(offset, nbytes)), ctypes.byref(answer), 0) != 0:
        return None
    return int(answer.nr_cache)


def _by_mincore(fd: int, offset: int, nbytes: int) -> int | None:
    """As :func:`_by_cachestat`. The range is mapped and not touched, so nothing is read."""
    mincore = _mincore()
    start = offset - offset % mmap.PAGESIZE
    try:
        length = min(offset + nbytes, os.fstat(fd).st_size) - start
        if length <= 0:
            return 0
        if mincore is None:
            return None
        with mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped:
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            answer = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
            if mincore(address, length, answer.ctypes.data) != 0:
                return None
    except (OSError, ValueError):  # it cannot be mapped
        return None
    return int((answer & 1).sum())


@cache
def _cachestat() -> Callable[..., int] | None:
    """syscall(2), for cachestat(2): C libraries have no function of that name yet."""
    if platform.system() != "Linux" or platform.machine() not in _SAME_NUMBER_ON:
        return None
    return _c_function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)


@cache
def _mincore() -> Callable[..., int] | None:
    return _c_function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def _c_function(name: str, *arguments: type) -> Callable[..., int] | None:
    """A function of the C library, or ``None`` where it has none of that name."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = arguments
    return function  # type: ignore[no-any-return]
