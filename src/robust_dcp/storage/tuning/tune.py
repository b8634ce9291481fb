"""Measures a file system, and says which options of ``RobustWriter`` and ``RobustReader`` suit it.

Owns the measuring, bounded in time and bytes, and the choice. Never touches a checkpoint: what it writes has no name in
any directory by then. Users call it as ``robust_dcp.storage.tuning.tune``, once for each kind of drive.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile, PosixDisk
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.tuning.settings import (
    BLOCKS_NBYTES,
    GOOD_ENOUGH,
    ROUNDS,
    Measured,
    Setting,
    best_of_rounds,
    choose,
    settings_for,
    table_of,
)
from robust_dcp.storage.tuning.tune_reads import measure_reads

__all__ = ["BLOCKS_NBYTES", "GOOD_ENOUGH", "Measured", "Setting", "TunedOptions", "choose", "tune"]

_MIB: Final = 1 << 20
_PILOT_NBYTES: Final = 16 * _MIB
_PILOT_SECONDS: Final = 0.03
_MOST_NBYTES: Final = 512 * _MIB
_SHARE_OF_FREE_SPACE: Final = 4
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class TunedOptions:
    """Options for ``RobustWriter``, with the figures behind them; ``print`` shows the table.

    Attributes:
        threads: writes in flight.
        files_per_rank: as many, since some file systems let one thread at a time write to a file.
        block_bytes: size of a write.
        direct: whether to go past the page cache.
        table: what was measured of writing, in the order in which it was tried.
        direct_refused: why direct I/O was not measured; ``None`` if it was.
        reading: the setting for ``RobustReader``.
        read_table: what was measured of reading.
    """

    threads: int
    files_per_rank: int
    block_bytes: int
    direct: bool
    table: tuple[Measured, ...] = ()
    direct_refused: str | None = None
    reading: Setting | None = None
    read_table: tuple[Measured, ...] = ()

    @property
    def writer_options(self) -> dict[str, Any]:
        """The keyword arguments: ``RobustWriter(path, **tune(path).writer_options)``."""
        return {
            "threads": self.threads,
            "files_per_rank": self.files_per_rank,
            "block_bytes": self.block_bytes,
            "direct": self.direct,
        }

    @property
    def reader_options(self) -> dict[str, Any]:
        """The keyword arguments: ``RobustReader(path, **tune(path).reader_options)``.

        Where direct reads are better the reader still looks first whether bytes are in the page cache.
        """
        if self.reading is None:
            return {}
        direct = None if self.reading.direct else False
        return {"threads": self.reading.depth, "block_bytes": self.reading.block_nbytes, "direct": direct}

    def __str__(self) -> str:
        chosen = Setting(self.direct, self.threads, self.block_bytes)
        lines = ["writing", *table_of(self.table, chosen)]
        if self.reading is not None:
            lines += ["reading", *table_of(self.read_table, self.reading)]
        if self.direct_refused:
            lines.append(f"direct I/O was not measured: {self.direct_refused}")
        return "\n".join(lines)


def tune(path: str | os.PathLike[str], *, seconds: float = 4.0, disk: Disk | None = None) -> TunedOptions:
    """Find out how the file system of ``path`` is written to, and read from, fastest.

    Writes to files that have no name any more, in ``path`` or the nearest directory above it that exists, so that
    nothing is left behind even if the process is killed. Takes at most a quarter of the free space, and less data the
    slower the device is. The drive should have nothing else to do meanwhile.

    Args:
        path: the directory that checkpoints go to, or will.
        seconds: about how long to measure, half of it reads.
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
        ['block_bytes', 'direct', 'files_per_rank', 'threads']
        >>> sorted(options.reader_options)
        ['block_bytes', 'direct', 'threads']
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    directory = _existing_directory(os.path.abspath(directory_path(path)))
    device = _Device(PosixDisk() if disk is None else disk, directory)
    share_nbytes = _free_nbytes(directory) // _SHARE_OF_FREE_SPACE
    refused = device.why_not_direct()
    while True:
        settings = settings_for(share_nbytes, with_direct=refused is None)
        if not settings:
            raise _too_full(directory)
        try:
            table = _measure_all(device, settings, seconds / 2, share_nbytes)
            read_table = measure_reads(device.disk, directory, device.source, settings, seconds / 2, share_nbytes)
        except StorageError as error:
            # A quota, or others who write there as well: the system's figure is no promise.
            if error.errno not in _FULL:
                raise
            share_nbytes //= 2
            continue
        chosen = choose(table)
        return TunedOptions(
            threads=chosen.depth,
            files_per_rank=chosen.depth,
            block_bytes=chosen.block_nbytes,
            direct=chosen.direct,
            table=tuple(table),
            direct_refused=refused,
            reading=choose(read_table),
            read_table=tuple(read_table),
        )


