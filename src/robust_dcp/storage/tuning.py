"""Measures a file system, and says which options of ``RobustWriter`` and ``RobustReader`` suit it.

It never touches a checkpoint: the files that it writes have no names in any directory. So nothing is left behind even
if the process is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import msgspec

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.options import available_cores
from robust_dcp.storage.records.checksum import crc32

_BLOCK_NBYTES: Final = 4 << 20
"""The size of a write and of a read: that of reads in a load, and half of that of writes in a save."""

_GOOD_ENOUGH: Final = 0.95
"""A setting with at least this part of the best rate counts as equally fast. A few seconds cannot tell more."""

_THREADS: Final = (1, 2, 4, 8)
_ROUNDS: Final = 3
_PILOT_NBYTES: Final = 16 << 20
_MOST_NBYTES: Final = 512 << 20


class Measured(NamedTuple):
    """The best of three rounds with some threads, past the page cache or through it. It includes checksums and, for
    writes, ``fsync``.
    """

    direct: bool
    threads: int
    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def nbytes_per_second(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


def choose(table: Sequence[Measured]) -> Measured:
    """The cheapest way with a rate within 5 % of the best. The same table always gives the same choice.

    Direct I/O is cheaper than buffered I/O, which fills the page cache and copies everything once more. Next, fewer
    threads are cheaper.
    """
    enough = _GOOD_ENOUGH * max(row.nbytes_per_second for row in table)
    good = (row for row in table if row.nbytes_per_second >= enough)
    return min(good, key=lambda row: (not row.direct, row.threads))


class TunedOptions(msgspec.Struct, frozen=True):
    """Options for ``RobustWriter`` and ``RobustReader``, with the figures behind them. ``robust-dcp bench`` shows these
    in tables.

    Attributes:
        table, read_table: what was measured for writing and for reading.
        direct_refused: why direct I/O was not measured; ``None`` if it was.
    """

    table: tuple[Measured, ...]
    read_table: tuple[Measured, ...]
    direct_refused: str | None = None

    @property
    def writer_options(self) -> dict[str, Any]:
        """Keyword arguments for the writer: ``RobustWriter(path, **tune(path).writer_options)``.

        There are as many files as threads, because on some file systems only one thread at a time can write to a file.
        """
        chosen = choose(self.table)
        return {"threads": chosen.threads, "files_per_rank": chosen.threads, "direct": chosen.direct}

    @property
    def reader_options(self) -> dict[str, Any]:
        """Keyword arguments for the reader: ``RobustReader(path, **tune(path).reader_options)``.

        If direct reads are faster, the reader still checks first whether bytes are in the page cache.
        """
        chosen = choose(self.read_table)
        return {"threads": chosen.threads, "direct": None if chosen.direct else False}


def tune(path: str | os.PathLike[str], *, seconds: float = 4.0) -> TunedOptions:
    """Find the fastest way to write to and read from the file system of ``path``.

    It uses the nearest directory above ``path`` that exists, at most a quarter of the free space, and less data on a
    slower device. The drive should have nothing else to do meanwhile.

    Args:
        path: the directory of your checkpoints. It need not exist yet.
        seconds: about how long to measure. Half of the time goes to reads.

    Returns:
        The cheapest settings within 5 % of the fastest: see :func:`choose`.

    Raises:
        ValueError: ``path`` is a URL (``scheme://…``).
        StorageError: the directory cannot be written to, or is too full to measure anything.

    Example:
        >>> import tempfile
        >>> from robust_dcp.storage.tuning import tune
        >>> with tempfile.TemporaryDirectory() as path:
        ...     options = tune(path, seconds=0.1)
        >>> sorted(options.writer_options)
        ['direct', 'files_per_rank', 'threads']
        >>> sorted(options.reader_options)
        ['direct', 'threads']
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    disk, directory = Disk(), os.path.abspath(directory_path(path))
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    free_nbytes = disk.room(directory)[1]
    most_nbytes = min(_MOST_NBYTES, free_nbytes // 4)
    if most_nbytes < _BLOCK_NBYTES:
        raise StorageError(
            f"tune {directory}: {free_nbytes} bytes are free, of which at most one in 4 is used, and a block has "
            f"{_BLOCK_NBYTES}: free space, or tune another directory on a device of the same kind",
            path=directory,
            errno=errno.ENOSPC,
            operation="tune",
        )
    # mmap gives whole pages, which are aligned for direct I/O. They are not left as zeros, because some devices do not
    # store zeros.
    block = mmap.mmap(-1, _BLOCK_NBYTES)
    block.write(os.urandom(_BLOCK_NBYTES))

    def measure(way: tuple[bool, int], nbytes: int) -> tuple[Measured, Measured]:
        return _write_and_read(disk, directory, memoryview(block), *way, nbytes)

    refused = _why_not_direct(disk, directory, memoryview(block))
    ways = [
        (direct, threads)
        for direct in ((True, False) if refused is None else (False,))
        for threads in _THREADS
        if threads * _BLOCK_NBYTES <= most_nbytes and threads <= 2 * available_cores()
    ]
    pilot, _ = measure(ways[0], min(_PILOT_NBYTES, most_nbytes))
    nbytes = min(int(pilot.nbytes_per_second * seconds / 2 / (_ROUNDS * len(ways))), most_nbytes)
    # On a slow device, spend the time on ways whose measurement means something.
    ways = [way for way in ways if way[1] == 1 or way[1] * _BLOCK_NBYTES <= nbytes]
    # Each round tries all ways, so that a short burst of other work does not slow down one of them alone.
    rounds = [[measure(way, nbytes) for way in ways] for _ in range(_ROUNDS)]
    write, read = (
        tuple(
            max((pair[n] for pair in of_way), key=lambda row: row.nbytes_per_second)
            for of_way in zip(*rounds, strict=True)
        )
        for n in (0, 1)
    )
    return TunedOptions(write, read, refused)


def _write_and_read(
    disk: Disk, directory: str, block: memoryview, direct: bool, threads: int, nbytes: int
) -> tuple[Measured, Measured]:
    """Write new files, one for each thread, and read them again from the device."""
    with ExitStack() as files:
        opened = [_unnamed(disk, directory, direct, files) for _ in range(threads)]
        n_blocks = max(1, nbytes // (threads * _BLOCK_NBYTES))

        def write(number: int) -> None:
            file, _ = opened[number]
            disk.preallocate(file, n_blocks * _BLOCK_NBYTES)
            for at in range(0, n_blocks * _BLOCK_NBYTES, _BLOCK_NBYTES):
                # A save does the same: while one thread computes a checksum, the others use the device.
                crc32(block)
                disk.pwrite(file, block, at)
            disk.fsync(file)

        def read(number: int) -> None:
            _, file = opened[number]
            with mmap.mmap(-1, _BLOCK_NBYTES) as memory, memoryview(memory) as target:
                for at in range(0, n_blocks * _BLOCK_NBYTES, _BLOCK_NBYTES):
                    disk.pread_into(file, target, at)
                    crc32(target)

        def timed(work: Callable[[int], None]) -> Measured:
            started, cpu_started = time.perf_counter(), time.process_time()
            with ThreadPoolExecutor(threads, thread_name_prefix="robust_dcp-tune") as pool:
                list(pool.map(work, range(threads)))
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            return Measured(direct, threads, threads * n_blocks * _BLOCK_NBYTES, seconds, cpu_seconds)

        written = timed(write)
        for _, file in opened:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return written, timed(read)


def _unnamed(disk: Disk, directory: str, direct: bool | None, files: ExitStack) -> tuple[OpenFile, OpenFile]:
    """A new file without a name, open for writing and for reading until ``files`` is closed."""
    name = os.path.join(directory, f".robust_dcp.tune-{uuid.uuid4()}")
    written = disk.open_new(name, direct=direct)
    files.callback(disk.close, written)
    try:
        read = disk.open_read(name, direct=direct)
    finally:
        disk.unlink(name)
    files.callback(disk.close, read)
    return written, read


def _why_not_direct(disk: Disk, directory: str, block: memoryview) -> str | None:
    """``None`` if the file system takes direct I/O, or else the reason in words."""
    with ExitStack() as files:
        file, _ = _unnamed(disk, directory, None, files)
        if file.alignment is None:
            return file.why_buffered or "the file system refuses O_DIRECT"
        try:
            disk.pwrite(file, block, 0)
        except StorageError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return error.message
    return None
