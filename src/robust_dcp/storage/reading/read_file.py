"""A data file that is being read: through the page cache, or past it.

Owns the choice between the two, for each read, and the way back where a file system refuses direct I/O. Never knows
what the bytes mean. Called by ``stored_item``, ``read_pieces`` and ``read_items``, from several threads.

Direct I/O is the faster way to bytes that are not in the page cache: they go from the device into memory by DMA,
instead of being copied by the processor, and no other pages are pushed out for them. For bytes that are in the cache
(a save without direct I/O has just put them there, or another rank has read them) the copy is faster than the device.
So unless told otherwise, each large read looks first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.staging import Block, BlockLease, copy_bytes
from robust_dcp.storage.files.alignment import BUFFERED, Alignment
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.layouts.read_head import LazyHead
from robust_dcp.storage.records.checksum import crc32

__all__ = ["ReadFile"]

_LEAST_DIRECT_NBYTES: Final = 256 << 10
"""Smaller reads go through the page cache: the kernel reads ahead there, which makes up for the copy."""

_COPIED_NBYTES: Final = 256 << 10
"""Copied at once, so that the checksum finds its data in the processor's cache."""


class ReadFile:
    """An open file. ``read_into`` reads exactly what it is asked for; the others read large pieces as is fastest.

    Args:
        direct: read past the page cache: ``True`` always (but for small reads), ``False`` never, ``None`` where the
            file system can and the bytes are not in the cache.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, disk: Disk, path: str, direct: bool | None) -> None:
        self.path = path
        self._disk = disk
        self._may_be_direct = direct is not False
        self._must_be_direct = direct is True
        self._opened = disk.open_read(path)
        self.nbytes = disk.size(path)
        self.head = LazyHead(disk, path)
        self._opened_direct: OpenFile | None = None
        self._alignment: Alignment = BUFFERED
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file; says nothing if that fails, which tells nothing about what was read from it."""
        for opened in (self._opened, self._opened_direct):
            if opened is not None:
                with contextlib.suppress(StorageError):
                    self._disk.close(opened)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
        return self._disk.pread_into(self._opened, view, offset)

    def read_block(self, block: Block, offset: int, nbytes: int) -> tuple[int, int]:
        """Read ``nbytes`` bytes from ``offset`` into ``block``.

        Returns:
            Where in ``block`` they begin, and how many there are: fewer only at the end of the file.
        """
        if nbytes >= _LEAST_DIRECT_NBYTES:
            opened = self._way_past_the_cache(offset, nbytes)
            if opened is not None:
                with contextlib.suppress(_Refused):
                    return self._read_pages(opened, block, offset, nbytes)
        return 0, self.read_into(block.view[:nbytes], offset)

    def read_piece(
        self, view: memoryview, address: int, offset: int, blocks: BlockLease, *, checksum: bool = False
    ) -> tuple[int, int]:
        """Fill ``view``, which lies at ``address``, from ``offset``.

        Args:
            blocks: for what direct I/O cannot read into ``view`` itself. Each holds at least ``view.nbytes``.
            checksum: compute the CRC-32 of what was read.

        Returns:
            The bytes read, and their CRC-32, or 0.
        """
        opened = self._way_past_the_cache(offset, view.nbytes) if view.nbytes >= _LEAST_DIRECT_NBYTES else None
        if opened is not None:
            with contextlib.suppress(_Refused):
                if (address + -offset % self._alignment.offset) % self._alignment.memory:
                    return self._read_by_copy(opened, view, address, offset, blocks, checksum)
                found = self._read_straight(opened, view, address, offset, blocks)
                return found, crc32(view[:found]) if checksum else 0
        found = self.read_into(view, offset)
        return found, crc32(view[:found]) if checksum else 0

    def _read_straight(self, opened: OpenFile, view: memoryview, address: int, offset: int, blocks: BlockLease) -> int:
        """The whole blocks of the device into ``view`` itself, the ends through a block."""
        first = -offset % self._alignment.offset
        last = view.nbytes - (offset + view.nbytes) % self._alignment.offset
        done = 0
        if first:
            done, _ = self._read_by_copy(opened, view[:first], address, offset, blocks, checksum=False)
        if done == first:
            done += self._pread_direct(opened, view[first:last], offset + first)
        if done == last and last < view.nbytes:
            at = offset + last
            done += self._read_by_copy(opened, view[last:], address + last, at, blocks, checksum=False)[0]
        return done

    def _read_by_copy(
        self, opened: OpenFile, view: memoryview, address: int, offset: int, blocks: BlockLease, checksum: bool
    ) -> tuple[int, int]:
        """All of it through a block; returns as :meth:`read_piece`."""
        found_crc32 = 0
        with blocks.lent() as block:
            start, found = self._read_pages(opened, block, offset, view.nbytes)
            for at in range(0, found, _COPIED_NBYTES):
                end = min(at + _COPIED_NBYTES, found)
                copy_bytes(address + at, block.address + start + at, end - at)
                if checksum:
                    found_crc32 = crc32(view[at:end], found_crc32)
        return found, found_crc32

    def _read_pages(self, opened: OpenFile, block: Block, offset: int, nbytes: int) -> tuple[int, int]:
        """Read the pages that hold the bytes; returns as :meth:`read_block`."""
        start = offset % PAGE_NBYTES
        pages_nbytes = -(-(start + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        found = self._pread_direct(opened, block.view[:pages_nbytes], offset - start)
        return start, max(0, min(found - start, nbytes))

    def _pread_direct(self, opened: OpenFile, view: memoryview, offset: int) -> int:
        try:
            return self._disk.pread_into(opened, view, offset)
        except StorageError as error:
            if error.errno != errno.EINVAL or self._must_be_direct:
                raise
            self._may_be_direct = False
            raise _Refused from error

    def _way_past_the_cache(self, offset: int, nbytes: int) -> OpenFile | None:
        """The file open for direct I/O, if the bytes are to be read by that."""
        if not self._may_be_direct:
            return None
        if not self._must_be_direct and _is_cached(self._opened, offset + nbytes // 2):
            return None
        with self._lock:
            if self._opened_direct is None:
                self._open_direct()
            return self._opened_direct

    def _open_direct(self) -> None:
        opened = self._disk.open_read(self.path, direct=True)
        alignment = opened.alignment
        if alignment is not None and max(alignment.memory, alignment.offset) <= PAGE_NBYTES:
            self._alignment, self._opened_direct = alignment, opened
            return
        self._may_be_direct = False
        self._disk.close(opened)
        if self._must_be_direct:
            why = opened.why_buffered or f"it asks for {alignment}, and blocks are aligned to {PAGE_NBYTES} bytes"
            raise storage_error("read past the page cache", self.path, OSError(errno.EINVAL, why))


class _Refused(Exception):
    """The file system takes no direct read here."""


def _is_cached(opened: OpenFile, offset: int) -> bool:
    """Whether the page cache holds the byte at ``offset``: asked by reading it, if that needs no waiting."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(opened.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # it would have to wait; or the file system cannot say
        return False