class _Device:
    """Writes and times, in files without a name."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self.disk = disk
        self.directory = directory
        # From the system's pages: aligned for direct I/O. Not zeros, which some devices do not store.
        self.source = mmap.mmap(-1, max(BLOCKS_NBYTES))
        self.source.write(os.urandom(_MIB) * (max(BLOCKS_NBYTES) // _MIB))

    def why_not_direct(self) -> str | None:
        """Whether the file system takes direct I/O, found out by trying: the refusal in words, or ``None``."""
        file = self.open(direct=True)
        try:
            if file.alignment is None:
                return file.why_buffered or "the file system refuses O_DIRECT"
            self.disk.pwrite(file, memoryview(self.source)[: min(BLOCKS_NBYTES)], 0)
        except StorageError as error:
            if error.errno in _REFUSALS:
                return error.message
            if error.errno in _FULL:
                raise _too_full(self.directory) from error
            raise
        finally:
            self.disk.close(file)
        return None

    def open(self, *, direct: bool) -> OpenFile:
        path = os.path.join(self.directory, f".robust_dcp.tune-{uuid.uuid4()}")
        file = self.disk.open_new(path, direct=direct)
        self.disk.unlink(path)
        return file

    def measure(self, setting: Setting, nbytes: int) -> Measured:
        """Checksum and write about ``nbytes`` as ``setting`` says; the time is until all of it is durable."""
        blocks_each = max(1, nbytes // setting.in_flight_nbytes)
        block = memoryview(self.source)[: setting.block_nbytes]
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(setting.depth, thread_name_prefix="robust_dcp-tune"))
            files = [self.open(direct=setting.direct) for _ in range(setting.depth)]
            for file in files:
                stack.callback(self.disk.close, file)

            def write(file: OpenFile) -> None:
                self.disk.preallocate(file, blocks_each * setting.block_nbytes)
                for number in range(blocks_each):
                    # As a save does: a thread that computes a checksum leaves the device to the others meanwhile.
                    crc32(block)
                    self.disk.pwrite(file, block, number * setting.block_nbytes)
                self.disk.fsync(file)

            started, cpu_started = time.perf_counter(), time.process_time()
            for written in [pool.submit(write, file) for file in files]:
                written.result()
            return Measured(
                setting,
                blocks_each * setting.in_flight_nbytes,
                time.perf_counter() - started,
                time.process_time() - cpu_started,
            )


def _measure_all(device: _Device, settings: list[Setting], seconds: float, share_nbytes: int) -> list[Measured]:
    """The best of each setting, in about ``seconds``."""
    rate = _pilot_rate(device, settings[0], share_nbytes)
    nbytes = min(int(rate * seconds / (ROUNDS * len(settings))), _MOST_NBYTES, share_nbytes)
    return best_of_rounds(settings, nbytes, device.measure)


def _pilot_rate(device: _Device, setting: Setting, share_nbytes: int) -> float:
    """Bytes a second, roughly: of more and more bytes, until what a first write costs once no longer matters."""
    nbytes = min(_PILOT_NBYTES, share_nbytes)
    while True:
        pilots = [device.measure(setting, nbytes) for _ in range(2)]
        if min(pilot.seconds for pilot in pilots) > _PILOT_SECONDS or 2 * nbytes > min(share_nbytes, _MOST_NBYTES):
            return max(pilot.nbytes_per_second for pilot in pilots)
        nbytes *= 2


def _existing_directory(path: str) -> str:
    directory = path
    while not os.path.isdir(directory):
        if os.path.lexists(directory):
            code = errno.ENOTDIR
            raise StorageError(
                f"tune {path}: {directory} is not a directory; give the directory that checkpoints go to",
                path=path,
                errno=code,
                operation="tune",
            )
        directory = os.path.dirname(directory)
    return directory


def _free_nbytes(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _too_full(directory: str) -> StorageError:
    return StorageError(
        f"tune {directory}: not even {min(BLOCKS_NBYTES)} bytes could be written with {_free_nbytes(directory)} bytes "
        f"free, of which at most one in {_SHARE_OF_FREE_SPACE} is used: free space, look at quotas, or tune another "
        "directory on a device of the same kind",
        path=directory,
        errno=errno.ENOSPC,
        operation="tune",
    )
