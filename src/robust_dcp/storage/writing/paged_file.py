"""A file that is written in whole pages, from several threads, by direct I/O where that is possible.

This module decides which bytes are written at once from where they are, and which wait for the rest of their page. If
the file system refuses direct I/O, it goes back to the page cache. It neither decides places nor asks for data.
``engine`` and the modules under it call it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robust_dcp.errors import StorageError
from robust_dcp.staging import BlockLease, DeviceCopies, aligned_bytes
from robust_dcp.storage.files.alignment import BUFFERED, Alignment
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts.footer import FileSums
from robust_dcp.storage.records.block_sums import sums_of
from robust_dcp.storage.writing.earlier_file import Range
from robust_dcp.storage.writing.shared_extents import SharedExtents, cut_parts
from robust_dcp.storage.writing.shared_pages import Run, SharedPages

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FileOutput", "PagedFile"]

_RUN_NBYTES = 256 << 10
"""Shared pages wait until there are this many bytes of them. Many of them are neighbours then, and go out in one
write.
"""


class PagedFile:
    """One new file. Several threads may call its methods for bytes that do not overlap.

    Args:
        file: the open file. Its ``alignment`` says whether it uses direct I/O.
        page_nbytes: a multiple of the alignment's ``offset``.
        wrote: called with the number of bytes after each write. What it raises ends the work.
        shared: where bytes are not written if an earlier file has them.
        must_be_direct: never go back to the page cache: if the file system refuses a direct write, that is an error.
    """

    def __init__(
        self,
        disk: Disk,
        file: OpenFile,
        page_nbytes: int,
        wrote: Callable[[int], None] = lambda nbytes: None,
        *,
        shared: SharedExtents | None = None,
        must_be_direct: bool = False,
    ) -> None:
        self._disk = disk
        self._file = file
        self.page_nbytes = page_nbytes
        self._wrote = wrote
        self.shared = shared
        self._must_be_direct = must_be_direct
        self._shared_pages = SharedPages(page_nbytes)
        self._switching = threading.Lock()

    @property
    def alignment(self) -> Alignment:
        """The alignment that :meth:`write` needs."""
        return self._file.alignment or BUFFERED

    def takes(self, address: int, offset: int) -> bool:
        """Whether :meth:`write` can write memory from ``address`` on to ``offset`` without a copy."""
        return (address + -offset % self.page_nbytes) % self.alignment.memory == 0

    def write(self, offset: int, *parts: memoryview, unchanged: Sequence[Range] = ()) -> None:
        """Write bytes. Whole pages are written at once, straight from where they are. The rest at both ends waits for
        its neighbours.

        Args:
            parts: contiguous bytes that follow each other in the file. Each part but the last ends at the end of a page
                of the file. :meth:`takes` must allow the address of each.
            unchanged: ranges of the file that are likely to be in the earlier file, ascending.

        Raises:
            StorageError: the file system refused.
        """
        pages = [part for part in parts if len(part)]
        end = offset + sum(map(len, pages))
        before, after = -offset % self.page_nbytes, end % self.page_nbytes
        if offset + before >= end - after:
            for part in pages:
                self.put(offset, part)
                offset += len(part)
            return
        first, last = pages[0][:before], pages[-1][len(pages[-1]) - after :]
        pages[0] = pages[0][before:]
        pages[-1] = pages[-1][: len(pages[-1]) - after]
        self._write_pages([part for part in pages if len(part)], offset + before, unchanged)
        self.put(offset, first)
        self.put(end - after, last)

    def put(self, offset: int, data: Buffer) -> None:
        """Add a few bytes from anywhere in memory."""
        if not memoryview(data):
            return
        self._shared_pages.put(offset, data)
        self._write_runs(self._shared_pages.take(_RUN_NBYTES // self.page_nbytes or 1))

    def skip(self, offset: int, nbytes: int) -> None:
        """Leave a short gap: nothing else will be written there. There is no need to call this for a gap of whole
        pages.
        """
        if nbytes:
            self._shared_pages.skip(offset, nbytes)

    def finish(self, nbytes: int) -> None:
        """Write what is still waiting, set the file's length, make it durable and close it. Call this once, at the end.

        Raises:
            StorageError: a call failed. After a failed fsync the file cannot be used.
        """
        self._write_runs(self._shared_pages.take_all())
        self._disk.truncate(self._file, nbytes)  # the last page was written as a whole page
        self._disk.fsync(self._file)
        self._disk.close(self._file)

    def _write_runs(self, runs: list[Run]) -> None:
        if not runs:
            return
        longest = max(len(pages) for _, pages in runs) * self.page_nbytes
        buffer = aligned_bytes(min(longest, _RUN_NBYTES + self.page_nbytes))
        per_write = len(buffer) // self.page_nbytes
        for offset, pages in runs:
            for first in range(0, len(pages), per_write):
                some = pages[first : first + per_write]
                nbytes = len(some) * self.page_nbytes
                buffer.data[:nbytes] = b"".join(some)
                self._pwrite([buffer[:nbytes].data], offset + first * self.page_nbytes)

    def _write_pages(self, parts: list[memoryview], offset: int, unchanged: Sequence[Range]) -> None:
        """Write whole pages, except for what the file shares with the earlier file afterwards."""
        done = start = offset
        end = start + sum(map(len, parts))
        if self.shared is not None:
            for first, last in unchanged:
                first = max(-(-first // self.page_nbytes) * self.page_nbytes, start)
                last = min(last // self.page_nbytes * self.page_nbytes, end)
                if first >= last:
                    continue
                first, last = self.shared.share(first, cut_parts(parts, first - start, last - start))
                if first < last:
                    self._pwrite(cut_parts(parts, done - start, first - start), done)
                    self._wrote(last - first)
                    done = last
        self._pwrite(cut_parts(parts, done - start, end - start) if done > start else parts, done)

    def _pwrite(self, parts: list[memoryview], offset: int) -> None:
        if not parts:
            return
        data = parts[0] if len(parts) == 1 else parts
        was_direct = self._file.alignment is not None
        try:
            self._disk.pwrite(self._file, data, offset)
        except StorageError as error:
            # A short direct write that ended within a block gives this error, too, because its rest is not aligned.
            if error.errno != errno.EINVAL or not was_direct or self._must_be_direct:
                raise
            with self._switching:
                if self._file.alignment is not None:
                    self._disk.use_page_cache(self._file, f"a direct write was refused: {error.message}")
            self._disk.pwrite(self._file, data, offset)
        self._wrote(sum(map(len, parts)))


@dataclass(frozen=True)
class FileOutput:
    """What the bytes of one file pass through.

    Attributes:
        file: the file.
        lease: lends blocks of memory.
        copies: copies from a device.
        sums: where the CRC-32s of the items' data are kept for the footer or the head of the file. If none are computed
            it is ``None``, and the fields for them hold 0.
    """

    file: PagedFile
    lease: BlockLease
    copies: DeviceCopies
    sums: FileSums | None = None

    @property
    def checksums(self) -> bool:
        """Whether CRC-32s are computed."""
        return self.sums is not None

    def sums_of(self, data: memoryview, begin: int = 0) -> list[int]:
        """The CRC-32s of ``data``, as the function of that name computes them; none if checksums are off."""
        return sums_of(data, begin) if self.checksums else []

    def likely_in_payload(self, at: int, nbytes: int, begin: int, end: int, sums: Sequence[int]) -> tuple[Range, ...]:
        """Where a part of an item's data is likely to be in an earlier file; see ``EarlierFile``."""
        shared = self.file.shared
        return () if shared is None else shared.earlier.likely_in_payload(at, nbytes, begin, end, sums)

    def note(self, offset: int, nbytes: int, sums: Sequence[int]) -> None:
        """Keep the CRC-32s of the blocks of an item's data. The data lies at ``offset`` in the file."""
        if self.sums is not None:
            columns = np.array([offset], dtype=np.int64), np.array([nbytes], dtype=np.int64)
            self.sums.add(*columns, np.array(sums, dtype=np.uint32))
