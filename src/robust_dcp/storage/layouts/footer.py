"""The footer of a file of records: the mark of its save, which items lie in it, and the checksums of their blocks.

This module owns the format (docs/formats.md) and the checks of it. DCP's readers never see the footer: they read only
what ``.metadata`` names, and that comes before it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32, joined

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
    return crc32(name.encode(errors="surrogatepass"), _seed_of(tuple(offsets)))


@lru_cache(maxsize=4096)
def _seed_of(offsets: tuple[int, ...]) -> int:
    """The part of :func:`item_id` that the items of many names share."""
    return crc32(struct.pack(f"<{len(offsets)}q", *offsets))


class SumColumns(msgspec.Struct, frozen=True, eq=False):
    """The blocks of n items' data in one file, in the order of the file.

    Attributes:
        offset: int64 ``[n]``, where each item's data begins, in bytes from the start of the file.
        nbytes: int64 ``[n]``, the length of each item's data.
        crcs: uint32 ``[m]``, the CRC-32s of the blocks of all items, one item after the other.
    """

    offset: Int64
    nbytes: Int64
    crcs: UInt32


def sorted_sums(parts: Sequence[tuple[Int64, Int64, UInt32]]) -> SumColumns:
    """The checksums of one file, of which each part has those of some items, as the columns of :class:`SumColumns`."""
    if not parts:
        none: Int64 = np.empty(0, dtype=np.int64)
        return SumColumns(none, none, np.empty(0, dtype=np.uint32))
    offset, nbytes, crcs = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((nbytes, offset))
    counts = -(-nbytes // SUM_NBYTES)
    first = np.cumsum(counts) - counts
    # For each block of the sorted items, its place before the sort.
    moved = np.repeat(first[order] - (np.cumsum(counts[order]) - counts[order]), counts[order])
    return SumColumns(offset[order], nbytes[order], crcs[np.arange(len(crcs)) + moved])


def footer_of(mark: str, at: int, columns: SumColumns, items: Sequence[int]) -> bytes:
    """The footer of a file with items that end at byte ``at``.

    Args:
        items: the :func:`item_id` of each item, in the order of the file.
    """
    n_items, n_blocks = len(columns.offset), len(columns.crcs)
    if len(items) != n_items:
        raise ValueError(f"a file of {len(items)} items has checksums of {n_items}")
    encoded = columns.offset.astype("<i8").tobytes() + columns.nbytes.astype("<i8").tobytes()
    encoded += columns.crcs.astype("<u4").tobytes() + np.array(items, dtype="<u4").tobytes()
    numbers = (at + len(encoded) + TAIL_NBYTES, n_items, n_blocks, SUM_NBYTES, crc32(encoded))
    tail = _TAIL.pack(_MAGIC, mark.encode("ascii"), *numbers)
    return encoded + tail + crc32(tail).to_bytes(4, "little")


def footer_in(disk: Disk, file: OpenFile) -> Footer | None:
    """The footer of an open file; ``None`` if the file does not end as one of ours."""
    end = file.nbytes - TAIL_NBYTES
    tail = bytearray(TAIL_NBYTES)
    if end < 0 or disk.pread_into(file, tail, end) != TAIL_NBYTES:
        return None
    if crc32(tail[:-4]) != int.from_bytes(tail[-4:], "little"):
        return None
    magic, mark, nbytes, n_items, n_blocks, block_nbytes, columns_crc32 = _TAIL.unpack(tail[:-4])
    columns_nbytes = 20 * n_items + 4 * n_blocks
    if magic != _MAGIC or nbytes != file.nbytes or columns_nbytes > end or block_nbytes <= 0:
        return None
    data = bytearray(columns_nbytes)
    is_whole = disk.pread_into(file, data, end - columns_nbytes) == columns_nbytes and crc32(data) == columns_crc32
    damage = "" if is_whole else f"the checksums of its blocks do not have their CRC-32 {columns_crc32:08x}"
    return Footer(mark.decode("ascii", "replace"), n_items, n_blocks, block_nbytes, end - columns_nbytes, data, damage)


class BlockSums(NamedTuple):
    """The blocks of one item's data, as a reader knows them.

    Attributes:
        offset: where the first block begins, in bytes from the start of the item.
        nbytes: length of all blocks together.
        block_nbytes: length of each block but the last. An item with one checksum is one block.
        crcs: the CRC-32 of each block.
    """

    offset: int
    nbytes: int
    block_nbytes: int
    crcs: Sequence[int]

    def around(self, begin: int, end: int) -> tuple[int, int]:
        """The range of the item that consists of all blocks that bytes ``begin`` to ``end`` touch."""
        if len(self.crcs) == 1:
            return self.offset, self.offset + self.nbytes
        first = (begin - self.offset) // self.block_nbytes * self.block_nbytes
        last = -(-(end - self.offset) // self.block_nbytes) * self.block_nbytes
        return self.offset + first, self.offset + min(last, self.nbytes)

    def expected(self, begin: int, end: int) -> int:
        """The CRC-32 of bytes ``begin`` to ``end`` of the item. Both must be ends of blocks."""
        if len(self.crcs) == 1:
            return self.crcs[0]
        first = (begin - self.offset) // self.block_nbytes
        last = -(-(end - self.offset) // self.block_nbytes)
        return joined(self.crcs[first:last], end - begin, self.block_nbytes)


class _Columns(NamedTuple):
    """The items of a file, in its order, as its footer has them.

    Attributes:
        offset, nbytes, crcs: as in :class:`SumColumns`.
        items: uint32 ``[n]``, the :func:`item_id` of each item.
        first: int64 ``[n + 1]``, where the blocks of each item begin among all, and their end.
    """

    offset: Int64
    nbytes: Int64
    crcs: UInt32
    items: UInt32
    first: Int64


class Footer(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The footer of a file that is being read. Several threads may use it.

    Attributes:
        mark: the mark of the save.
        n_items, n_blocks: lengths of the columns.
        block_nbytes: bytes of a block.
    """

    mark: str
    n_items: int
    n_blocks: int
    block_nbytes: int
    _columns_at: int
    _data: bytearray
    _damage: str

    def items_at(self, begin: Int64, end: Int64) -> Int64:
        """The :func:`item_id` of the items in some records; -1 where no item lies.

        Args:
            begin, end: int64 ``[n]``, where the records begin and end in the file.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns = self.columns
        if not self.n_items:
            return np.full(len(begin), -1, dtype=np.int64)
        rows = self._rows_at(begin)
        is_there = (begin <= columns.offset[rows]) & (columns.offset[rows] < end)
        return np.where(is_there, columns.items[rows].astype(np.int64), np.int64(-1))

    def _rows_at(self, begin: Int64) -> Int64:
        """The row of the first item whose data begins at each place or behind it; the last row if there is none."""
        rows = np.searchsorted(self.columns.offset, begin)
        return np.minimum(rows, max(self.n_items - 1, 0))

    def find(self, begin: int, end: int, item_offset: int) -> BlockSums | None:
        """The blocks of data that hold bytes ``begin`` to ``end`` of the file; ``None`` if there are none.

        Args:
            item_offset: where the item begins in the file. Offsets in the result are counted from there.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns = self.columns
        row = int(np.searchsorted(columns.offset, begin, side="right")) - 1
        if row < 0:
            return None
        offset, nbytes = int(columns.offset[row]), int(columns.nbytes[row])
        if end > offset + nbytes or offset < item_offset:
            return None
        first, last = columns.first[row : row + 2].tolist()
        return BlockSums(offset - item_offset, nbytes, self.block_nbytes, columns.crcs[first:last].tolist())

    def data_at(self, begin: Int64) -> tuple[Int64, Int64]:
        """Where the data of the items in some records begins in the file, and its length. The arguments and errors are
        those of :meth:`crc32s_at`."""
        rows = self._rows_at(begin)
        return self.columns.offset[rows], self.columns.nbytes[rows]

    def crc32s_at(self, begin: Int64) -> Int64:
        """The CRC-32 of the data of the items in some records, for each of which :meth:`items_at` has found an item.

        Args:
            begin: int64 ``[n]``, where the records begin in the file.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns, rows = self.columns, self._rows_at(begin)
        first, last = columns.first[rows], columns.first[rows + 1]
        if (last - first <= 1).all() and len(columns.crcs):
            crcs = columns.crcs[np.minimum(first, len(columns.crcs) - 1)]
            return np.where(last > first, crcs, 0).astype(np.int64)
        of_each = zip(first.tolist(), last.tolist(), columns.nbytes[rows].tolist(), strict=True)
        sums = [joined(columns.crcs[low:high].tolist(), nbytes, self.block_nbytes) for low, high, nbytes in of_each]
        return np.array(sums, dtype=np.int64)

    def blocks(self) -> tuple[Int64, Int64, UInt32]:
        """Where each block of data begins and ends in the file, and its CRC-32.

        Raises:
            ValueError: the columns are damaged. The message says how.
        """
        columns, nbytes = self.columns, self.block_nbytes
        counts = -(-columns.nbytes // nbytes)
        within = np.arange(len(columns.crcs)) - np.repeat(columns.first[:-1], counts)
        begins = np.repeat(columns.offset, counts) + within * nbytes
        ends = np.minimum(begins + nbytes, np.repeat(columns.offset + columns.nbytes, counts))
        return begins, ends, columns.crcs

    @cached_property
    def columns(self) -> _Columns:
        """All items of the file.

        Raises:
            ValueError: they are damaged. The message says how.
        """
        if self._damage:
            raise ValueError(self._damage)
        n_items, limit = self.n_items, self._columns_at
        offset = np.frombuffer(self._data, dtype="<i8", count=n_items).astype(np.int64)
        nbytes = np.frombuffer(self._data, dtype="<i8", count=n_items, offset=8 * n_items).astype(np.int64)
        crcs = np.frombuffer(self._data, dtype="<u4", count=self.n_blocks, offset=16 * n_items).astype(np.uint32)
        in_file = (offset >= 0) & (nbytes >= 0) & (offset <= limit) & (nbytes <= limit - offset)
        ascends = offset[1:] >= offset[:-1] + nbytes[:-1]
        if not in_file.all() or not ascends.all():
            raise ValueError("the checksums of its blocks are for data that cannot lie there")
        first = np.concatenate(([0], np.cumsum(-(-nbytes // self.block_nbytes))))
        if int(first[-1]) != self.n_blocks:
            raise ValueError("the checksums of its blocks are fewer or more than its data has blocks")
        items = np.frombuffer(self._data, dtype="<u4", offset=16 * n_items + 4 * self.n_blocks)
        return _Columns(offset, nbytes, crcs, items, first)
