"""The digest of a replica: 64 bits that ranks compare to find out whether they hold the same data.

This module chooses which bytes of a tensor to hash. The save planner calls it for the items that a save compares.
"""

from __future__ import annotations

import io

import torch

from robust_dcp.plan.global_plan import object_digest
from robust_dcp.staging import on_cpu
from robust_dcp.storage.records.checksum import crc32

__all__ = ["replica_digest"]

_PIECE_NBYTES = 16 << 20
"""How many bytes of a device tensor are copied to the host at a time."""


def replica_digest(data: torch.Tensor | io.BytesIO, identity: int, limit: int | None) -> int:
    """A digest of an item's contents. It does not depend on where and how the tensor lies in memory.

    Args:
        data: the data of the item.
        identity: a number of the chunk that is the same on all ranks. It chooses which part of a large tensor to hash.
        limit: how many bytes of a tensor to hash at most; ``None`` for all.

    Returns:
        64 bits. 0 means that the bytes of this kind of tensor cannot be read; no digest is 0.
    """
    if isinstance(data, io.BytesIO):
        return object_digest(data)
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.layout is not torch.strided or data.is_meta:
        return 0
    if data.is_quantized or data.is_nested or data.is_conj() or data.is_neg():
        return 0
    flat = data.detach().reshape(-1)
    itemsize = flat.element_size()
    count = flat.numel() if limit is None else min(flat.numel(), max(1, limit // itemsize))
    begin = identity % (flat.numel() - count + 1)
    checksum = 0
    step = max(1, _PIECE_NBYTES // itemsize)
    for at in range(begin, begin + count, step):
        piece = on_cpu(flat[at : min(at + step, begin + count)]).contiguous()
        checksum = crc32(piece.view(torch.uint8).numpy().data, checksum)
    return 1 << 32 | checksum
