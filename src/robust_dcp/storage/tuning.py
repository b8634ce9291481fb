"""Measures a file system, and says which options of ``RobustWriter`` and ``RobustReader`` suit it.

It never touches a checkpoint: the files that it writes have no names in any directory. So nothing is left behind even
if the process is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.records.checksum import crc32

__all__ = ["BLOCK_NBYTES", "GOOD_ENOUGH", "Measured", "Setting", "TunedOptions", "choose", "tune"]

_GIB: Final = 1 << 30

BLOCK_NBYTES: Final = 4 << 20
"""The size of a write and of a read: that of reads in a load, and half of that of writes in a save."""

GOOD_ENOUGH: Final = 0.95
"""A setting with at least this part of the best rate counts as equally fast. A few seconds cannot tell more."""

_DEPTHS: Final = (1, 2, 4, 8)
_ROUNDS: Final = 3
_PILOT_NBYTES: Final = 16 << 20
_MOST_NBYTES: Final = 512 << 20
_SHARE_OF_FREE_SPACE: Final = 4
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSES_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Setting(NamedTuple):
    """One way to write or read: ``depth`` threads, past the page cache or through it. When writing, each thread has a
    file of its own.
    """

    direct: bool
    depth: int


class Measured(NamedTuple):
    """The result of a setting: the best of three rounds. It includes checksums and, for writes, ``fsync``."""

    setting: Setting
    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def nbytes_per_second(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


def choose(table: Iterable[Measured]) -> Setting:
    """The cheapest setting with a rate within 5 % of the best. The same table always gives the same choice.

    Direct I/O is cheaper than buffered I/O, which fills the page cache and copies everything once more. Next, fewer
    threads are cheaper.
    """
    rows = list(table)
    enough = GOOD_ENOUGH * max(row.nbytes_per_second for row in rows)
    good = (row.setting for row in rows if row.nbytes_per_second >= enough)
    return min(good, key=lambda setting: (not setting.direct, setting.depth))


@dataclass(frozen=True)
class TunedOptions:
    """Options for ``RobustWriter`` and ``RobustReader``, with the figures behind them; ``print`` shows the tables.

    Attributes:
        writing, reading: the settings that were chosen.
        table, read_table: what was measured for writing and for reading.
        direct_refused: why direct I/O was not measured; ``None`` if it was.
    """

    writing: Setting
    reading: Setting
    table: tuple[Measured, ...]
    read_table: tuple[Measured, ...]
    direct_refused: str | None = None

    @property
    def writer_options(self) -> dict[str, Any]:
        """Keyword arguments for the writer: ``RobustWriter(path, **tune(path).writer_options)``.

        There are as many files as threads, because on some file systems only one thread at a time can write to a file.
        """
        return {"threads": self.writing.depth, "files_per_rank": self.writing.depth, "direct": self.writing.direct}

    @property
    def reader_options(self) -> dict[str, Any]:
        """Keyword arguments for the reader: ``RobustReader(path, **tune(path).reader_options)``.

        If direct reads are faster, the reader still checks first whether bytes are in the page cache.
        """
        return {"threads": self.reading.depth, "direct": None if self.reading.direct else False}

    def __str__(self) -> str:
        lines = []
        for what, table, chosen in (("writing", self.table, self.writing), ("reading", self.read_table, self.reading)):
            lines += [what, "     I/O  threads  GiB/s  CPU-s/GiB"]
            for row in table:
                gib, how = row.nbytes / _GIB, "direct" if row.setting.direct else "buffered"
                rates = f"{gib / max(row.seconds, 1e-9):5.2f}  {row.cpu_seconds / gib:9.3f}"
                lines.append(f"{how:>8}  {row.setting.depth:7}  {rates}{'  <- chosen' * (row.setting == chosen)}")
        if self.direct_refused:
            lines.append(f"direct I/O was not measured: {self.direct_refused}")
        return "\n".join(lines)


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
    directory = _existing_directory(os.path.abspath(directory_path(path)))
    # mmap gives whole pages, which are aligned for direct I/O. They are not left as zeros, because some devices do not
    # store zeros.
    block = mmap.mmap(-1, BLOCK_NBYTES)
    block.write(os.urandom(BLOCK_NBYTES))
    drive = _Drive(disk or PosixDisk(), directory, memoryview(block))
    status = os.statvfs(directory)
    free_nbytes = status.f_bavail * status.f_frsize
    share_nbytes = free_nbytes // _SHARE_OF_FREE_SPACE
    while share_nbytes >= BLOCK_NBYTES:
        try:
            return _measured(drive, seconds, share_nbytes)
        except StorageError as error:  # the free space is no promise: there may be a quota
            if error.errno not in _FULL:
                raise
        share_nbytes //= 2
    raise StorageError(
        f"tune {directory}: not even {BLOCK_NBYTES} bytes could be written with {free_nbytes} bytes free, of which at "
        f"most one in {_SHARE_OF_FREE_SPACE} is used: free space, look at quotas, or tune another directory on a "
        "device of the same kind",
        path=directory,
        errno=errno.ENOSPC,
        operation="tune",
    )


def _existing_directory(path: str) -> str:
    directory = path
    while not os.path.isdir(directory):
        if os.path.lexists(directory):
            raise StorageError(
                f"tune {path}: {directory} is not a directory; give the directory that checkpoints go to",
                path=path,
                errno=errno.ENOTDIR,
                operation="tune",
            )
        directory = os.path.dirname(directory)
    return directory


def _measured(drive: _Drive, seconds: float, share_nbytes: int) -> TunedOptions:
    refused = drive.why_not_direct()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = [
        Setting(direct, depth)
        for direct in ((True, False) if refused is None else (False,))
        for depth in _DEPTHS
        if depth * BLOCK_NBYTES <= share_nbytes and depth <= 2 * cpus
    ]
    most_nbytes = min(_MOST_NBYTES, share_nbytes)
    table = _best_of_rounds(settings, drive.write, seconds / 2, most_nbytes)
    with drive.filled(most_nbytes // 2) as read:
        read_table = _best_of_rounds(settings, read, seconds / 2, most_nbytes // 2)
    return TunedOptions(choose(table), choose(read_table), tuple(table), tuple(read_table), refused)


def _best_of_rounds(
    settings: Sequence[Setting], measure: Callable[[Setting, int], Measured], seconds: float, most_nbytes: int
) -> list[Measured]:
    """The best result of each setting, in about ``seconds``."""
    pilot_nbytes = min(_PILOT_NBYTES, most_nbytes)
    rate = max(measure(settings[0], pilot_nbytes).nbytes_per_second for _ in range(2))
    nbytes = min(int(rate * seconds / (_ROUNDS * len(settings))), most_nbytes)
    best: dict[Setting, Measured] = {}
    # Each round tries all settings, so that a short burst of other work does not slow down one setting alone.
    for _ in range(_ROUNDS):
        for setting in settings:
            if setting.depth > 1 and setting.depth * BLOCK_NBYTES > nbytes:
                continue  # on a slow device, spend the time on settings whose measurement means something
            measured = measure(setting, nbytes)
            if setting not in best or measured.nbytes_per_second > best[setting].nbytes_per_second:
                best[setting] = measured
    return list(best.values())


class _Drive:
    """Files without names in a directory, and how fast they are written and read."""

    def __init__(self, disk: Disk, directory: str, block: memoryview) -> None:
        self._disk = disk
        self._directory = directory
        self._block = block

    def _open(self, stack: ExitStack, *, direct: bool) -> tuple[OpenFile, str]:
        path = os.path.join(self._directory, f".robust_dcp.tune-{uuid.uuid4()}")
        file = self._disk.open_new(path, direct=direct)
        stack.callback(self._disk.close, file)
        return file, path

    def why_not_direct(self) -> str | None:
        """``None`` if the file system takes direct I/O, or else the reason in words."""
        with ExitStack() as stack:
            file, path = self._open(stack, direct=True)
            self._disk.unlink(path)
            if file.alignment is None:
                return file.why_buffered or "the file system refuses O_DIRECT"
            try:
                self._disk.pwrite(file, self._block, 0)
            except StorageError as error:
                if error.errno in _REFUSES_DIRECT:
                    return error.message
                raise
        return None

    def write(self, setting: Setting, nbytes: int) -> Measured:
        """Checksum and write about ``nbytes``. The time ends when all of it is durable."""
        blocks_each = max(1, nbytes // (setting.depth * BLOCK_NBYTES))
        with ExitStack() as stack:
            files = []
            for _ in range(setting.depth):
                file, path = self._open(stack, direct=setting.direct)
                self._disk.unlink(path)
                files.append(file)

            def write(number: int) -> int:
                self._disk.preallocate(files[number], blocks_each * BLOCK_NBYTES)
                for place in range(blocks_each):
                    # A save does the same: while one thread computes a checksum, the others use the device.
                    crc32(self._block)
                    self._disk.pwrite(files[number], self._block, place * BLOCK_NBYTES)
                self._disk.fsync(files[number])
                return blocks_each * BLOCK_NBYTES

            return _timed(setting, write)

    def filled(self, nbytes: int) -> _Readable:
        """A file of at least ``nbytes``, to measure reads of."""
        return _Readable(self, max(nbytes // BLOCK_NBYTES, 1))


class _Readable:
    """A file that is open for reading in both ways. Use it in a ``with`` statement."""

    def __init__(self, drive: _Drive, n_blocks: int) -> None:
        self._drive = drive
        self._n_blocks = n_blocks
        self._stack = ExitStack()
        self._opened: dict[bool, OpenFile] = {}

    def __enter__(self) -> Callable[[Setting, int], Measured]:
        disk, block = self._drive._disk, self._drive._block
        try:
            file, path = self._drive._open(self._stack, direct=False)
            try:
                for direct in (False, True):
                    self._opened[direct] = disk.open_read(path, direct=direct)
                    self._stack.callback(disk.close, self._opened[direct])
            finally:
                disk.unlink(path)
            for number in range(self._n_blocks):
                disk.pwrite(file, block, number * BLOCK_NBYTES)
            disk.fsync(file)
        except BaseException:
            self._stack.close()
            raise
        return self._read

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _read(self, setting: Setting, nbytes: int) -> Measured:
        file = self._opened[setting.direct]
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        lock, blocks = threading.Lock(), iter(range(min(max(1, nbytes // BLOCK_NBYTES), self._n_blocks)))

        def read(_: int) -> int:
            with mmap.mmap(-1, BLOCK_NBYTES) as memory, memoryview(memory) as view:
                return sum(self._read_block(file, view, number) for number in _each(blocks, lock))

        return _timed(setting, read)

    def _read_block(self, file: OpenFile, view: memoryview, number: int) -> int:
        nbytes = self._drive._disk.pread_into(file, view, number * BLOCK_NBYTES)
        crc32(view[:nbytes])
        return nbytes


def _each(numbers: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        yield number


def _timed(setting: Setting, work: Callable[[int], int]) -> Measured:
    """The time that ``setting.depth`` threads take for their work, each of which returns how many bytes it moved."""
    started, cpu_started = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(setting.depth, thread_name_prefix="robust_dcp-tune") as pool:
        nbytes = sum(task.result() for task in [pool.submit(work, number) for number in range(setting.depth)])
    return Measured(setting, max(nbytes, 1), time.perf_counter() - started, time.process_time() - cpu_started)
