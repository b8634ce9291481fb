"""CRC-32 (the polynomial of zip and zlib), of data and of its blocks, so that a slice can be verified without the rest.

This module knows where blocks end, and computes the checksums of larger ranges from those of blocks. It never reads or
writes a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from isal import isal_zlib

crc32 = isal_zlib.crc32
"""``crc32(data, value=0)``: the CRC-32 of ``data``, continued from ``value``. It releases the GIL while it runs."""

crc32_of_both = isal_zlib.crc32_combine
"""``crc32_of_both(first, second, second_nbytes)``: the CRC-32 of two pieces of data in a row, computed from the CRC-32
of each and the length of the second.
"""

SUM_NBYTES: Final = 256 << 10
"""Bytes of one block, counted from the first byte of the data.

To verify a slice, all blocks that it touches are read. Larger blocks would not be faster, because the processor's
checksum runs at the same speed, and more bytes that nobody wants would be read.
"""


def cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut bytes ``begin`` to ``end`` of an item's data where blocks end."""
    while begin < end:
        stop = min(end, begin - begin % SUM_NBYTES + SUM_NBYTES)
        yield begin, stop
        begin = stop


def sums_of(data: memoryview, begin: int = 0) -> list[int]:
    """The CRC-32 of each piece of ``data``, cut as :func:`cuts` does. ``data`` begins at byte ``begin`` of an item's
    data.
    """
    return [crc32(data[first - begin : stop - begin]) for first, stop in cuts(begin, begin + len(data))]


def merged(pieces: Iterable[tuple[int, int, Sequence[int]]]) -> list[int]:
    """The CRC-32 of each block, computed from those of pieces.

    Args:
        pieces: (begin, end, the result of :func:`sums_of` for these bytes), one after the other from byte 0 on.
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
    """The CRC-32 of ``nbytes`` bytes, computed from those of their blocks."""
    if not sums:
        return 0
    value = sums[0]
    for number in range(1, len(sums)):
        value = crc32_of_both(value, sums[number], min(block_nbytes, nbytes - number * block_nbytes))
    return value
