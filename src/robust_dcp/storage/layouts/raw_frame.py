"""The empty frame: the file holds nothing but the tensor's bytes there, and the head of the file holds their
checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch

__all__ = ["RawFrame", "raw_frame"]


@dataclass(frozen=True)
class RawFrame:
    """A :class:`~robust_dcp.storage.layouts.protocol.Frame` of no bytes.

    Attributes:
        dtype, shape: those of the tensor.
        payload_nbytes: bytes of its data.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    payload_nbytes: int

    header_nbytes: ClassVar[int] = 0
    blank_header: ClassVar[bytes] = b""
    blank_trailer: ClassVar[bytes] = b""
    crc_at: ClassVar[tuple[int, ...]] = ()

    @property
    def nbytes(self) -> int:
        """The length of the data."""
        return self.payload_nbytes

    def header(self, crc32: int) -> bytes:
        return b""

    def trailer(self, crc32: int) -> bytes:
        return b""


@lru_cache(maxsize=4096)
def raw_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> RawFrame:
    """The frame for tensors of ``dtype`` and ``shape``."""
    return RawFrame(dtype, tuple(shape), prod(shape) * dtype.itemsize)
