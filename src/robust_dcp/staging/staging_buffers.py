"""Memory for copies of tensors that a save writes while training goes on. It is kept between saves, and pinned for a
GPU.

This module owns the memory and the tensors in it. A repeated save finds the tensors of the save before, so it only has
to copy. New memory is taken on the NUMA node of the device, or processor, that copies. If another process writes the
copies, the memory belongs to a file without a name, which goes away with the last process that has it open.
``staged_source`` calls this module.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Final

import torch

from robust_dcp.staging.blocks import Block
from robust_dcp.staging.numa import cpus_near, pci_address, run_near

__all__ = ["SHARED_STAGING", "STAGING", "StagingBuffer", "StagingBuffers", "TensorForm"]

TensorForm = tuple[torch.dtype, torch.Size]
"""Dtype and size of a tensor. Its place in a buffer depends on nothing else."""

_ALIGNMENT: Final = 64
"""In bytes: a cache line, which is more than any dtype needs."""

_PAGE_NBYTES: Final = 4096
_LARGE_NBYTES: Final = 1 << 20
"""Tensors of this size or more lie at 64 modulo the page size. torch's own allocator puts them there, and so do the
layouts in files, so direct I/O can write them without a copy.
"""

_ROUNDED_TO: Final = 2 << 20
"""In bytes: a huge page. A state dict that grows a little still fits into its buffer."""

_TOUCHED_NBYTES: Final = 32 << 20
"""One thread touches so much at a time, which takes some milliseconds."""


class StagingBuffer:
    """One piece of memory, and tensors in it.

    Args:
        nbytes: the size of the memory.
        fd: use the memory of this file; ``None`` for memory of this process alone. The caller keeps the file open as
            long as other processes need to map it.
        cpus: see the attribute.

    Raises:
        OSError: the host has no such memory.

    Attributes:
        is_pinned: whether copies from a CUDA device into it run by themselves.
        fd: see the argument.
        cpus: the processors near this memory, if they are known.
    """

    def __init__(self, nbytes: int, *, fd: int | None = None, cpus: frozenset[int] = frozenset()) -> None:
        self._block = Block(nbytes, stays_at_fork=True, fd=fd)
        self.fd = fd
        self.cpus = cpus
        self._forms: Sequence[TensorForm] = ()
        self._tensors: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return len(self._block.data)

    @property
    def is_pinned(self) -> bool:
        return self._block.is_pinned

    def pin(self) -> None:
        """Lock the memory, so that copies from a CUDA device run by themselves. Without it they work as well."""
        self._block.pin()

    def touch(self) -> None:
        """Make the kernel give us all pages now, near :attr:`cpus`. The contents of the memory are lost."""
        data = self._block.data

        def touch_pages(begin: int, end: int) -> None:
            data[begin:end:_PAGE_NBYTES] = 0

        run_near(self.cpus, touch_pages, len(data), _TOUCHED_NBYTES)

    def tensors(self, forms: Sequence[TensorForm]) -> list[torch.Tensor]:
        """One contiguous CPU tensor for each form, in this memory. They hold whatever was there last."""
        if forms != self._forms:
            ends = _ends(forms)
            memory = self._block.tensor
            self._tensors = [
                memory[end - _nbytes_of(form) : end].view(form[0]).view(form[1])
                for form, end in zip(forms, ends, strict=True)
            ]
            self._forms = list(forms)
        return self._tensors

    def release(self) -> None:
        """Call this before the memory is freed."""
        self._block.unpin()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class StagingBuffers:
    """The buffers of a process that no save uses at the moment.

    Args:
        are_shared: whether other processes can map the buffers, by their ``fd``.
    """

    def __init__(self, *, are_shared: bool = False) -> None:
        self._are_shared = are_shared
        self._free: list[StagingBuffer] = []
        self._lock = threading.Lock()

    @property
    def kept_nbytes(self) -> int:
        """Memory that is held while no save runs."""
        return sum(buffer.nbytes for buffer in self._free)

    def take(self, forms: Sequence[TensorForm], device: torch.device | None = None) -> StagingBuffer:
        """Take a buffer that has room for tensors of these forms.

        Args:
            device: the device that will copy into it. If it is a CUDA device, new memory is taken near it.

        Raises:
            OSError: the host does not have enough memory.
        """
        ends = _ends(forms)
        nbytes = max(-(-(ends[-1] if ends else 0) // _ROUNDED_TO), 1) * _ROUNDED_TO
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes]
            if fitting:
                # Prefer a buffer that held the same forms: its tensors need not be made again.
                chosen = min(fitting, key=lambda buffer: (buffer._forms != forms, buffer.nbytes))
                self._free.remove(chosen)
                return chosen
            # No free buffer is large enough. Free them before new memory is taken: the host may not have room for both.
            dropped, self._free = self._free, []
        for buffer in dropped:
            buffer.release()
        del dropped
        cpus = cpus_near(None if device is None else pci_address(device))
        if self._are_shared:
            return _shared_buffer(nbytes, cpus)
        buffer = StagingBuffer(nbytes, cpus=cpus)
        buffer.touch()
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Return a buffer, so that the next save may use it."""
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Give all memory that no save uses back to the system."""
        with self._lock:
            dropped, self._free = self._free, []
        for buffer in dropped:
            buffer.release()

    def forget_all(self) -> None:
        """Drop the buffers in a forked process, which does not have their memory."""
        self._lock = threading.Lock()
        self._free = []


STAGING = StagingBuffers()
"""The buffers of this process."""

SHARED_STAGING = StagingBuffers(are_shared=True)
"""The buffers of this process that its writer process maps as well."""

os.register_at_fork(after_in_child=STAGING.forget_all)
os.register_at_fork(after_in_child=SHARED_STAGING.forget_all)


def _shared_buffer(nbytes: int, cpus: frozenset[int]) -> StagingBuffer:
    fd = os.memfd_create("robust_dcp-staging")
    try:
        # Reserve the memory now. If it ran short later, the first access to a page would kill the process (SIGBUS).
        run_near(cpus, lambda begin, end: os.posix_fallocate(fd, begin, end - begin), nbytes, _TOUCHED_NBYTES)
        return StagingBuffer(nbytes, fd=fd, cpus=cpus)
    except BaseException:
        os.close(fd)
        raise


def _nbytes_of(form: TensorForm) -> int:
    dtype, size = form
    return size.numel() * dtype.itemsize


def _ends(forms: Sequence[TensorForm]) -> list[int]:
    """Where the bytes of each tensor end, if they lie one after the other."""
    at, ends = 0, []
    for form in forms:
        nbytes = _nbytes_of(form)
        if nbytes >= _LARGE_NBYTES:
            at = -(-(at - _ALIGNMENT) // _PAGE_NBYTES) * _PAGE_NBYTES + _ALIGNMENT
        at = -(-at // _ALIGNMENT) * _ALIGNMENT + nbytes
        ends.append(at)
    return ends
