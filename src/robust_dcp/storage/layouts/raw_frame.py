"""The frame of a tensor that has none: its bytes stand in the file as they are, and its checksum at the file's head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch

__all__ = ["RawFrame", "raw_frame"]


@dataclass(frozen=True)
class RawFrame:
    """:class:`~robust_dcp.storage.layouts.protocol.Frame` of no bytes.

    Attributes:
        dtype, shape: of the tensor.
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
        """The data is all there is."""
        return self.payload_nbytes

    def header(self, crc32: int) -> bytes:
        return b""

    def trailer(self, crc32: int) -> bytes:
        return b""


@lru_cache(maxsize=4096)
def raw_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> RawFrame:
    """The frame for tensors of ``dtype`` and ``shape``."""
    return RawFrame(dtype, tuple(shape), prod(shape) * dtype.itemsize)
