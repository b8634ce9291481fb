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
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.writing.write_options import available_cores

__all__ = ["Measured", "TunedOptions", "choose", "tune"]

_BLOCK_NBYTES: Final = 4 << 20
"""The size of a write and of a read: that of reads in a load, and half of that of writes in a save."""

_GOOD_ENOUGH: Final = 0.95
"""A setting with at least this part of the best rate counts as equally fast. A few seconds cannot tell more."""

_THREADS: Final = (1, 2, 4, 8)
_ROUNDS: Final = 3
_PILOT_NBYTES: Final = 16 << 20
_MOST_NBYTES: Final = 512 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


@dataclass(frozen=True)
class TunedOptions:
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


def tune(path: str | os.PathLike[str], *, seconds: float = 4.0, disk: Disk | None = None) -> TunedOptions:
    """Find the fastest way to write to and read from the file system of ``path``.

    It uses the nearest directory above ``path`` that exists, at most a quarter of the free space, and less data on a
    slower device. The drive should have nothing else to do meanwhile.

    Args:
        path: the directory of your checkpoints. It need not exist yet.
        seconds: about how long to measure. Half of the time goes to reads.
        disk: the file system.

    Returns:
        The cheapest settings within 5 % of the fastest: see :func:`choose`.

    Raises:
        ValueError: ``path`` is a URL (``scheme://…``).
        StorageError: the directory cannot be written to, or is too full to measure anything.

    Example:
        >>> import tempfile
        >>> from robust_dcp.storage import tune
        >>> with tempfile.TemporaryDirectory() as path:
        ...     options = tune(path, seconds=0.1)
        >>> sorted(options.writer_options)
        ['direct', 'files_per_rank', 'threads']
        >>> sorted(options.reader_options)
        ['direct', 'threads']
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    disk, directory = disk or Disk(), os.path.abspath(directory_path(path))
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    free_nbytes = disk.room(directory)[1]
    nbytes = min(_MOST_NBYTES, free_nbytes // 4)
    while nbytes >= _BLOCK_NBYTES:
        try:
            return _measured(disk, directory, seconds, nbytes)
        except StorageError as error:  # the free space is no promise: there may be a quota
            if error.errno not in _FULL:
                raise
        nbytes //= 2
    raise StorageError(
        f"tune {directory}: not even {_BLOCK_NBYTES} bytes could be written with {free_nbytes} bytes free, of which at "
        "most one in 4 is used: free space, look at quotas, or tune another directory on a device of the same kind",
        path=directory,
        errno=errno.ENOSPC,
        operation="tune",
    )


def _measured(disk: Disk, directory: str, seconds: float, most_nbytes: int) -> TunedOptions:
    # mmap gives whole pages, which are aligned for direct I/O. They are not left as zeros, because some devices do not
    # store zeros.
    block = mmap.mmap(-1, _BLOCK_NBYTES)
    block.write(os.urandom(_BLOCK_NBYTES))
    view = memoryview(block)

    def unnamed(*, direct: bool, is_read: bool = False) -> list[OpenFile]:
        """A new file, and the same again for reads, past the page cache and through it."""
        name = os.path.join(directory, f".robust_dcp.tune-{uuid.uuid4()}")
        opened = [disk.open_new(name, direct=direct)]
        try:
            opened += [disk.open_read(name, direct=each) for each in (False, True) if is_read]
        finally:
            disk.unlink(name)
        return opened

    def fill(file: OpenFile, n_blocks: int) -> int:
        disk.preallocate(file, n_blocks * _BLOCK_NBYTES)
        for number in range(n_blocks):
            # A save does the same: while one thread computes a checksum, the others use the device.
            crc32(view)
            disk.pwrite(file, view, number * _BLOCK_NBYTES)
        disk.fsync(file)
        return n_blocks * _BLOCK_NBYTES

    def write(direct: bool, threads: int, nbytes: int) -> Measured:
        files = [unnamed(direct=direct)[0] for _ in range(threads)]
        try:
            n_blocks = max(1, nbytes // (threads * _BLOCK_NBYTES))
            return _timed(direct, threads, lambda number: fill(files[number], n_blocks))
        finally:
            for file in files:
                disk.close(file)

    refused = _why_not_direct(disk, unnamed(direct=True)[0], view)
    ways = [
        (direct, threads)
        for direct in ((True, False) if refused is None else (False,))
        for threads in _THREADS
        if threads * _BLOCK_NBYTES <= most_nbytes and threads <= 2 * available_cores()
    ]
    table = _best_of_rounds(ways, write, seconds / 2, most_nbytes)
    new, *for_reads = unnamed(direct=False, is_read=True)
    try:
        n_written = fill(new, max(most_nbytes // 2 // _BLOCK_NBYTES, 1)) // _BLOCK_NBYTES

        def read(direct: bool, threads: int, nbytes: int) -> Measured:
            file, n_blocks = for_reads[direct], min(max(1, nbytes // _BLOCK_NBYTES), n_written)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

            def read_some(thread: int) -> int:
                done = 0
                with mmap.mmap(-1, _BLOCK_NBYTES) as memory, memoryview(memory) as target:
                    for number in range(thread, n_blocks, threads):
                        found = disk.pread_into(file, target, number * _BLOCK_NBYTES)
                        crc32(target[:found])
                        done += found
                return done

            return _timed(direct, threads, read_some)

        read_table = _best_of_rounds(ways, read, seconds / 2, most_nbytes // 2)
    finally:
        for file in (new, *for_reads):
            disk.close(file)
    return TunedOptions(tuple(table), tuple(read_table), refused)


def _why_not_direct(disk: Disk, file: OpenFile, block: memoryview) -> str | None:
    """``None`` if the file system takes direct I/O, or else the reason in words."""
    try:
        if file.alignment is None:
            return file.why_buffered or "the file system refuses O_DIRECT"
        disk.pwrite(file, block, 0)
    except StorageError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return error.message
    finally:
        disk.close(file)
    return None


def _best_of_rounds(
    ways: Sequence[tuple[bool, int]], measure: Callable[[bool, int, int], Measured], seconds: float, most_nbytes: int
) -> list[Measured]:
    """The best result of each way, in about ``seconds``."""
    rate = max(measure(*ways[0], min(_PILOT_NBYTES, most_nbytes)).nbytes_per_second for _ in range(2))
    nbytes = min(int(rate * seconds / (_ROUNDS * len(ways))), most_nbytes)
    # On a slow device, spend the time on ways whose measurement means something.
    ways = [way for way in ways if way[1] == 1 or way[1] * _BLOCK_NBYTES <= nbytes]
    # Each round tries all ways, so that a short burst of other work does not slow down one of them alone.
    rounds = [[measure(*way, nbytes) for way in ways] for _ in range(_ROUNDS)]
    return [max(results, key=lambda measured: measured.nbytes_per_second) for results in zip(*rounds, strict=True)]


def _timed(direct: bool, threads: int, work: Callable[[int], int]) -> Measured:
    """The time that threads take for their work, each of which returns how many bytes it moved."""
    started, cpu_started = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads, thread_name_prefix="robust_dcp-tune") as pool:
        nbytes = sum(pool.map(work, range(threads)))
    return Measured(direct, threads, max(nbytes, 1), time.perf_counter() - started, time.process_time() - cpu_started)
