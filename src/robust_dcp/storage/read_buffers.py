"""Memory that blocks of data files are read into: page-aligned, as direct I/O wants it, and used again and again.

Owns these buffers and their number in use. Called by ``read_file`` and by what reads through it, from several threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from robust_dcp.staging import block_memory
from robust_dcp.storage.layout import PAGE_NBYTES

__all__ = ["ReadBuffer", "ReadBuffers", "copy_bytes"]


class ReadBuffer:
    """Memory that starts on a page.

    Attributes:
        data: the memory itself; a slice of it is ``bytes``, a copy.
        view: the same memory, for slices without a copy.
        address: of its first byte.
    """

    __slots__ = ("address", "data", "view")

    def __init__(self, nbytes: int) -> None:
        self.data = block_memory(nbytes)
        self.view = memoryview(self.data)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))


class ReadBuffers:
    """Buffers of one size. Those that were given back are lent again; the borrowers bound how many there are.

    Args:
        nbytes: how much of a file fits into one, wherever it begins.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # A direct read takes whole pages: part of one more at either end.
        self._allocated_nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES + 2 * PAGE_NBYTES
        self._free: list[ReadBuffer] = []
        self._lock = threading.Lock()

    def take(self) -> ReadBuffer:
        """A buffer, whose contents are whatever was read into it before."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return ReadBuffer(self._allocated_nbytes)

    def give_back(self, buffer: ReadBuffer) -> None:
        """Let somebody else have ``buffer``."""
        with self._lock:
            self._free.append(buffer)

    @contextlib.contextmanager
    def lent(self) -> Iterator[ReadBuffer]:
        """A buffer for the time of a ``with`` block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy memory from the address ``source`` to the address ``target``, without the GIL."""
    _memmove(target, source, nbytes)


_memmove: Any = ctypes.memmove
