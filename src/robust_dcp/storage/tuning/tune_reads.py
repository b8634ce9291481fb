"""Measures for ``tune`` how fast a file system is read in each setting.

This module makes the file that is read, which loses its name before it has contents, and takes the times. ``tune``
calls it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.tuning.settings import BLOCKS_NBYTES, ROUNDS, Measured, Setting, best_of_rounds

__all__ = ["measure_reads"]

_PILOT_NBYTES: Final = 16 << 20
_MOST_NBYTES: Final = 256 << 20


def measure_reads(
    disk: Disk, directory: str, source: mmap.mmap, settings: Sequence[Setting], seconds: float, share_nbytes: int
) -> list[Measured]:
    """Read a file that is not in the page cache, again and again, in about ``seconds``.

    Args:
        source: the bytes to fill the file with.
        share_nbytes: the most bytes to use on the device.

    Raises:
        StorageError: the file cannot be written or read.
    """
    with ExitStack() as stack:
        file = _File(disk, directory, stack)
        file.fill(source, min(_PILOT_NBYTES, share_nbytes))
        pilot = max(file.measure(settings[0], file.nbytes).nbytes_per_second for _ in range(2))
        nbytes = min(int(pilot * seconds / (ROUNDS * len(settings))), _MOST_NBYTES, share_nbytes)
        file.fill(source, nbytes)
        return best_of_rounds(settings, file.nbytes, file.measure)


class _File:
    """A file that is opened in all ways that are needed. It loses its name before anything is written to it."""

    def __init__(self, disk: Disk, directory: str, stack: ExitStack) -> None:
        self._disk = disk
        self.nbytes = 0
        path = os.path.join(directory, f".robust_dcp.tune-{uuid.uuid4()}")
        self._written = disk.open_new(path)
        try:
            stack.callback(disk.close, self._written)
            self._read = {direct: disk.open_read(path, direct=direct) for direct in (False, True)}
            for opened in self._read.values():
                stack.callback(disk.close, opened)
        finally:
            disk.unlink(path)

    def fill(self, source: mmap.mmap, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, in whole blocks of the smallest size."""
        block = min(BLOCKS_NBYTES)
        with memoryview(source) as view:
            while self.nbytes < nbytes:
                self._disk.pwrite(self._written, view[:block], self.nbytes)
                self.nbytes += block
        self._disk.fsync(self._written)

    def measure(self, setting: Setting, nbytes: int) -> Measured:
        """Read and checksum the first ``nbytes``, in whole blocks."""
        opened = self._read[setting.direct]
        _forget(opened)
        blocks = iter(range(max(1, nbytes // setting.block_nbytes)))
        lock = threading.Lock()

        def read() -> int:
            # mmap gives whole pages, which are aligned for direct I/O.
            with mmap.mmap(-1, setting.block_nbytes) as memory, memoryview(memory) as view:
                done = 0
                while True:
                    with lock:
                        number = next(blocks, None)
                    if number is None:
                        return done
                    found = self._disk.pread_into(opened, view, number * setting.block_nbytes)
                    crc32(view[:found])
                    done += found

        started, cpu_started = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(setting.depth, thread_name_prefix="robust_dcp-tune") as pool:
            tasks = [pool.submit(read) for _ in range(setting.depth)]
            done = sum(task.result() for task in tasks)
        return Measured(setting, max(done, 1), time.perf_counter() - started, time.process_time() - cpu_started)


def _forget(opened: OpenFile) -> None:
    """Make the kernel drop the file from its page cache, if there is a way."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_DONTNEED)
