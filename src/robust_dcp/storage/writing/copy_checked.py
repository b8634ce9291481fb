"""A copy of a tensor's bytes and their CRC-32 in one pass over memory.

Owns how much is copied before it is checksummed: what the processor's cache still holds, so that memory is read once.
Called by ``pack`` and ``large_record``.
"""

from __future__ import annotations

from typing import Final

from robust_dcp.staging import Block, TensorBytes
from robust_dcp.storage.records.checksum import crc32

__all__ = ["HOT_NBYTES", "copy_checked"]

HOT_NBYTES: Final = 512 << 10
"""Half of a small second-level cache. Less costs more calls, each of which lets go of the GIL."""


def copy_checked(data: TensorBytes, begin: int, end: int, block: Block, at: int, *, checksums: bool) -> int:
    """Copy bytes ``begin`` to ``end`` of ``data`` into ``block``, from ``at`` on.

    Returns:
        Their CRC-32; 0 without ``checksums``.
    """
    if not checksums:
        data.copy(begin, end, block, at)
        return 0
    # A copy from a device waits for it each time.
    step = HOT_NBYTES if data.device.type == "cpu" else max(end - begin, 1)
    checksum = 0
    for first in range(begin, end, step):
        last = min(first + step, end)
        to = at + first - begin
        data.copy(first, last, block, to)
        checksum = crc32(block.view[to : to + last - first], checksum)
    return checksum
