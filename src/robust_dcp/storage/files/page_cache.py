"""How much of a file is in the page cache, found out without reading the file.

Linux has two calls for that: cachestat(2), and mincore(2) on kernels without cachestat. This module never opens a file,
and does not change the cache. ``disk`` calls it.

Reading a byte to find out (with ``RWF_NOWAIT``, for example) would change the answer: the kernel begins to read ahead,
and the next question finds these pages in the cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Final

__all__ = ["cached_nbytes"]

_CACHESTAT: Final = 451
_SAME_NUMBER_ON: Final = ("x86_64", "aarch64", "ppc64le", "s390x", "riscv64", "loongarch64")
"""Machines on which cachestat(2) has this system call number. On other machines it is not called."""


class _Range(ctypes.Structure):
    """``struct cachestat_range`` of linux/mman.h."""

    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """``struct cachestat`` of linux/mman.h. We only use ``nr_cache``."""

    _fields_ = (
        ("nr_cache", ctypes.c_uint64),
        ("nr_dirty", ctypes.c_uint64),
        ("nr_writeback", ctypes.c_uint64),
        ("nr_evicted", ctypes.c_uint64),
        ("nr_recently_evicted", ctypes.c_uint64),
    )


def cached_nbytes(fd: int, offset: int, nbytes: int) -> int:
    """How many of ``nbytes`` bytes at ``offset`` are in the page cache: whole pages, and at most ``nbytes``.

    Linux tells this only to the owner of a file and to those who may write to it. To others, mincore(2) of Linux 5.2
    and newer says that all of the file is in the cache, and so does this function. Then we read through the cache, as
    DCP does.
    """
    if nbytes <= 0:
        return 0
    pages = _by_cachestat(fd, offset, nbytes)
    if pages is None:
        pages = _by_mincore(fd, offset, nbytes)
    return nbytes if pages is None else min(nbytes, pages * mmap.PAGESIZE)


def _by_cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    """How many pages of the range are in the cache; ``None`` if the kernel does not say.

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
    """The same as :func:`_by_cachestat`. The range is mapped but not touched, so nothing is read."""
    import numpy as np  # here, because few need it and `robust-dcp ls` must be quick

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
    except (OSError, ValueError):  # the file cannot be mapped
        return None
    return int((answer & 1).sum())


@cache
def _cachestat() -> Callable[..., int] | None:
    """syscall(2), to call cachestat(2): C libraries have no function for it yet."""
    if platform.system() != "Linux" or platform.machine() not in _SAME_NUMBER_ON:
        return None
    return _c_function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)


@cache
def _mincore() -> Callable[..., int] | None:
    return _c_function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def _c_function(name: str, *arguments: type) -> Callable[..., int] | None:
    """A function of the C library, or ``None`` if it has no function of that name."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = arguments
    return function  # type: ignore[no-any-return]
