"""A copy of a tensor's bytes and the CRC-32s of their blocks in one pass over memory.

What is copied before it is checksummed is what the processor's cache still holds, so that memory is read once.
Called by ``pack`` and ``large_record``.
"""

from __future__ import annotations

from typing import Final

from robust_dcp.staging import Block, TensorBytes
from robust_dcp.storage.records.block_sums import cuts, sums_of
from robust_dcp.storage.records.checksum import crc32

__all__ = ["HOT_NBYTES", "copy_checked"]

HOT_NBYTES: Final = 512 << 10
"""Half of a small second-level cache. Less costs more calls, each of which lets go of the GIL."""


def copy_checked(data: TensorBytes, begin: int, end: int, block: Block, at: int, *, checksums: bool) -> list[int]:
    """Copy bytes ``begin`` to ``end`` of ``data`` into ``block``, from ``at`` on.

    Returns:
        Their CRC-32s, as of :func:`~robust_dcp.storage.records.block_sums.sums_of`; none without ``checksums``.
    """
    if not checksums or data.device.type != "cpu":  # a copy from a device waits for it each time
        data.copy(begin, end, block, at)
        return sums_of(block.view[at : at + end - begin], begin) if checksums else []
    sums = []
    for first, last in cuts(begin, end):
        to = at + first - begin
        data.copy(first, last, block, to)
        sums.append(crc32(block.view[to : to + last - first]))
    return sums
