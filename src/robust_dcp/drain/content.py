"""The content of one file while it is copied: read in parts, in order, and checked on the way.

This module computes checksums of what is sent, and compares what is read with the checksums that the save has left in
the file. ``transfer`` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, Tail
from robust_dcp.storage.records.block_sums import block_counts
from robust_dcp.storage.records.checksum import crc32

__all__ = ["ContentSums", "OpenSource", "StoredSums", "part_nbytes_of", "parts_of"]

_MOST_PARTS: Final = 9_000


class OpenSource(Protocol):
    """A file that is read."""

    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes.

        Raises:
            StorageError: they cannot be read, or the file is shorter.
        """

    def close(self) -> None: ...


@dataclass
class ContentSums:
    """Checksums of a file, of the parts that were added so far.

    Attributes:
        nbytes: how many bytes.
        crc32: of all of them.
        part_md5s: the MD5 of each part; none if nobody wants them.
    """

    wants_md5: bool = False
    nbytes: int = 0
    crc32: int = 0
    part_md5s: list[bytes] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        """Add the next part."""
        self.nbytes += len(data)
        self.crc32 = crc32(data, self.crc32)
        if self.wants_md5:
            self.part_md5s.append(hashlib.md5(data, usedforsecurity=False).digest())

    @property
    def etag(self) -> str:
        """The ETag that S3 gives: the MD5 of one part, or that of the MD5s of several, and their number."""
        if len(self.part_md5s) == 1:
            return self.part_md5s[0].hex()
        md5_of_md5s = hashlib.md5(b"".join(self.part_md5s), usedforsecurity=False).hexdigest()
        return f"{md5_of_md5s}-{len(self.part_md5s)}"


def part_nbytes_of(nbytes: int, part_nbytes: int) -> int:
    """The size of the parts of a file, such that there are not too many."""
    return max(part_nbytes, -(-nbytes // _MOST_PARTS))


def parts_of(source: OpenSource, path: str, part_nbytes: int) -> Iterator[bytes]:
    """The bytes of a file in parts; one empty part if there are none. What the save has left checksums of is checked.

    Raises:
        StorageError: the file cannot be read.
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    stored = StoredSums.of(source, path)
    offset = 0
    while True:
        data = source.read(offset, min(part_nbytes, source.nbytes - offset))
        if stored is not None:
            stored.check(offset, data)
        yield data
        offset += len(data)
        if offset >= source.nbytes:
            return


class StoredSums:
    """The checksums of blocks that a save of ours has written into a file of records.

    Args:
        path: of the file, for errors.
        begins, ends: where each block begins and ends in the file.
        crcs: of each block.
    """

    def __init__(self, path: str, begins: Sequence[int], ends: Sequence[int], crcs: Sequence[int]) -> None:
        self._path = path
        self._begins = begins
        self._ends = ends
        self._crcs = crcs
        self._next = 0
        self._crc = 0

    @classmethod
    def of(cls, source: OpenSource, path: str) -> StoredSums | None:
        """Those of a file; ``None`` if it has none: another program has written it, or it is no file of records.

        Raises:
            CorruptCheckpoint: it has some, and they are damaged.
        """
        if holds_raw_bytes(path) or source.nbytes < TAIL_NBYTES:
            return None
        tail = Tail.decode(source.read(source.nbytes - TAIL_NBYTES, TAIL_NBYTES), source.nbytes)
        if tail is None:
            return None
        try:
            columns = Footer(tail, source.read).columns()
        except ValueError as error:
            raise _damaged(path, "checksums of its blocks as they were saved", str(error)) from error
        counts = block_counts(columns.nbytes, tail.block_nbytes)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(columns.offset, counts) + within * tail.block_nbytes
        ends = np.minimum(begins + tail.block_nbytes, np.repeat(columns.offset + columns.nbytes, counts))
        return cls(path, begins.tolist(), ends.tolist(), columns.crcs.tolist())

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
                where = f"bytes {first} to {last}"
                expected = f"{where} with CRC-32 {self._crcs[self._next]:08x}"
                raise _damaged(self._path, expected, f"CRC-32 {self._crc:08x}")
            self._crc = 0
            self._next += 1


def _damaged(path: str, expected: str, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path} is damaged, and is not copied: expected {expected}, found {found}; restore the file from another "
        "copy, or copy another checkpoint",
        file=path,
        expected=expected,
        found=found,
    )
