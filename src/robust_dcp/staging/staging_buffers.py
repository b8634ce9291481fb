"""Memory for copies of tensors that a save writes while training goes on. It is kept between saves, and pinned for a
GPU.

A repeated save finds the tensors of the save before, so it only has to copy. If another process writes the copies, the
memory belongs to a file without a name, which goes away with the last process that has it open.

Linux places a page of memory when it is first touched, on the NUMA node of the processor that touches it. So new memory
for copies of a device is touched by threads that run near the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from robust_dcp.staging.blocks import Block
from robust_dcp.threads import submit

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

_THREADS: Final = 4
"""More threads would not be faster, because the memory of a node limits them. And other ranks start beside this one."""

_SYS: Final = Path("/sys")


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
        block: the memory.
        fd: see the argument.
        cpus: the processors near this memory, if they are known.
    """

    def __init__(self, nbytes: int, *, fd: int | None = None, cpus: frozenset[int] = frozenset()) -> None:
        self.block = Block(nbytes, stays_at_fork=True, fd=fd)
        self.fd = fd
        self.cpus = cpus
        self._forms: Sequence[TensorForm] = ()
        self._tensors: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return len(self.block.data)

    def touch(self) -> None:
        """Make the kernel give us all pages now, near :attr:`cpus`. The contents of the memory are lost."""
        data = self.block.data

        def touch_pages(begin: int, end: int) -> None:
            data[begin:end:_PAGE_NBYTES] = 0

        _run_near(self.cpus, touch_pages, len(data))

    @torch.inference_mode(False)  # later saves write into them, too
    def tensors(self, forms: Sequence[TensorForm]) -> list[torch.Tensor]:
        """One contiguous CPU tensor for each form, in this memory. They hold whatever was there last."""
        if forms != self._forms:
            ends = _ends(forms)
            memory = self.block.tensor
            self._tensors = [
                memory[end - _nbytes_of(form) : end].view(form[0]).view(form[1])
                for form, end in zip(forms, ends, strict=True)
            ]
            self._forms = list(forms)
        return self._tensors

    def release(self) -> None:
        """Call this before the memory is freed."""
        self.block.unpin()
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
        self.release()
        cpus = cpus_near(device)
        if self._are_shared:
            return _shared_buffer(nbytes, cpus)
        buffer = StagingBuffer(nbytes, cpus=cpus)
        if device is not None:  # a copy within the host touches the memory itself, and goes over it once
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
        """Drop the buffers in a forked process. It does not have their memory, and must not keep their files open."""
        self._lock = threading.Lock()
        for buffer in self._free:
            if buffer.fd is not None:
                os.close(buffer.fd)
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
        _run_near(cpus, lambda begin, end: os.posix_fallocate(fd, begin, end - begin), nbytes)
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


# NUMA nodes.


def cpus_near(device: torch.device | None, root: Path = _SYS) -> frozenset[int]:
    """The processors on the node of a CUDA device that this process may use.

    Args:
        root: the directory in which the kernel describes its devices.

    Returns:
        All processors of this process if the node is not known, or if this process may use none of its processors.
    """
    own = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    known: Any = None if device is None else torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_bus_id"):
        return own
    address = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    cpus: set[int] = set()
    with suppress(OSError, ValueError):  # a machine with one node may say that the node is -1
        node = int((root / "bus/pci/devices" / address / "numa_node").read_text())
        for part in (root / f"devices/system/node/node{node}/cpulist").read_text().strip().split(","):  # 0-3,8
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return own & cpus or own


def stay_near(cpus: Iterable[int]) -> None:
    """Let the calling thread, and threads that it starts later, run on these processors only."""
    if cpus:
        with suppress(OSError, AttributeError):  # this process has lost some of them meanwhile, or this is not Linux
            os.sched_setaffinity(0, cpus)


def _run_near(cpus: frozenset[int], work: Callable[[int, int], Any], nbytes: int) -> None:
    """Do work on parts of ``nbytes`` bytes with a few threads that run on these processors.

    Args:
        work: called with the begin and the end of each part. It must release the GIL. What it raises is raised.
    """
    begins = range(0, nbytes, _TOUCHED_NBYTES)
    threads = max(min(len(begins), len(cpus), _THREADS), 1)
    with ThreadPoolExecutor(threads, "robust_dcp-touch", stay_near, (cpus,)) as pool:
        for done in [submit(pool, work, begin, min(begin + _TOUCHED_NBYTES, nbytes)) for begin in begins]:
            done.result()
