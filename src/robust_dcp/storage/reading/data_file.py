"""A data file that is being read, through the page cache or past it.

This module chooses between the two for each read, and goes back to the page cache where a file system refuses direct
I/O. It never knows what the bytes mean. ``stored_tensor``, ``large_tensor`` and ``plan_reader`` call it, from several
threads.

Direct I/O is faster for bytes that are not in the page cache. The device writes them into our memory by DMA, the
processor copies nothing, and no other pages are pushed out of the cache. The page cache is faster for bytes that it
holds already, because a save without direct I/O or another rank's read has put them there. So each large read asks
first what the cache holds, unless an option decides. Asking does not change the cache. A load that reads past the cache
leaves nothing there, so the next load of the same files finds what this one found.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.staging import Block, BlockLease
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.kernel import BUFFERED, Alignment
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, Tail
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.layouts.read_head import LazyHead
from robust_dcp.storage.reading.scattered_read import ScatteredRead, Wanted
from robust_dcp.storage.records.checksum import crc32

__all__ = ["DataFile"]

_LEAST_DIRECT_NBYTES: Final = 256 << 10
"""Smaller reads go through the page cache. The kernel reads ahead there, which makes up for the copy."""

_CHECKED_NBYTES: Final = 1 << 20
"""So much is read at a time through the page cache, so that the checksum finds its data in the processor's cache."""


class DataFile:
    """An open file. ``read_into`` reads through the page cache; the other methods read large pieces in the fastest way.

    Args:
        direct: whether to read past the page cache. ``True``: always, except for small reads. ``False``: never.
            ``None``: where the file system can, and the cache holds less than half of the bytes of the read.

    Attributes:
        read_nbytes: how many bytes have been read so far.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, disk: Disk, path: str, direct: bool | None) -> None:
        self.path = path
        self._disk = disk
        self._may_be_direct = direct is not False
        self._must_be_direct = direct is True
        self._opened = disk.open_read(path)
        self.nbytes = disk.size(self._opened)
        self.head = LazyHead(disk, path)
        self._opened_direct: OpenFile | None = None
        self._alignment: Alignment = BUFFERED
        self._lock = threading.Lock()
        self.read_nbytes = 0

    @property
    def mark(self) -> str | None:
        """The mark of the save that wrote the file; ``None`` if the file has none."""
        head = self.head.get()
        if head is not None:
            return head.mark
        return None if self.footer is None else self.footer.tail.mark

    @cached_property
    def footer(self) -> Footer | None:
        """The footer, with the mark of the save and the checksums of blocks. Only files of records that we wrote have
        one.
        """
        if holds_raw_bytes(self.path) or self.nbytes < TAIL_NBYTES:
            return None
        tail = Tail.decode(self._read(self.nbytes - TAIL_NBYTES, TAIL_NBYTES), self.nbytes)
        return None if tail is None else Footer(tail, self._read)

    def _read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        return bytes(buffer[: self._disk.pread_into(self._opened, buffer, offset)])

    def close(self) -> None:
        """Close the file. Errors are ignored: they say nothing about the bytes that were read."""
        for opened in (self._opened, self._opened_direct):
            if opened is not None:
                with contextlib.suppress(StorageError):
                    self._disk.close(opened)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset``. Returns how many bytes were read: fewer than asked for only at the end of the
        file.
        """
        return self._counted(self._disk.pread_into(self._opened, view, offset))

    def read_block(self, block: Block, offset: int, nbytes: int) -> tuple[int, int]:
        """Read ``nbytes`` bytes from ``offset`` into ``block``.

        Returns:
            Where in ``block`` the bytes begin, and how many there are: fewer than asked for only at the end of the
            file.
        """
        scattered, found = self.read_scattered(block, offset, nbytes, ())
        return scattered.at, found

    def read_scattered(
        self, block: Block, offset: int, nbytes: int, wanted: Sequence[Wanted]
    ) -> tuple[ScatteredRead, int]:
        """Read ``nbytes`` bytes from ``offset``. Some go straight to where they are ``wanted``, the others into
        ``block``.

        Returns:
            The read, to finish the copies that are left, and how many bytes there are: fewer only at the end of the
            file.
        """
        opened = self._way_past_the_cache(offset, nbytes)
        if opened is not None:
            with contextlib.suppress(_Refused):
                scattered = ScatteredRead(block, offset, offset + nbytes, wanted, self._alignment)
                found = self._pread_direct(opened, scattered.buffers, scattered.first)
                return scattered, max(0, min(found - scattered.at, nbytes))
        scattered = ScatteredRead(block, offset, offset + nbytes, wanted, BUFFERED)
        return scattered, self._counted(self._disk.pread_into(self._opened, _one_or_all(scattered.buffers), offset))

    def read_piece(
        self, view: memoryview, address: int, offset: int, blocks: BlockLease, *, checksum: bool = False
    ) -> tuple[int, int]:
        """Fill ``view``, which lies at ``address`` in memory, from ``offset``.

        Args:
            blocks: used for bytes that direct I/O cannot read into ``view`` itself. Each block holds at least
                ``view.nbytes``, wherever they begin in the file.
            checksum: whether to compute the CRC-32 of the bytes.

        Returns:
            How many bytes were read, and their CRC-32 (0 without ``checksum``).
        """
        nbytes = view.nbytes
        opened = self._way_past_the_cache(offset, nbytes)
        if opened is not None:
            with contextlib.suppress(_Refused), blocks.lent() as block:
                wanted = [Wanted(offset, view, address)]
                scattered = ScatteredRead(block, offset, offset + nbytes, wanted, self._alignment)
                found = self._pread_direct(opened, scattered.buffers, scattered.first)
                found = max(0, min(found - scattered.at, nbytes))
                return found, scattered.finish(0, offset + found, checksum=checksum)
        return self._read_through_cache(view, offset, checksum)

    def _read_through_cache(self, view: memoryview, offset: int, checksum: bool) -> tuple[int, int]:
        """Fill ``view`` through the page cache; returns the same as :meth:`read_piece`."""
        done = value = 0
        for at in range(0, view.nbytes, _CHECKED_NBYTES):
            part = view[at : at + _CHECKED_NBYTES]
            found = self.read_into(part, offset + at)
            if checksum:
                value = crc32(part[:found], value)
            done += found
            if found < part.nbytes:
                break
        return done, value

    def _pread_direct(self, opened: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return self._counted(self._disk.pread_into(opened, _one_or_all(buffers), offset))
        except StorageError as error:
            if error.errno != errno.EINVAL or self._must_be_direct:
                raise
            self._may_be_direct = False
            raise _Refused from error

    def _counted(self, nbytes: int) -> int:
        with self._lock:
            self.read_nbytes += nbytes
        return nbytes

    def _way_past_the_cache(self, offset: int, nbytes: int) -> OpenFile | None:
        """The file, opened for direct I/O, if these bytes should be read that way; else ``None``."""
        if not self._may_be_direct or nbytes < _LEAST_DIRECT_NBYTES:
            return None
        if not self._must_be_direct and 2 * self._disk.cached_nbytes(self._opened, offset, nbytes) >= nbytes:
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
    """The file system refuses a direct read here."""


def _one_or_all(buffers: Sequence[memoryview]) -> memoryview | Sequence[memoryview]:
    return buffers[0] if len(buffers) == 1 else buffers
