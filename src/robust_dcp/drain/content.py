"""The content of one file of the source: read in parts, in order, checked and summed up on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from robust_dcp.drain.places import PlaceFile
from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, Tail
from robust_dcp.storage.records.checksum import block_counts, crc32

__all__ = ["Content"]

_MOST_PARTS: Final = 9_000
"""S3 takes at most 10,000 parts of a file."""


class Content:
    """The content of a file.

    Args:
        file: the file.
        part_nbytes: the size of a part. A file of very many parts gets larger ones.
        wants_md5: whether to compute MD5s too.
        note: called with the length of each part that was read.

    Attributes:
        crc32: of what :meth:`parts` has given.
    """

    def __init__(
        self,
        file: PlaceFile,
        part_nbytes: int,
        *,
        wants_md5: bool = False,
        note: Callable[[int], None] = lambda n: None,
    ) -> None:
        self.file = file
        self.nbytes = file.nbytes
        self.part_nbytes = max(part_nbytes, -(-file.nbytes // _MOST_PARTS))
        self.crc32 = 0
        self._wants_md5 = wants_md5
        self._note = note
        self._md5s: list[bytes] = []

    def parts(self) -> Iterator[bytes]:
        """The bytes in parts, from the start; one empty part if there are none.

        Raises:
            StorageError: the file cannot be read.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        blocks = _StoredBlocks(self.file)
        self.crc32, self._md5s = 0, []
        offset = 0
        while True:
            data = self.file.read(offset, min(self.part_nbytes, self.nbytes - offset))
            blocks.check(offset, data)
            self.crc32 = crc32(data, self.crc32)
            if self._wants_md5:
                self._md5s.append(hashlib.md5(data, usedforsecurity=False).digest())
            self._note(len(data))
            yield data
            offset += len(data)
            if offset >= self.nbytes:
                return

    @property
    def etag(self) -> str:
        """The ETag that S3 gives: the MD5 of one part, or that of the MD5s of several, and their number."""
        if len(self._md5s) == 1:
            return self._md5s[0].hex()
        return f"{hashlib.md5(b''.join(self._md5s), usedforsecurity=False).hexdigest()}-{len(self._md5s)}"


class _StoredBlocks:
    """The checksums of blocks that a save of ours has left in a file of records; none in a file without such."""

    def __init__(self, file: PlaceFile) -> None:
        self._path = file.path
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._crcs: list[int] = []
        self._next = 0
        self._crc = 0
        if holds_raw_bytes(file.path) or file.nbytes < TAIL_NBYTES:
            return
        tail = Tail.decode(file.read(file.nbytes - TAIL_NBYTES, TAIL_NBYTES), file.nbytes)
        if tail is None:
            return
        try:
            columns = Footer(tail, file.read).columns()
        except ValueError as error:
            raise self._damaged("checksums of its blocks as they were saved", str(error)) from error
        counts = block_counts(columns.nbytes, tail.block_nbytes)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(columns.offset, counts) + within * tail.block_nbytes
        self._begins = begins.tolist()
        self._ends = np.minimum(begins + tail.block_nbytes, np.repeat(columns.offset + columns.nbytes, counts)).tolist()
        self._crcs = columns.crcs.tolist()

    def check(self, offset: int, data: bytes) -> None:
        """Check the next bytes of the file.

        Raises:
            CorruptCheckpoint: a block that ends in them is not what was saved.
        """
        view = memoryview(data)
        end = offset + len(data)
        while self._next < len(self._begins) and self._begins[self._next] < end:
            first, last = self._begins[self._next], self._ends[self._next]
            self._crc = crc32(view[max(first - offset, 0) : min(last, end) - offset], self._crc)
            if last > end:
                return
            if self._crc != self._crcs[self._next]:
                expected = f"bytes {first} to {last} with CRC-32 {self._crcs[self._next]:08x}"
                raise self._damaged(expected, f"CRC-32 {self._crc:08x}")
            self._crc = 0
            self._next += 1

    def _damaged(self, expected: str, found: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self._path} is damaged, and is not copied: expected {expected}, found {found}; restore the file from "
            "another copy, or copy another checkpoint",
            file=self._path,
            expected=expected,
            found=found,
        )
