"""Measures a file system, and says which options of ``RobustWriter`` and ``RobustReader`` suit it.

This module measures within limits of time and bytes, and chooses. It never touches a checkpoint: the files that it
writes have no names in any directory. Users call it as ``robust_dcp.storage.tuning.tune``, once for each kind of drive.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from typing import Any, Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.tuning.settings import BLOCKS_NBYTES, Measured, Setting, choose, settings_for, table_of
from robust_dcp.storage.tuning.tune_reads import measure_reads
from robust_dcp.storage.tuning.tune_writes import measure_writes, why_not_direct

__all__ = ["TunedOptions", "tune"]

_SHARE_OF_FREE_SPACE: Final = 4
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class TunedOptions:
    """Options for ``RobustWriter`` and ``RobustReader``, with the figures behind them; ``print`` shows the tables.

    Attributes:
        writing, reading: the settings that were chosen.
        table, read_table: what was measured for writing and for reading, in the order of the measurements.
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
        direct, depth, block_nbytes = self.writing
        return {"threads": depth, "files_per_rank": depth, "block_bytes": block_nbytes, "direct": direct}

    @property
    def reader_options(self) -> dict[str, Any]:
        """Keyword arguments for the reader: ``RobustReader(path, **tune(path).reader_options)``.

        If direct reads are faster, the reader still checks first whether bytes are in the page cache.
        """
        direct, depth, block_nbytes = self.reading
        return {"threads": depth, "block_bytes": block_nbytes, "direct": None if direct else False}

    def __str__(self) -> str:
        lines = ["writing", *table_of(self.table, self.writing), "reading", *table_of(self.read_table, self.reading)]
        if self.direct_refused:
            lines.append(f"direct I/O was not measured: {self.direct_refused}")
        return "\n".join(lines)


def tune(path: str | os.PathLike[str], *, seconds: float = 4.0, disk: Disk | None = None) -> TunedOptions:
    """Find the fastest way to write to and read from the file system of ``path``.

    It writes to files without names, in ``path`` or the nearest directory above it that exists. So nothing is left
    behind even if the process is killed. It uses at most a quarter of the free space, and less data on a slower device.
    The drive should have nothing else to do meanwhile.

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
        ['block_bytes', 'direct', 'files_per_rank', 'threads']
        >>> sorted(options.reader_options)
        ['block_bytes', 'direct', 'threads']
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    directory = _existing_directory(os.path.abspath(directory_path(path)))
    disk = PosixDisk() if disk is None else disk
    # mmap gives whole pages, which are aligned for direct I/O. They are not left as zeros, because some devices do not
    # store zeros.
    source = mmap.mmap(-1, max(BLOCKS_NBYTES))
    source.write(os.urandom(min(BLOCKS_NBYTES)) * (max(BLOCKS_NBYTES) // min(BLOCKS_NBYTES)))
    share_nbytes = _free_nbytes(directory) // _SHARE_OF_FREE_SPACE
    measured = None
    while measured is None and share_nbytes >= min(BLOCKS_NBYTES):
        measured = _measured(disk, directory, source, seconds, share_nbytes)
        share_nbytes //= 2
    if measured is None:
        raise _too_full(directory)
    return measured


def _measured(disk: Disk, directory: str, source: mmap.mmap, seconds: float, share_nbytes: int) -> TunedOptions | None:
    """Measure; ``None`` if there is less room than ``share_nbytes``.

    The system's figure for free space is no promise: there may be a quota, or others may write there as well.
    """
    try:
        refused = why_not_direct(disk, directory, source)
        settings = settings_for(share_nbytes, with_direct=refused is None)
        table = measure_writes(disk, directory, source, settings, seconds / 2, share_nbytes)
        read_table = measure_reads(disk, directory, source, settings, seconds / 2, share_nbytes)
    except StorageError as error:
        if error.errno not in _FULL:
            raise
        return None
    return TunedOptions(choose(table), choose(read_table), tuple(table), tuple(read_table), refused)


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
