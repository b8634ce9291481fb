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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.writing.write_options import available_cores

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
    drive = _Drive(disk or Disk(), directory, memoryview(block))
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
    settings = [
        Setting(direct, depth)
        for direct in ((True, False) if refused is None else (False,))
        for depth in _DEPTHS
        if depth * BLOCK_NBYTES <= share_nbytes and depth <= 2 * available_cores()
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
    # On a slow device, spend the time on settings whose measurement means something.
    settings = [setting for setting in settings if setting.depth == 1 or setting.depth * BLOCK_NBYTES <= nbytes]
    # Each round tries all settings, so that a short burst of other work does not slow down one setting alone.
    rounds = [[measure(setting, nbytes) for setting in settings] for _ in range(_ROUNDS)]
    return [max(results, key=lambda measured: measured.nbytes_per_second) for results in zip(*rounds, strict=True)]


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
        disk, blocks_each = self._disk, max(1, nbytes // (setting.depth * BLOCK_NBYTES))
        with ExitStack() as stack:
            files = []
            for _ in range(setting.depth):
                file, path = self._open(stack, direct=setting.direct)
                disk.unlink(path)
                files.append(file)

            def write(number: int) -> int:
                disk.preallocate(files[number], blocks_each * BLOCK_NBYTES)
                for place in range(blocks_each):
                    # A save does the same: while one thread computes a checksum, the others use the device.
                    crc32(self._block)
                    disk.pwrite(files[number], self._block, place * BLOCK_NBYTES)
                disk.fsync(files[number])
                return blocks_each * BLOCK_NBYTES

            return _timed(setting, write)

    @contextmanager
    def filled(self, nbytes: int) -> Iterator[Callable[[Setting, int], Measured]]:
        """Make a file of at least ``nbytes``. Gives a function that reads of it."""
        disk, n_blocks = self._disk, max(nbytes // BLOCK_NBYTES, 1)
        opened: list[OpenFile] = []
        with ExitStack() as stack:
            file, path = self._open(stack, direct=False)
            try:
                for direct in (False, True):
                    opened.append(disk.open_read(path, direct=direct))
                    stack.callback(disk.close, opened[direct])
            finally:
                disk.unlink(path)
            for number in range(n_blocks):
                disk.pwrite(file, self._block, number * BLOCK_NBYTES)
            disk.fsync(file)

            def read(setting: Setting, nbytes: int) -> Measured:
                source = opened[setting.direct]
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_DONTNEED)
                count = min(max(1, nbytes // BLOCK_NBYTES), n_blocks)

                def read_some(thread: int) -> int:
                    done = 0
                    with mmap.mmap(-1, BLOCK_NBYTES) as memory, memoryview(memory) as view:
                        for number in range(thread, count, setting.depth):
                            found = disk.pread_into(source, view, number * BLOCK_NBYTES)
                            crc32(view[:found])
                            done += found
                    return done

                return _timed(setting, read_some)

            yield read


def _timed(setting: Setting, work: Callable[[int], int]) -> Measured:
    """The time that ``setting.depth`` threads take for their work, each of which returns how many bytes it moved."""
    started, cpu_started = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(setting.depth, thread_name_prefix="robust_dcp-tune") as pool:
        nbytes = sum(pool.map(work, range(setting.depth)))
    return Measured(setting, max(nbytes, 1), time.perf_counter() - started, time.process_time() - cpu_started)
