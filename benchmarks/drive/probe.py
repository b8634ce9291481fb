"""Measures the speed of the drive itself: each thread writes or reads a file with direct I/O.

There are no formats, checksums or plans. Everything else is compared with this rate. The memory is as large as a
checkpoint, because a buffer that stays in the processor's cache would be faster than any checkpoint can be.
``ONE_BUFFER`` shows how much faster, but nothing is compared with it. If the file system refuses ``O_DIRECT``, the same
calls go through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

__all__ = ["ONE_BUFFER", "PROBES", "Probe", "is_direct", "read", "source_of", "write"]

_PAGE_NBYTES = 4096


class Probe(NamedTuple):
    """The number of threads, each with its own file, and the size of a call.

    With ``one_buffer`` each thread reads into the same block of memory again and again."""

    threads: int
    block_nbytes: int
    one_buffer: bool = False

    @property
    def name(self) -> str:
        what = "reads into one buffer" if self.one_buffer else "raw probe"
        return f"{what}, {self.threads} x {self.block_nbytes >> 20} MiB"


ONE_BUFFER = Probe(2, 8 << 20, one_buffer=True)
"""The rate that loads could reach if nobody needed their bytes."""

PROBES = (Probe(1, 8 << 20), Probe(2, 8 << 20), Probe(4, 8 << 20))
"""The fastest of these gives the drive's rate. Their memory is as large as a checkpoint, and is in use already."""


def source_of(nbytes: int) -> mmap.mmap:
    """Page-aligned memory of ``nbytes``, rounded up to whole pages and filled with random bytes."""
    nbytes = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
    memory = mmap.mmap(-1, nbytes)
    pool = np.random.default_rng(8).bytes(min(nbytes, (16 << 20) + _PAGE_NBYTES))
    for offset in range(0, nbytes, len(pool)):
        memory[offset : offset + len(pool)] = pool[: nbytes - offset]
    return memory


def write(directory: str, source: mmap.mmap, probe: Probe) -> None:
    """Write ``source`` to new files in ``directory``, durably."""
    os.makedirs(directory, exist_ok=True)

    def write_part(number: int) -> None:
        begin, end = _part(len(source), probe, number)
        fd = _open(_path(directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if end > begin and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, end - begin)
            with memoryview(source) as view:
                for at in range(begin, end, probe.block_nbytes):
                    _whole(os.pwritev, fd, view[at : min(end, at + probe.block_nbytes)], at - begin)
            os.fsync(fd)
        finally:
            os.close(fd)

    _in_threads(write_part, probe)


def read(directory: str, target: mmap.mmap, probe: Probe) -> None:
    """Read what :func:`write` wrote into ``target``."""

    def read_part(number: int) -> None:
        begin, end = _part(len(target), probe, number)
        fd = _open(_path(directory, number), os.O_RDONLY)
        try:
            with memoryview(target) as view:
                for at in range(begin, end, probe.block_nbytes):
                    into = begin if probe.one_buffer else at
                    _whole(os.preadv, fd, view[into : into + min(end - at, probe.block_nbytes)], at - begin)
        finally:
            os.close(fd)

    _in_threads(read_part, probe)


def is_direct(directory: str) -> bool:
    """Whether the file system supports direct I/O. This tries it with one page."""
    path = os.path.join(directory, "direct")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        if os.path.exists(path):
            os.unlink(path)
    os.close(fd)
    return hasattr(os, "O_DIRECT")


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_CREAT and os.path.exists(path):
            os.unlink(path)  # the file exists although the open has failed
        return os.open(path, flags, 0o600)


def _whole(call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int) -> None:
    done = call(fd, [view], offset)
    if done != len(view):
        raise OSError(errno.EIO, f"{done} of {len(view)} bytes at offset {offset}")


def _part(nbytes: int, probe: Probe, number: int) -> tuple[int, int]:
    """The share of a thread. It consists of whole blocks, except at the end of the data."""
    each = -(-nbytes // (probe.threads * probe.block_nbytes)) * probe.block_nbytes
    return min(nbytes, number * each), min(nbytes, (number + 1) * each)


def _path(directory: str, number: int) -> str:
    return os.path.join(directory, f"probe-{number}")


def _in_threads(function: Callable[[int], None], probe: Probe) -> None:
    with ThreadPoolExecutor(probe.threads) as pool:
        list(pool.map(function, range(probe.threads)))
