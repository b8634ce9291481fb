"""Memory for the copies of tensors that a save writes while training goes on: kept between saves, pinned for a GPU.

Owns the memory, and the tensors that lie in it: a repeated save finds them where those of the save before were, so it
costs one pass of copies. New memory is taken from the NUMA node of the device, or processor, that copies. Where
another process writes the copies, the memory is that of a file which has no name: it goes with the last process that
has it open, however that ends. Called by ``background.staged_source``.
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
"""The dtype and the size of a tensor: all that its place in a buffer depends on."""

_ALIGNMENT: Final = 64
"""Bytes: a cache line, and more than any dtype asks for."""

_PAGE_NBYTES: Final = 4096
_LARGE_NBYTES: Final = 1 << 20
"""From this size on tensors lie at 64 modulo a page, where torch's own allocator puts them, and the layouts in files:
direct I/O then takes them from where they are."""

_ROUNDED_TO: Final = 2 << 20
"""Bytes: a huge page. A state dict that grows a little still fits into the buffer that it had."""

_TOUCHED_NBYTES: Final = 32 << 20
"""Touched by one thread at a time. It takes some milliseconds."""


class StagingBuffer:
    """One piece of memory, and tensors in it.

    Args:
        nbytes: of the memory.
        fd: of the file whose memory it is; ``None`` for memory of this process alone. The caller keeps it open as long
            as other processes are to map it.
        cpus: as the attribute.

    Raises:
        OSError: the host has no such memory.

    Attributes:
        is_pinned: whether a CUDA device copies into it by itself.
        fd: as given.
        cpus: processors that are near this memory, if that is known.
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
        """Lock the memory, so that copies from a CUDA device go on by themselves; without it they work as well."""
        self._block.pin()

    def touch(self) -> None:
        """Take all pages now, near :attr:`cpus`. What the memory holds is lost."""
        data = self._block.data

        def touch_pages(begin: int, end: int) -> None:
            data[begin:end:_PAGE_NBYTES] = 0

        run_near(self.cpus, touch_pages, len(data), _TOUCHED_NBYTES)

    def tensors(self, forms: Sequence[TensorForm]) -> list[torch.Tensor]:
        """One contiguous CPU tensor for each form, in this memory; what they hold is whatever was there last."""
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
        """To be called before the memory goes."""
        self._block.unpin()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class StagingBuffers:
    """The buffers of a process that no save uses at the moment.

    Args:
        are_shared: whether other processes can map them, by their ``fd``.
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
        """A buffer in which tensors of these forms have room.

        Args:
            device: that will copy into it, if that is a CUDA device. New memory is taken near it.

        Raises:
            OSError: the host has no such memory.
        """
        ends = _ends(forms)
        nbytes = max(-(-(ends[-1] if ends else 0) // _ROUNDED_TO), 1) * _ROUNDED_TO
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes]
            if fitting:
                # Of those with room the one that held the same: its tensors need not be made again.
                chosen = min(fitting, key=lambda buffer: (buffer._forms != forms, buffer.nbytes))
                self._free.remove(chosen)
                return chosen
            # What is free does not fit. It goes before new memory is taken: the host may not have room for both.
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
        """The next save may use it."""
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Give all memory that no save uses back to the system."""
        with self._lock:
            dropped, self._free = self._free, []
        for buffer in dropped:
            buffer.release()


STAGING = StagingBuffers()
"""The buffers of this process."""

SHARED_STAGING = StagingBuffers(are_shared=True)
"""Those that its writer process maps as well."""


def _shared_buffer(nbytes: int, cpus: frozenset[int]) -> StagingBuffer:
    fd = os.memfd_create("robust_dcp-staging")
    try:
        # Taken now: where memory is short later, the first access to a page would end the process (SIGBUS).
        run_near(cpus, lambda begin, end: os.posix_fallocate(fd, begin, end - begin), nbytes, _TOUCHED_NBYTES)
        return StagingBuffer(nbytes, fd=fd, cpus=cpus)
    except BaseException:
        os.close(fd)
        raise


def _nbytes_of(form: TensorForm) -> int:
    dtype, size = form
    return size.numel() * dtype.itemsize


def _ends(forms: Sequence[TensorForm]) -> list[int]:
    """Where the bytes of each tensor end, one behind the other."""
    at, ends = 0, []
    for form in forms:
        nbytes = _nbytes_of(form)
        if nbytes >= _LARGE_NBYTES:
            at = -(-(at - _ALIGNMENT) // _PAGE_NBYTES) * _PAGE_NBYTES + _ALIGNMENT
        at = -(-at // _ALIGNMENT) * _ALIGNMENT + nbytes
        ends.append(at)
    return ends
