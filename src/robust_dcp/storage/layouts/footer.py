"""The footer of a file of records: the mark of its save, which items lie in it, and the checksums of their blocks.

This module owns the format (docs/formats.md) and the checks of it. DCP's readers never see the footer: they read only
what ``.metadata`` names, and that comes before it. ``writing.steps`` makes it, ``reading.data_file`` reads it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from robust_dcp.storage.records.checksum import SUM_NBYTES, BlockSums, block_counts, crc32, joined

__all__ = ["TAIL_NBYTES", "FileSums", "Footer", "SumColumns", "Tail", "footer_of", "item_id", "seed_of"]

Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]

_MAGIC: Final = b"RDCPEND2"
_TAIL: Final = struct.Struct("<8s16sQQQII")
TAIL_NBYTES: Final = _TAIL.size + 4
"""Magic, mark of the save in hexadecimal digits, length of the file, number of items, number of blocks, bytes of a
block, CRC-32 of the columns. A CRC-32 of the tail itself follows.
"""


def item_id(name: str, offsets: Sequence[int]) -> int:
    """32 bits that tell an item from others: the CRC-32 of its name, continued from that of its offsets.

    Args:
        name: the FQN.
        offsets: where the chunk begins in its tensor; ``()`` for an object.
    """
    return crc32(name.encode(errors="surrogatepass"), seed_of(tuple(offsets)))


@lru_cache(maxsize=4096)
def seed_of(offsets: tuple[int, ...]) -> int:
    """The part of :func:`item_id` that the items of many names share."""
    return crc32(struct.pack(f"<{len(offsets)}q", *offsets))


@dataclass(frozen=True, eq=False)
class SumColumns:
    """The blocks of n items' data in one file, in the order of the file.

    Attributes:
        offset: int64 ``[n]``, where each item's data begins, in bytes from the start of the file.
        nbytes: int64 ``[n]``, the length of each item's data.
        crcs: uint32 ``[m]``, the CRC-32s of the blocks of all items, one item after the other.
    """

    offset: Int64
    nbytes: Int64
    crcs: UInt32

    def encode(self) -> bytes:
        """The columns as the file holds them."""
        columns = (self.offset.astype("<i8"), self.nbytes.astype("<i8"), self.crcs.astype("<u4"))
        return b"".join(column.tobytes() for column in columns)


class FileSums:
    """The checksums of one file. Several threads add to them while it is written."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64, Int64, UInt32]] = []

    def add(self, offset: Int64, nbytes: Int64, crcs: UInt32) -> None:
        """Add the checksums of some items; the arguments are those of :class:`SumColumns`."""
        self._parts.append((offset, nbytes, crcs))

    def columns(self) -> SumColumns:
        """All checksums that were added."""
        if not self._parts:
            none: Int64 = np.empty(0, dtype=np.int64)
            return SumColumns(none, none, np.empty(0, dtype=np.uint32))
        offset, nbytes, crcs = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        order = np.lexsort((nbytes, offset))
        counts = block_counts(nbytes)
        first = np.cumsum(counts) - counts
        # For each block of the sorted items, its place before the sort.
        moved = np.repeat(first[order] - (np.cumsum(counts[order]) - counts[order]), counts[order])
        return SumColumns(offset[order], nbytes[order], crcs[np.arange(len(crcs)) + moved])


class Tail(NamedTuple):
    """The last bytes of a file.

    Attributes:
        mark: the mark of the save.
        file_nbytes: length of the file, footer included.
        n_items, n_blocks: lengths of the columns.
        block_nbytes: bytes of a block.
        columns_crc32: CRC-32 of the columns.
    """

    mark: str
    file_nbytes: int
    n_items: int
    n_blocks: int
    block_nbytes: int
    columns_crc32: int

    @property
    def columns_nbytes(self) -> int:
        """Length of the columns, which lie right before the tail."""
        return 20 * self.n_items + 4 * self.n_blocks

    def encode(self) -> bytes:
        """The bytes of the tail."""
        tail = _TAIL.pack(_MAGIC, self.mark.encode("ascii"), *self[1:])
        return tail + crc32(tail).to_bytes(4, "little")

    @classmethod
    def decode(cls, data: bytes, file_nbytes: int) -> Tail | None:
        """Decode the last bytes of a file of ``file_nbytes`` bytes; ``None`` if they are not such a tail."""
        if len(data) != TAIL_NBYTES or crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            return None
        magic, mark, *numbers = _TAIL.unpack(data[:-4])
        tail = cls(mark.decode("ascii", "replace"), *numbers)
        in_file = tail.file_nbytes == file_nbytes and tail.columns_nbytes <= file_nbytes - TAIL_NBYTES
        return tail if magic == _MAGIC and in_file and tail.block_nbytes > 0 else None


def footer_of(mark: str, at: int, columns: SumColumns, items: Sequence[int]) -> bytes:
    """The footer of a file with items that end at byte ``at``.

    Args:
        items: the :func:`item_id` of each item, in the order of the file.
    """
    if len(items) != len(columns.offset):
        raise ValueError(f"a file of {len(items)} items has checksums of {len(columns.offset)}")
    encoded = columns.encode() + np.array(items, dtype="<u4").tobytes()
    nbytes = at + len(encoded) + TAIL_NBYTES
    tail = Tail(mark, nbytes, len(columns.offset), len(columns.crcs), SUM_NBYTES, crc32(encoded))
    return encoded + tail.encode()


