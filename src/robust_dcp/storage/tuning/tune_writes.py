"""Measures for ``tune`` how fast a file system is written to in each setting.

This module makes the files that are written, which lose their names first, and takes the times. ``tune`` calls it.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.tuning.settings import BLOCKS_NBYTES, ROUNDS, Measured, Setting, best_of_rounds

__all__ = ["measure_writes", "why_not_direct"]

_PILOT_NBYTES: Final = 16 << 20
_PILOT_SECONDS: Final = 0.03
_MOST_NBYTES: Final = 512 << 20
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def why_not_direct(disk: Disk, directory: str, source: mmap.mmap) -> str | None:
    """Try direct I/O. Returns ``None`` if the file system takes it, or else the reason in words.

    Raises:
        StorageError: the file system cannot be written to.
    """
    file = _open(disk, directory, direct=True)
    try:
        if file.alignment is None:
            return file.why_buffered or "the file system refuses O_DIRECT"
        disk.pwrite(file, memoryview(source)[: min(BLOCKS_NBYTES)], 0)
    except StorageError as error:
        if error.errno in _REFUSALS:
            return error.message
        raise
    finally:
        disk.close(file)
    return None


def measure_writes(
    disk: Disk, directory: str, source: mmap.mmap, settings: Sequence[Setting], seconds: float, share_nbytes: int
) -> list[Measured]:
    """Write files, durably, in about ``seconds``.

    Args:
        source: the bytes to write, aligned for direct I/O.
        share_nbytes: the most bytes to use on the device.

    Raises:
        StorageError: a file cannot be written.
    """

    def measure(setting: Setting, nbytes: int) -> Measured:
        return _measure(disk, directory, source, setting, nbytes)

    most_nbytes = min(_MOST_NBYTES, share_nbytes)
    # Write more and more bytes, until the one-time cost of a first write no longer matters.
    nbytes = min(_PILOT_NBYTES, share_nbytes)
    pilots = [measure(settings[0], nbytes) for _ in range(2)]
    while min(pilot.seconds for pilot in pilots) <= _PILOT_SECONDS and 2 * nbytes <= most_nbytes:
        nbytes *= 2
        pilots = [measure(settings[0], nbytes) for _ in range(2)]
    rate = max(pilot.nbytes_per_second for pilot in pilots)
    return best_of_rounds(settings, min(int(rate * seconds / (ROUNDS * len(settings))), most_nbytes), measure)


def _open(disk: Disk, directory: str, *, direct: bool) -> OpenFile:
    path = os.path.join(directory, f".robust_dcp.tune-{uuid.uuid4()}")
    file = disk.open_new(path, direct=direct)
    disk.unlink(path)
    return file


def _measure(disk: Disk, directory: str, source: mmap.mmap, setting: Setting, nbytes: int) -> Measured:
    """Checksum and write about ``nbytes`` with ``setting``. The time ends when all of it is durable."""
    blocks_each = max(1, nbytes // setting.in_flight_nbytes)
    block = memoryview(source)[: setting.block_nbytes]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(setting.depth, thread_name_prefix="robust_dcp-tune"))
        files = [_open(disk, directory, direct=setting.direct) for _ in range(setting.depth)]
        for file in files:
            stack.callback(disk.close, file)

        def write(file: OpenFile) -> None:
            disk.preallocate(file, blocks_each * setting.block_nbytes)
            for number in range(blocks_each):
                # A save does the same: while one thread computes a checksum, the others use the device.
                crc32(block)
                disk.pwrite(file, block, number * setting.block_nbytes)
            disk.fsync(file)

        started, cpu_started = time.perf_counter(), time.process_time()
        for written in [pool.submit(write, file) for file in files]:
            written.result()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Measured(setting, blocks_each * setting.in_flight_nbytes, seconds, cpu_seconds)
