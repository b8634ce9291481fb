"""CRC-32s of the blocks of an item's data, so that a slice of it can be verified without the rest.

Owns where blocks end, and what follows from their checksums for larger ranges. Never reads nor writes a file: the
writer makes them on the way out, in pieces that end where its writes do; the reader compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from robust_dcp.storage.records.checksum import crc32, crc32_of_both

__all__ = ["SUM_NBYTES", "BlockSums", "block_counts", "cuts", "joined", "merged", "sums_of"]

SUM_NBYTES: Final = 256 << 10
"""Bytes of one block, counted from the first byte of the data. A slice is read from one end of a block to another: at
the speed of a processor's checksum, larger blocks would save nothing, and read more that nobody wants."""


def block_counts(nbytes: npt.NDArray[np.int64], block_nbytes: int = SUM_NBYTES) -> npt.NDArray[np.int64]:
    """How many blocks data of each of these lengths has: int64, as many as ``nbytes``."""
    return -(-nbytes // block_nbytes)


def cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Bytes ``begin`` to ``end`` of an item's data, cut where blocks end."""
    while begin < end:
        stop = min(end, begin - begin % SUM_NBYTES + SUM_NBYTES)
        yield begin, stop
        begin = stop


def sums_of(data: memoryview, begin: int = 0) -> list[int]:
    """The CRC-32 of each piece of ``data``, as :func:`cuts` has it; it begins at byte ``begin`` of an item's data."""
    return [crc32(data[first - begin : stop - begin]) for first, stop in cuts(begin, begin + len(data))]


def merged(pieces: Iterable[tuple[int, int, Sequence[int]]]) -> list[int]:
    """The CRC-32 of each block, from those of pieces.

    Args:
        pieces: (begin, end, what :func:`sums_of` gives of these bytes), one after the other from byte 0 on.
    """
    found: list[int] = []
    for begin, end, sums in pieces:
        for (first, stop), value in zip(cuts(begin, end), sums, strict=True):
            if first % SUM_NBYTES:
                found[-1] = crc32_of_both(found[-1], value, stop - first)
            else:
                found.append(value)
    return found


def joined(sums: Sequence[int], nbytes: int, block_nbytes: int = SUM_NBYTES) -> int:
    """The CRC-32 of ``nbytes`` bytes from those of their blocks."""
    if not sums:
        return 0
    value = sums[0]
    for number in range(1, len(sums)):
        value = crc32_of_both(value, sums[number], min(block_nbytes, nbytes - number * block_nbytes))
    return value


class BlockSums(NamedTuple):
    """The blocks of one item's data, as a reader knows them.

    Attributes:
        offset: of the first of them, in bytes from the start of the item.
        nbytes: of all of them.
        block_nbytes: of each but the last. An item with one checksum is one block.
        crcs: of each.
    """

    offset: int
    nbytes: int
    block_nbytes: int
    crcs: Sequence[int]

    def around(self, begin: int, end: int) -> tuple[int, int]:
        """The whole blocks that bytes ``begin`` to ``end`` of the item lie in, as bytes of the item."""
        first = (begin - self.offset) // self.block_nbytes * self.block_nbytes
        last = -(-(end - self.offset) // self.block_nbytes) * self.block_nbytes
        return self.offset + first, self.offset + min(last, self.nbytes)

    def expected(self, begin: int, end: int) -> int:
        """The CRC-32 of bytes ``begin`` to ``end`` of the item, which must be the ends of blocks."""
        first = (begin - self.offset) // self.block_nbytes
        last = -(-(end - self.offset) // self.block_nbytes)
        return joined(self.crcs[first:last], end - begin, self.block_nbytes)
