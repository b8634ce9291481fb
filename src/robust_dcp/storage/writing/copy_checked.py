"""Copies a tensor's bytes and computes the CRC-32s of their blocks, in one pass over memory.

Each part is checksummed right after its copy, while the processor's cache still holds it. So memory is read only once.
``pack`` and ``large_record`` call this.
"""

from __future__ import annotations

from robust_dcp.staging import Block, TensorBytes
from robust_dcp.storage.records.block_sums import cuts, sums_of
from robust_dcp.storage.records.checksum import crc32

__all__ = ["copy_checked"]


def copy_checked(data: TensorBytes, begin: int, end: int, block: Block, at: int, *, checksums: bool) -> list[int]:
    """Copy bytes ``begin`` to ``end`` of ``data`` to ``at`` in ``block``.

    Returns:
        Their CRC-32s, as :func:`~robust_dcp.storage.records.block_sums.sums_of` computes them; none without
        ``checksums``.
    """
    if not checksums or data.device.type != "cpu":  # each copy from a device waits for the device, so copy at once
        data.copy(begin, end, block, at)
        return sums_of(block.view[at : at + end - begin], begin) if checksums else []
    sums = []
    for first, last in cuts(begin, end):
        to = at + first - begin
        data.copy(first, last, block, to)
        sums.append(crc32(block.view[to : to + last - first]))
    return sums