class Footer:
    """The footer of a file that is being read. The first thread that asks for its columns reads them.

    Args:
        tail: the tail of the file.
        read: gives bytes of the file, by offset and length; fewer where the file ends.
    """

    def __init__(self, tail: Tail, read: Callable[[int, int], bytes]) -> None:
        self.tail = tail
        self._read = read
        self._lock = threading.Lock()
        self._columns: SumColumns | None = None
        self._first: Int64 = np.empty(0, dtype=np.int64)
        self._items: UInt32 = np.empty(0, dtype=np.uint32)

    def items_at(self, begin: Int64, end: Int64) -> Int64:
        """The :func:`item_id` of the items in some records; -1 where no item lies.

        Args:
            begin, end: int64 ``[n]``, where the records begin and end in the file.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        offset = self.columns().offset
        row = np.searchsorted(offset, begin)
        is_there = row < len(offset)
        row = np.minimum(row, max(len(offset) - 1, 0))
        if not len(offset):
            return np.full(len(begin), -1, dtype=np.int64)
        is_there &= offset[row] < end
        return np.where(is_there, self._items[row].astype(np.int64), np.int64(-1))

    def find(self, begin: int, end: int, item_offset: int) -> BlockSums | None:
        """The blocks of data that hold bytes ``begin`` to ``end`` of the file; ``None`` if there are none.

        Args:
            item_offset: where the item begins in the file. Offsets in the result are counted from there.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns = self.columns()
        row = int(np.searchsorted(columns.offset, begin, side="right")) - 1
        if row < 0:
            return None
        offset, nbytes = int(columns.offset[row]), int(columns.nbytes[row])
        if end > offset + nbytes or offset < item_offset:
            return None
        first, last = self._first[row : row + 2].tolist()
        return BlockSums(offset - item_offset, nbytes, self.tail.block_nbytes, columns.crcs[first:last].tolist())

    def crc32s_at(self, begin: Int64) -> list[int]:
        """The CRC-32 of the data of the items in some records, for each of which :meth:`items_at` has found an item.

        Args:
            begin: int64 ``[n]``, where the records begin in the file.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns = self.columns()
        rows = np.minimum(np.searchsorted(columns.offset, begin), max(len(columns.offset) - 1, 0))
        first, last = self._first[rows], self._first[rows + 1]
        if (last - first <= 1).all() and len(columns.crcs):
            crcs = columns.crcs[np.minimum(first, len(columns.crcs) - 1)]
            found: list[int] = np.where(last > first, crcs, 0).astype(np.int64).tolist()
            return found
        block = self.tail.block_nbytes
        return [
            joined(columns.crcs[low:high].tolist(), nbytes, block)
            for low, high, nbytes in zip(first.tolist(), last.tolist(), columns.nbytes[rows].tolist(), strict=True)
        ]

    def blocks(self) -> tuple[Int64, Int64, UInt32]:
        """Where each block of data begins and ends in the file, and its CRC-32.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns, nbytes = self.columns(), self.tail.block_nbytes
        counts = block_counts(columns.nbytes, nbytes)
        within = np.arange(len(columns.crcs)) - np.repeat(self._first[:-1], counts)
        begins = np.repeat(columns.offset, counts) + within * nbytes
        ends = np.minimum(begins + nbytes, np.repeat(columns.offset + columns.nbytes, counts))
        return begins, ends, columns.crcs

    def columns(self) -> SumColumns:
        """The checksums of all items of the file.

        Raises:
            ValueError: they are damaged. The message says how.
        """
        with self._lock:
            if self._columns is None:
                self._columns, self._items = self._checked()
                counts = block_counts(self._columns.nbytes, self.tail.block_nbytes)
                self._first = np.concatenate(([0], np.cumsum(counts)))
            return self._columns

    def _checked(self) -> tuple[SumColumns, UInt32]:
        tail = self.tail
        end = tail.file_nbytes - TAIL_NBYTES
        data = self._read(end - tail.columns_nbytes, tail.columns_nbytes)
        if len(data) != tail.columns_nbytes or crc32(data) != tail.columns_crc32:
            raise ValueError(f"the checksums of its blocks do not have their CRC-32 {tail.columns_crc32:08x}")
        n_items = tail.n_items
        offset = np.frombuffer(data, dtype="<i8", count=n_items).astype(np.int64)
        nbytes = np.frombuffer(data, dtype="<i8", count=n_items, offset=8 * n_items).astype(np.int64)
        crcs = np.frombuffer(data, dtype="<u4", count=tail.n_blocks, offset=16 * n_items).astype(np.uint32)
        items = np.frombuffer(data, dtype="<u4", offset=16 * n_items + 4 * tail.n_blocks).astype(np.uint32)
        limit = end - tail.columns_nbytes
        if n_items:
            in_file = (offset >= 0) & (nbytes >= 0) & (offset <= limit) & (nbytes <= limit - offset)
            ascends = offset[1:] >= offset[:-1] + nbytes[:-1]
            if not in_file.all() or not ascends.all():
                raise ValueError("the checksums of its blocks are for data that cannot lie there")
        if int(block_counts(nbytes, tail.block_nbytes).sum()) != tail.n_blocks:
            raise ValueError("the checksums of its blocks are fewer or more than its data has blocks")
        return SumColumns(offset, nbytes, crcs), items
