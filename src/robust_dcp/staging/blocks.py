"""Blocks of memory that bytes pass through on their way to or from a file. They are aligned, reused, and limited.

This module owns the memory, and knows who uses it. A save leases blocks of one size, and they stay for the next save.
A load releases its blocks.

Only into memory that is locked ("pinned") do copies of a CUDA device run by themselves. A machine may refuse to lock
more. Then nothing is lost but speed, so a refusal must leave no trace: the CUDA runtime keeps the error of a failed
call for its thread, and PyTorch would raise it after the next kernel of this thread, which may be one of the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

copy_bytes: Final = ctypes.memmove
"""``copy_bytes(target, source, nbytes)``: copy memory between two addresses, without the GIL."""


def copy_each(targets: Iterable[int], sources: Iterable[int], nbytes: Iterable[int]) -> None:
    """Copy small pieces of memory between addresses. They are so small that releasing the GIL would take longer."""
    deque(map(_memmove_with_gil, targets, sources, nbytes), maxlen=0)


_memmove_with_gil: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def memory_at(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, without a copy. The caller must keep that memory alive as long as the view is used."""
    view: memoryview = _view_of_memory(address, nbytes, _FOR_WRITING)
    return view


_FOR_WRITING = 0x200  # PyBUF_WRITE
_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object


class Block:
    """One block: the same memory as bytes, as an array and as a tensor.

    Args:
        nbytes: its size.
        stays_at_fork: a forked process does not get this memory. This is for memory that devices write to. If such a
            page is shared with a forked process, older kernels copy it, and the device writes to the old page.
        fd: use the memory of this file, which is shared with every process that maps the file. ``None``: private
            memory.

    Raises:
        OSError: the system cannot give this memory.

    Attributes:
        memory: the memory itself, page-aligned, with whatever was last in it. A slice of it is ``bytes``, a copy.
        view: the same memory, for slices without a copy.
        data: the same memory as a NumPy array, uint8 ``[nbytes]``.
        tensor: the same memory as a tensor.
        address: the address of its first byte.
        is_pinned: whether copies from and to a CUDA device run by themselves.
        pin_was_refused: whether the system did not lock it when asked.
    """

    __slots__ = ("address", "data", "is_pinned", "memory", "pin_was_refused", "tensor", "view")

    def __init__(self, nbytes: int, *, stays_at_fork: bool = False, fd: int | None = None) -> None:
        if fd is None:
            # Private, so that a forked process has its own blocks and does not write into ours. mmap's default is
            # shared memory, which gets huge pages only if the whole machine is set to that.
            self.memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self.memory = mmap.mmap(fd, nbytes)
        # Huge pages are faster: each page costs a fault when it is first touched, and has to be pinned for each direct
        # read or write.
        for advice in ("MADV_HUGEPAGE", *(("MADV_DONTFORK",) if stays_at_fork else ())):
            with contextlib.suppress(OSError, AttributeError):  # this kernel, or this Python, does not support it
                self.memory.madvise(getattr(mmap, advice))
        self.view = memoryview(self.memory)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self.memory, dtype=np.uint8)[:nbytes]
        with torch.inference_mode(False):  # later saves write into it, too
            self.tensor = torch.from_numpy(self.data)
        self.address = self.tensor.data_ptr()
        self.is_pinned = False
        self.pin_was_refused = False

    def pin(self) -> None:
        """Lock it in memory, so that copies from a CUDA device run by themselves. A block that cannot be pinned works
        as well, and is not tried again before :meth:`unpin`.
        """
        if not self.is_pinned and not self.pin_was_refused:
            # 0 means that it worked.
            self.pin_was_refused = int(torch.cuda.cudart().cudaHostRegister(self.address, len(self.data), 0)) != 0
            self.is_pinned = not self.pin_was_refused
            if self.pin_was_refused:
                _forget_error()

    def unpin(self) -> None:
        """Undo :meth:`pin`. Call this before the memory is freed."""
        if self.is_pinned and int(torch.cuda.cudart().cudaHostUnregister(self.address)) != 0:
            _forget_error()
        self.is_pinned = self.pin_was_refused = False


_KEPT: list[Block] = []
"""Blocks of the last save that has ended, all of one size. The next save will not need those that it has not used."""

_KEPT_LOCK: Final = threading.Lock()


class BlockLease(msgspec.Struct, eq=False):
    """The blocks of one save or load, until it is closed. Several threads may call its methods.

    Args:
        block_nbytes: the size of each block.
        n_blocks: how many blocks may be taken at a time.
        of_load: whether it is of a load. Its memory goes back to the system at the end, and a forked process does not
            get it (:class:`Block`). Blocks of a save stay for the next one.
    """

    block_nbytes: int
    n_blocks: int
    of_load: bool = False
    _n_taken: int = 0
    _free: list[Block] = []
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    @property
    def used_nbytes(self) -> int:
        """The most memory that it had at any time."""
        return self._n_taken * self.block_nbytes

    def take(self) -> Block:
        """Take a block.

        Raises:
            RuntimeError: all blocks are taken. A thread must not wait for a block, because others may wait for that
                thread.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._n_taken == self.n_blocks:
                raise RuntimeError(f"all {self.n_blocks} blocks of {self.block_nbytes} bytes are taken")
            self._n_taken += 1
        with _KEPT_LOCK:
            if not self.of_load and _KEPT and len(_KEPT[-1].data) == self.block_nbytes:
                return _KEPT.pop()
        return Block(self.block_nbytes, stays_at_fork=self.of_load)

    def give_back(self, block: Block) -> None:
        """Return a block, so that another thread may take it."""
        with self._lock:
            self._free.append(block)

    @contextlib.contextmanager
    def lent(self) -> Iterator[Block]:
        """Take a block for the duration of a ``with`` statement."""
        block = self.take()
        try:
            yield block
        finally:
            self.give_back(block)

    def close(self) -> None:
        """Keep the blocks that nobody has for the next save, or free them."""
        if self.of_load:
            for block in self._free:
                block.unpin()
        else:
            release_blocks(keep=self._free)
        self._free = []


def release_blocks(keep: Sequence[Block] = ()) -> None:
    """Give the memory that is kept for the next save back to the system.

    Args:
        keep: what the next save may have instead.
    """
    with _KEPT_LOCK:
        dropped, _KEPT[:] = _KEPT[:], keep
    for block in dropped:
        block.unpin()


NOT_PINNED: Final = "copied slowly: the system does not lock memory for the device"
"""What a report says of a save whose memory could not be locked."""


def _forget_error() -> None:
    """Let the runtime forget the error that it keeps for the calling thread."""
    # PyTorch loads the runtime's library so that its functions are found among those of the process.
    process = ctypes.CDLL(None)
    for name in ("cudaGetLastError", "hipGetLastError"):
        if hasattr(process, name):
            getattr(process, name)()
            return
    with contextlib.suppress(Exception):  # PyTorch takes the error, and raises it, after this kernel
        torch.zeros(1, device="cuda")
