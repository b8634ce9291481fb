"""Digests of values, by which ranks find out whether they hold the same under one name."""

from __future__ import annotations

import hashlib
import io

import torch

from robust_dcp.staging import on_cpu
from robust_dcp.storage.records.checksum import crc32

__all__ = ["digest_of"]

_PIECE_NBYTES = 16 << 20
"""How many bytes of a device tensor are copied to the host at a time."""


def digest_of(data: torch.Tensor | io.BytesIO) -> int:
    """A digest of what would be written for a value. It does not depend on where and how the value lies in memory.

    Equal objects may have different bytes in rare cases (the order of a set of strings). So a difference is a reason
    for a warning, and no proof.

    Returns:
        64 bits. 0 means that the bytes of this kind of tensor cannot be read; no digest is 0.
    """
    if isinstance(data, io.BytesIO):
        return int.from_bytes(hashlib.blake2b(data.getbuffer(), digest_size=8).digest(), "little") or 1
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.layout is not torch.strided or data.is_meta:
        return 0
    if data.is_quantized or data.is_nested or data.is_conj() or data.is_neg():
        return 0
    flat = data.detach().reshape(-1)
    checksum = 0
    for piece in flat.split(max(1, _PIECE_NBYTES // flat.element_size())):
        checksum = crc32(on_cpu(piece).contiguous().view(torch.uint8).numpy().data, checksum)
    return 1 << 32 | checksum
