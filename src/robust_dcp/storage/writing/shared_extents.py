"""Lets a new file share those bytes on the device with an earlier file that are the same in both.

This module owns the proof. It lets the new file share a range first, then reads the range back from the new file, and
compares each byte with what was to be written. What differs, cannot be read, or cannot be shared is written as always.
``paged_file`` calls it, from several threads.

The order matters. If the bytes were compared in the earlier file and shared afterwards, another program could change
that file in between. Once the new file shares them, no write to the earlier one changes them. And reading them finds a
byte that has rotted on the device, which no checksum that was kept from the last save would.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from robust_dcp.errors import StorageError
from robust_dcp.staging import Block, BlockLease
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.writing.earlier_file import EarlierFile, Range

__all__ = ["SharedExtents", "cut_parts"]

LEAST_NBYTES: Final = 256 << 10
"""Shorter ranges are written. A write of them costs hardly more than the two calls, and each shared range adds an
extent to the file.
"""

_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EPERM})


class SharedExtents:
    """What one new file shares with an earlier file.

    Args:
        earlier: the earlier file; :meth:`close` closes it.
        file: the new file, open for writing.
        lease: lends blocks to read into.

    Attributes:
        nbytes: how many bytes the new file shares.
        differing_nbytes: how many bytes had the same checksums, but were not the same, or could not be read.
        why_not: why nothing more is shared, as the system says; empty while sharing works.
    """

    def __init__(self, disk: Disk, earlier: EarlierFile, file: OpenFile, lease: BlockLease) -> None:
        self.earlier = earlier
        self.nbytes = 0
        self.differing_nbytes = 0
        self.why_not = ""
        self._disk = disk
        self._file = file
        self._lease = lease
        self._lock = threading.Lock()
        self._new: OpenFile | None = None

    def share(self, offset: int, parts: Sequence[memoryview]) -> Range:
        """Share bytes that are likely to be the same.

        Args:
            offset: where in both files they begin.
            parts: the bytes, one part after the other.

        Returns:
            The range that need not be written any more, because the new file has these bytes now. It may be empty.
        """
        nbytes = sum(map(len, parts))
        if self.why_not or nbytes < LEAST_NBYTES:
            return offset, offset
        try:
            begin, end = self._disk.share_extents(self.earlier.file, self._file, offset, nbytes)
        except StorageError as error:
            self.why_not = _why_not(error)
            return offset, offset
        is_same = self._is_same(begin, end, cut_parts(parts, begin - offset, end - offset))
        with self._lock:
            self.nbytes += end - begin if is_same else 0
            self.differing_nbytes += 0 if is_same else end - begin
        return (begin, end) if is_same else (offset, offset)

    def close(self) -> None:
        """Close the earlier file. Errors are ignored: they say nothing about the new file."""
        for file in (self.earlier.file, self._new):
            if file is not None:
                with contextlib.suppress(StorageError):
                    self._disk.close(file)

    def _is_same(self, begin: int, end: int, parts: Sequence[memoryview]) -> bool:
        """Whether the new file holds ``parts``."""
        try:
            with self._lease.lent() as block:
                at = begin
                for part in parts:
                    for first in range(0, len(part), self._lease.block_nbytes):
                        expected = part[first : first + self._lease.block_nbytes]
                        if not self._reads(block, at, expected):
                            return False
                        at += len(expected)
        except StorageError:  # of a device, or of a file system that has checksums of its own
            return False
        return at == end

    def _reads(self, block: Block, at: int, expected: memoryview) -> bool:
        found = block.view[: len(expected)]
        file = self._opened()
        try:
            n_read = self._disk.pread_into(file, found, at)
        except StorageError as error:
            if error.errno != errno.EINVAL or file.alignment is None:
                raise
            with self._lock:
                if file.alignment is not None:
                    self._disk.use_page_cache(file, f"a direct read was refused: {error.message}")
            n_read = self._disk.pread_into(file, found, at)
        return n_read == len(expected) and _are_equal(found, expected)

    def _opened(self) -> OpenFile:
        """The new file, open for reading: past the page cache, if it is written that way."""
        with self._lock:
            if self._new is None:
                self._new = self._disk.open_read(self._file.path, direct=self._file.alignment is not None)
            return self._new


def _why_not(error: StorageError) -> str:
    """Why the file system does not share, the same for all files of a rank."""
    if error.errno == errno.EXDEV:
        return "it lies on another file system"
    if error.errno in _CANNOT:
        return f"the file system cannot share bytes of two files ({errno.errorcode[error.errno]})"
    return error.message


def cut_parts(parts: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """Bytes ``begin`` to ``end`` of ``parts``."""
    found = []
    for part in parts:
        if begin < len(part) and end > 0:
            found.append(part[max(begin, 0) : max(end, 0)])
        begin, end = begin - len(part), end - len(part)
    return [part for part in found if len(part)]


def _are_equal(one: memoryview, other: memoryview) -> bool:
    # memoryview compares its items one by one. Words are compared at the speed of memory.
    whole = len(one) // 8 * 8
    words, other_words = (np.frombuffer(view, dtype=np.uint64, count=whole // 8) for view in (one, other))
    return np.array_equal(words, other_words) and bytes(one[whole:]) == bytes(other[whole:])
