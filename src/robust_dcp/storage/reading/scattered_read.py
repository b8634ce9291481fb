"""One read of a file that puts its bytes in several places, straight from the file where the file system allows it.

This module decides which bytes go straight to their place and which go through a block. It copies those out of the
block, and computes checksums on the way. It never reads: ``data_file`` reads, and calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from robust_dcp.staging import Block, copy_bytes
from robust_dcp.storage.files.kernel import Alignment
from robust_dcp.storage.records.checksum import crc32

__all__ = ["ScatteredRead", "Wanted"]

LEAST_STRAIGHT_NBYTES: Final = 16 << 10
"""Fewer bytes go through the block: copying them is faster than passing one more buffer to the kernel."""

_AT_ONCE_NBYTES: Final = 256 << 10
"""So much is copied at a time, so that the checksum finds its data in the processor's cache."""


class Wanted(NamedTuple):
    """Bytes of a file, from ``offset`` on, that are wanted in ``view``, which lies at ``address`` in memory."""

    offset: int
    view: memoryview
    address: int

    @property
    def end(self) -> int:
        return self.offset + self.view.nbytes


class ScatteredRead:
    """A plan for reading bytes ``offset`` to ``end`` of a file.

    Args:
        block: takes the bytes that do not go straight to where they are wanted. Each byte of the file has its own place
            in the block, in the order of the file. Bytes that go straight leave a gap there.
        wanted: where bytes should go, in ascending order. No byte is wanted twice, and all lie between ``offset`` and
            ``end``.
        alignment: that of the file. A range that goes straight begins and ends at multiples of it.

    Attributes:
        first: the first byte of the file that is read: ``offset``, rounded down to the alignment.
        buffers: the memory to read into, one buffer after the other.
        at: the place in the block for the byte at ``offset``.
    """

    def __init__(self, block: Block, offset: int, end: int, wanted: Sequence[Wanted], alignment: Alignment) -> None:
        unit = max(alignment.memory, alignment.offset)
        self.first = offset - offset % unit
        self.at = offset - self.first
        self.buffers: list[memoryview] = []
        self._block = block
        self._wanted = wanted
        self._straight = [_straight_part(each, unit, alignment.memory) for each in wanted]
        at = self.first
        for each, (begin, stop) in zip(wanted, self._straight, strict=True):
            if stop > begin:
                if begin > at:
                    self.buffers.append(block.view[at - self.first : begin - self.first])
                self.buffers.append(each.view[begin - each.offset : stop - each.offset])
                at = stop
        last = -(-end // unit) * unit
        if last > at:
            self.buffers.append(block.view[at - self.first : last - self.first])

    def finish(self, number: int, end: int, *, checksum: bool) -> int:
        """Copy those bytes of ``wanted[number]`` that were read into the block to where they are wanted.

        Args:
            end: where in the file the bytes that were read end.
            checksum: whether to compute the CRC-32 of the wanted bytes, as far as they were read.

        Returns:
            The CRC-32, or 0.
        """
        each = self._wanted[number]
        begin, stop = self._straight[number]
        found = self._copied(each, each.offset, min(begin, end), 0, checksum)
        if checksum and min(stop, end) > begin:
            found = crc32(each.view[begin - each.offset : min(stop, end) - each.offset], found)
        return self._copied(each, stop, min(each.end, end), found, checksum)

    def _copied(self, each: Wanted, begin: int, end: int, value: int, checksum: bool) -> int:
        for at in range(begin, end, _AT_ONCE_NBYTES):
            stop = min(at + _AT_ONCE_NBYTES, end)
            copy_bytes(each.address + at - each.offset, self._block.address + at - self.first, stop - at)
            if checksum:
                value = crc32(each.view[at - each.offset : stop - each.offset], value)
        return value


def _straight_part(wanted: Wanted, unit: int, memory: int) -> tuple[int, int]:
    """The first and last byte of the file that can go straight to where they are wanted, in whole aligned units."""
    begin, end = -(-wanted.offset // unit) * unit, wanted.end - wanted.end % unit
    if end - begin < LEAST_STRAIGHT_NBYTES or (wanted.address + begin - wanted.offset) % memory:
        return wanted.offset, wanted.offset
    return begin, end
