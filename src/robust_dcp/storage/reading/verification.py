"""Decides which bytes of a load are compared with checksums, and counts those that are not.

This module decides how far beyond a slice to read so that the slice can be verified. It also makes the errors for
damaged data. All code that reads data calls it, from several threads.
"""

from __future__ import annotations

import threading
from typing import Final, Literal, Protocol

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.records.block_sums import SUM_NBYTES, BlockSums
from robust_dcp.storage.records.checksum import crc32

__all__ = ["Verification", "Verify", "damaged"]

Verify = bool | Literal["all"]
"""``True``: verify what costs little. ``"all"``: data that cannot be verified is an error. ``False``: verify
nothing.
"""

_AT_ONCE_NBYTES: Final = 1 << 20

_CHEAP_NBYTES: Final = 2 * SUM_NBYTES
_CHEAP_PART: Final = 20
"""A slice is verified if that takes at most ``_CHEAP_NBYTES`` more bytes, or at most one more byte for each 20
wanted.
"""


class _Stored(Protocol):
    """An item as it is stored; see ``item_bytes.ItemBytes``."""

    file: str
    item: str
    offset: int

    def read(self, offset: int, nbytes: int) -> bytes: ...


class Verification:
    """What one load verifies.

    Attributes:
        verify: see :data:`Verify`.
        unverified_nbytes: bytes of data that were handed over and not compared with any checksum.
    """

    def __init__(self, verify: Verify = True) -> None:
        self.verify = verify
        self.unverified_nbytes = 0
        self._lock = threading.Lock()

    def range_for(self, stored: _Stored, sums: BlockSums | None, begin: int, end: int) -> tuple[int, int] | None:
        """The range of an item to read so that bytes ``begin`` to ``end`` can be verified; ``None`` if they are not
        verified.

        Raises:
            CorruptCheckpoint: they must be verified, and cannot be.
        """
        if self.verify is not False and sums is not None and begin < end:
            first, last = sums.around(begin, end)
            more = last - first - (end - begin)
            if self.verify == "all" or more <= _CHEAP_NBYTES or more * _CHEAP_PART <= end - begin:
                return first, last
        self.skip(end - begin, stored.item, stored.file)
        return None

    def skip(self, nbytes: int, item: str, file: str) -> None:
        """Count ``nbytes`` bytes of an item that are handed over without having been verified.

        Raises:
            CorruptCheckpoint: ``verify`` is ``"all"``.
        """
        if self.verify == "all" and nbytes:
            raise CorruptCheckpoint(
                f"item {item!r} in {file} cannot be verified: no checksums were written with it, and "
                'verify_checksums="all"; pass True to load what cannot be verified',
                file=file,
                item=item,
                expected="checksums",
                found="none",
            )
        with self._lock:
            self.unverified_nbytes += nbytes


def damaged(stored: _Stored, sums: BlockSums, begin: int, end: int) -> CorruptCheckpoint:
    """The error for bytes ``begin`` to ``end`` of an item that do not match their checksums. Both are ends of blocks.

    The bytes are read once more, so that the error names the first damaged block.
    """
    found = (
        "other bytes at first, but the right ones in a second read: suspect the memory or the connection to the disk"
    )
    for first in range(begin, end, sums.block_nbytes):
        last = min(first + sums.block_nbytes, end)
        value = _crc32_of(stored, first, last)
        if value != sums.expected(first, last):
            begin, end, found = first, last, f"{value:08x}"
            break
    at = stored.offset
    expected = f"CRC-32 {sums.expected(begin, end):08x} of bytes {at + begin} to {at + end} of the file"
    return CorruptCheckpoint(
        f"item {stored.item!r} in {stored.file} is damaged: expected {expected}, found {found}; take another "
        "checkpoint, or restore the file",
        file=stored.file,
        item=stored.item,
        expected=expected,
        found=found,
    )


def _crc32_of(stored: _Stored, begin: int, end: int) -> int:
    value = 0
    for first in range(begin, end, _AT_ONCE_NBYTES):
        value = crc32(stored.read(first, min(first + _AT_ONCE_NBYTES, end) - first), value)
    return value
