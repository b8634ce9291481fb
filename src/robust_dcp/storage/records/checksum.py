"""CRC-32 (the polynomial of zip and zlib), as fast as this machine can compute it."""

from __future__ import annotations

from collections.abc import Iterable

from isal import isal_zlib

__all__ = ["crc32", "crc32_of_both", "crc32_of_each"]


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The CRC-32 of ``data``, continued from ``value``. Releases the GIL while it runs."""
    return int(isal_zlib.crc32(data, value))


def crc32_of_both(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two pieces of data in a row, computed from the CRC-32 of each and the length of the second."""
    return int(isal_zlib.crc32_combine(first, second, second_nbytes))


def crc32_of_each(view: memoryview, starts: Iterable[int], nbytes: int) -> list[int]:
    """The CRC-32s of pieces of ``view``. Each piece has ``nbytes`` bytes."""
    return list(map(isal_zlib.crc32, [view[start : start + nbytes] for start in starts]))
