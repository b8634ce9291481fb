"""A data file that is being read, through the page cache or past it.

This module chooses between the two for each read, and goes back to the page cache where a file system refuses direct
I/O. It never knows what the bytes mean. Several threads call it.

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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from robust_dcp.errors import StorageError
from robust_dcp.staging.blocks import Block, BlockLease, copy_bytes
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.kernel import BUFFERED, Alignment
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import Footer, footer_in
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.layouts.safetensors import FileHead, read_head
from robust_dcp.storage.records.checksum import crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LEAST_STRAIGHT_NBYTES: Final = 16 << 10
"""Fewer bytes go through the block: copying them is faster than passing one more buffer to the kernel."""

_AT_ONCE_NBYTES: Final = 256 << 10
"""So much is copied at a time, so that the checksum finds its data in the processor's cache."""


_LEAST_DIRECT_NBYTES: Final = 256 << 10
"""Smaller reads go through the page cache. The kernel reads ahead there, which makes up for the copy."""

_CHECKED_NBYTES: Final = 1 << 20
"""So much is read at a time through the page cache, so that the checksum finds its data in the processor's cache."""


class DataFile:
    """An open file. ``read`` reads through the page cache; the other methods read large pieces in the fastest way.

    Args:
        disk: the file system.
        path: the path of the file.
        direct: whether to read past the page cache. ``True``: always, except for small reads. ``False``: never.
            ``None``: where the file system can, and the cache holds less than half of the bytes of the read.
        note_read: called after each read with the number of bytes. What it raises ends the load.

    Attributes:
        nbytes: the length of the file.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(
        self, disk: Disk, path: str, direct: bool | None, note_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.path = path
        self._note_read = note_read
        self._disk = disk
        self._may_be_direct = direct is not False
        self._must_be_direct = direct is True
        self._opened = disk.open_read(path)
        self.nbytes = self._opened.nbytes
        self._opened_direct: OpenFile | None = None
        self._alignment: Alignment = BUFFERED
        self._lock = threading.Lock()  # held while it is opened for direct I/O

    @cached_property
    def head(self) -> FileHead | None:
        """The head of a file of raw bytes; ``None`` for a file of records. Raises the same as :func:`read_head`."""
        return read_head(self._disk, self.path) if holds_raw_bytes(self.path) else None

    @cached_property
    def footer(self) -> Footer | None:
        """The footer, with the mark of the save and the checksums of blocks. Only files of records that we wrote have
        one.
        """
        return None if holds_raw_bytes(self.path) else footer_in(self._disk, self._opened)

    def close(self) -> None:
        """Close the file. Errors are ignored: they say nothing about the bytes that were read."""
        for opened in (self._opened, self._opened_direct):
            if opened is not None:
                with contextlib.suppress(StorageError):
                    self._disk.close(opened)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Bytes from ``offset`` on: fewer than asked for only at the end of the file."""
        buffer = bytearray(nbytes)
        found = self._pread(self._opened, buffer, offset)
        return buffer if found == nbytes else buffer[:found]

    def read_block(self, block: Block, offset: int, nbytes: int) -> tuple[int, int]:
        """Read ``nbytes`` bytes from ``offset`` into ``block``.

        Returns:
            Where in ``block`` the bytes begin, and how many there are: fewer than asked for only at the end of the
            file.
        """
        opened = self._way_past_the_cache(offset, nbytes)
        if opened is not None:
            unit = max(self._alignment.memory, self._alignment.offset)
            at = offset % unit
            last = -(-(at + nbytes) // unit) * unit
            found = self._pread_direct(opened, block.view[:last], offset - at)
            if found is not None:
                return at, max(0, min(found - at, nbytes))
        return 0, self._pread(self._opened, block.view[:nbytes], offset)

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
        opened = self._way_past_the_cache(offset, view.nbytes)
        if opened is not None:
            with blocks.lent() as block:
                done = self._read_past_cache(opened, view, address, offset, block, checksum)
            if done is not None:
                return done
        return self._read_through_cache(view, offset, checksum)

    def _read_past_cache(
        self, opened: OpenFile, view: memoryview, address: int, offset: int, block: Block, checksum: bool
    ) -> tuple[int, int] | None:
        """Fill ``view`` by direct I/O; returns the same as :meth:`read_piece`, or ``None`` if that is refused here.

        Whole units of the file go straight to their place. What lies before and behind them goes through the block, in
        which byte ``n`` of ``view`` has the place ``at + n``.
        """
        unit, nbytes = max(self._alignment.memory, self._alignment.offset), view.nbytes
        at = offset % unit
        last = -(-(at + nbytes) // unit) * unit
        begin, stop = -offset % unit, nbytes - (offset + nbytes) % unit
        parts: tuple[memoryview, ...] = (block.view[: at + begin], view[begin:stop], block.view[at + stop : last])
        if stop - begin < _LEAST_STRAIGHT_NBYTES or (address + begin) % self._alignment.memory:
            begin = stop = 0
            parts = (block.view[:last],)
        read_nbytes = self._pread_direct(opened, [part for part in parts if part.nbytes], offset - at)
        if read_nbytes is None:
            return None
        found = max(0, min(read_nbytes - at, nbytes))
        value = 0
        for low, high, is_copied in ((0, begin, True), (begin, stop, False), (stop, nbytes, True)):
            for start in range(low, min(high, found), _AT_ONCE_NBYTES):
                end = min(start + _AT_ONCE_NBYTES, high, found)
                if is_copied:
                    copy_bytes(address + start, block.address + at + start, end - start)
                if checksum:
                    value = crc32(view[start:end], value)
        return found, value

    def _read_through_cache(self, view: memoryview, offset: int, checksum: bool) -> tuple[int, int]:
        """Fill ``view`` through the page cache; returns the same as :meth:`read_piece`."""
        done = value = 0
        for at in range(0, view.nbytes, _CHECKED_NBYTES):
            part = view[at : at + _CHECKED_NBYTES]
            found = self._pread(self._opened, part, offset + at)
            if checksum:
                value = crc32(part[:found], value)
            done += found
            if found < part.nbytes:
                break
        return done, value

    def _pread_direct(self, opened: OpenFile, into: memoryview | Sequence[memoryview], offset: int) -> int | None:
        """Read past the cache; ``None`` if the file system refuses that, which it is then asked no more."""
        try:
            return self._pread(opened, into, offset)
        except StorageError as error:
            if error.errno != errno.EINVAL or self._must_be_direct:
                raise
            self._may_be_direct = False
            return None

    def _pread(self, opened: OpenFile, into: Buffer | Sequence[Buffer], offset: int) -> int:
        nbytes = self._disk.pread_into(opened, into, offset)
        self._note_read(nbytes)
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
        opened = self._disk.open_read(self.path, direct=None)
        alignment = opened.alignment
        if alignment is not None and max(alignment.memory, alignment.offset) <= PAGE_NBYTES:
            self._alignment, self._opened_direct = alignment, opened
            return
        self._may_be_direct = False
        self._disk.close(opened)
        if self._must_be_direct:
            why = opened.why_buffered or f"it asks for {alignment}, and blocks are aligned to {PAGE_NBYTES} bytes"
            raise storage_error("read past the page cache", self.path, OSError(errno.EINVAL, why))
