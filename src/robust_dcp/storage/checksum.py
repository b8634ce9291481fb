"""CRC-32 (the zip and zlib polynomial), as fast as this machine computes it."""

from __future__ import annotations

from isal import isal_zlib

__all__ = ["crc32"]


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The CRC-32 of ``data``, continued from ``value``. Releases the GIL while it runs."""
    return int(isal_zlib.crc32(data, value))
