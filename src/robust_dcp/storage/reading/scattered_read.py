"""One read of a file whose bytes are wanted in several places: straight there where the file system allows it.

Owns which bytes go straight and which by way of a block, the copies out of the block, and the checksums on the way.
Never reads: ``data_file`` does, and calls this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from robust_dcp.staging import Block, copy_bytes
from robust_dcp.storage.files.alignment import Alignment
from robust_dcp.storage.records.checksum import crc32

__all__ = ["ScatteredRead", "Wanted"]

LEAST_STRAIGHT_NBYTES: Final = 16 << 10
"""Less is copied out of the block sooner than one more buffer is passed to the kernel."""

_AT_ONCE_NBYTES: Final = 256 << 10
"""Copied at once, so that the checksum finds its data in the processor's cache."""


class Wanted(NamedTuple):
    """Bytes of a file, from ``offset`` on, that are wanted in ``view``, which lies at ``address`` in memory."""

    offset: int
    view: memoryview
    address: int

    @property
    def end(self) -> int:
        return self.offset + self.view.nbytes


class ScatteredRead:
    """How bytes ``offset`` to ``end`` of a file are read.

    Args:
        block: for what does not go straight to where it is wanted. Each such byte has its place there: the bytes of a
            file that follow each other do so in the block as well, and what goes straight leaves a gap.
        wanted: ascending, and no two of the same byte; all of them from ``offset`` to ``end``.
        alignment: of the file; what goes straight begins and ends at multiples of it.

    Attributes:
        first: the read begins with this byte of the file: ``offset``, or where the aligned unit that has it begins.
        buffers: what to read into, one after the other.
        at: where the byte at ``offset`` has its place in the block.
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
        """Copy what was wanted by ``wanted[number]``, and lies in the block, to where it is wanted.

        Args:
            end: of what was read.
            checksum: compute the CRC-32 of the bytes that were wanted, as far as they were read.

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
    """Which bytes of the file can go straight to where they are wanted: from one to another, in whole units."""
    begin, end = -(-wanted.offset // unit) * unit, wanted.end - wanted.end % unit
    if end - begin < LEAST_STRAIGHT_NBYTES or (wanted.address + begin - wanted.offset) % memory:
        return wanted.offset, wanted.offset
    return begin, end
