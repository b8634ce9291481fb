"""The bytes of tensors, on any device and with any strides, and the blocks of memory that they pass through on the way
to or from a file. Blocks are aligned, reused, and limited.

This module owns the blocks, and knows who uses them. A save leases blocks of one size, and they stay for the next save.
A load releases its blocks.

Only into memory that is locked ("pinned") do copies of a CUDA device run by themselves. A machine may refuse to lock
more. Then nothing is lost but speed, so a refusal must leave no trace: the CUDA runtime keeps the error of a failed
call for its thread, and PyTorch would raise it after the next kernel of this thread, which may be one of the training.

``Tensor.cpu()`` and ``Stream.synchronize()`` wait for a whole stream, and PyTorch counts them as synchronizing calls,
which a training loop may have forbidden (``torch.cuda.set_sync_debug_mode``). So everything in this package waits for
events. They are blocking ones: a thread that waits for another kind keeps a core busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        pinned_by: the CUDA device that has locked it, so that copies from and to any device run by themselves.
        pin_was_refused: whether the system did not lock it when asked.
    """

    __slots__ = ("address", "data", "memory", "pin_was_refused", "pinned_by", "tensor", "view")

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
        self.pinned_by: torch.device | None = None
        self.pin_was_refused = False

    def pin(self, device: torch.device) -> None:
        """Lock it in memory, so that copies from a CUDA device run by themselves. A block that cannot be pinned works
        as well, and is not tried again before :meth:`unpin`.

        Args:
            device: the device that is to copy. The call is made in its context, and makes none on another device.
        """
        if self.pinned_by is None and not self.pin_was_refused:
            with torch.cuda.device(device):
                # 0 means that it worked.
                self.pin_was_refused = int(torch.cuda.cudart().cudaHostRegister(self.address, len(self.data), 0)) != 0
                if self.pin_was_refused:
                    _forget_error()
                else:
                    self.pinned_by = device

    def unpin(self) -> None:
        """Undo :meth:`pin`. Call this before the memory is freed."""
        if self.pinned_by is not None:
            with torch.cuda.device(self.pinned_by):
                if int(torch.cuda.cudart().cudaHostUnregister(self.address)) != 0:
                    _forget_error()
        self.pinned_by, self.pin_was_refused = None, False


_KEPT: list[Block] = []
"""Blocks of the last save that has ended, all of one size. The next save will not need those that it has not used."""

_KEPT_LOCK: Final = threading.Lock()


class BlockLease(msgspec.Struct, eq=False):
    """The blocks of one save or load, until it is closed, and the copies between them and devices. Several threads may
    call its methods.

    Copies run on the stream of the device that is current in the thread that asks for them, which is that of the caller
    (``threads``): what the caller has queued there comes before them.

    Args:
        block_nbytes: the size of each block.
        n_blocks: how many blocks may be taken at a time.
        of_load: whether it is of a load. Its memory goes back to the system at the end, and a forked process does not
            get it (:class:`Block`). Blocks of a save stay for the next one.

    Attributes:
        used_nbytes: the most memory that it had at any time.
        how: remarks for the report, if copies were slower than they could be.
    """

    block_nbytes: int
    n_blocks: int
    of_load: bool = False
    used_nbytes: int = 0
    how: tuple[str, ...] = ()
    _free: list[Block] = []
    _taken: list[Block] = []
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    def take(self) -> Block:
        """Take a block.

        Raises:
            RuntimeError: all blocks are taken. A thread must not wait for a block, because others may wait for that
                thread.
        """
        block: Block | None = None
        with self._lock:
            if self._free:
                self._taken.append(block := self._free.pop())
                return block
            if self.used_nbytes == self.n_blocks * self.block_nbytes:
                raise RuntimeError(f"all {self.n_blocks} blocks of {self.block_nbytes} bytes are taken")
            self.used_nbytes += self.block_nbytes
        with _KEPT_LOCK:
            if not self.of_load and _KEPT and len(_KEPT[-1].data) == self.block_nbytes:
                block = _KEPT.pop()
        block = block or Block(self.block_nbytes, stays_at_fork=self.of_load)
        with self._lock:
            self._taken.append(block)
        return block

    def give_back(self, block: Block) -> None:
        """Return a block, so that another thread may take it."""
        with self._lock:
            self._taken.remove(block)
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
        """Keep the blocks that were given back for the next save, or free them. Called when no thread uses a block.

        One that was not given back belongs to a save or load that has failed. Its error may keep it for long, and
        memory that is locked is missing elsewhere.
        """
        for block in (*self._taken, *(self._free if self.of_load else ())):
            block.unpin()
        if not self.of_load:
            release_blocks(keep=self._free)
        self._free, self._taken = [], []

    def can_run_ahead(self, data: TensorBytes | torch.Tensor) -> bool:
        """Whether a copy of ``data``, or to it, runs by itself once it has begun."""
        return data.device.type == "cuda"

    def begin(self, data: TensorBytes, begin: int, end: int, block: Block, at: int) -> Callable[[], None]:
        """Begin to copy bytes ``begin`` to ``end`` of ``data``, which is on a device, to ``at`` in ``block``.

        Returns:
            A function that waits for the copy. Call it before you read the block.
        """
        block.pin(data.device)
        if block.pinned_by is None:
            self.how = (NOT_PINNED,)
        data.copy(begin, end, block, at, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(data.device))
        return copied.synchronize

    def fill(
        self, targets: Sequence[torch.Tensor], block: Block, at: Sequence[int], steps: Sequence[int] | None = None
    ) -> None:
        """Fill each of ``targets`` from ``block``, where its elements begin at the byte of ``at``. The copies are done
        when this returns, so the block is free.

        Other threads may read and copy meanwhile: this thread waits only for its own copies, without the GIL.

        Args:
            targets: uint8 ``[n]``, whose bytes lie one after the other; with ``steps`` of any dtype, shape and strides.
            steps: the strides of the elements in the block. A copy of these bytes on the device comes before them: only
                from one range of memory does a device copy by itself.
        """
        devices = {target.device for target in targets if self.can_run_ahead(target)}
        for device in devices:
            block.pin(device)
        with torch.inference_mode():
            for target, begin in zip(targets, at, strict=True):
                nbytes = len(target)
                if steps is not None:
                    last = sum((size - 1) * step for size, step in zip(target.shape, steps, strict=True))
                    nbytes = (last + 1) * target.itemsize
                source = block.tensor[begin : begin + nbytes]
                if steps is not None:
                    copy = torch.empty(nbytes, dtype=torch.uint8, device=target.device)
                    copy.copy_(source, non_blocking=bool(devices))
                    source = copy.view(target.dtype).as_strided(target.shape, steps)
                target.copy_(source, non_blocking=bool(devices))
        for device in devices:
            wait_for_copies(torch.cuda.current_stream(device))

    def fill_from(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a tensor on the CPU into one of the same shape, on any device, of any dtype and kind.

        A CUDA device copies memory that is not locked up to 35 times slower. So the bytes pass through a block, in
        parts, and what has to be converted is converted on the device.

        Raises:
            RuntimeError: these two do not fit, such as sparse tensors with different numbers of elements.
        """
        if not self.can_run_ahead(target):
            target.copy_(source)
        elif is_plain(source) and is_plain(target):
            elements, done = source.contiguous().view(-1), 0
            with self.lent() as block:
                for part in parts_in_order(target, 0, target.numel(), at_most=self.block_nbytes // source.itemsize):
                    piece = elements[done : done + part.numel()]
                    copy_bytes(block.address, piece.data_ptr(), piece.nbytes)
                    copy = torch.empty(piece.nbytes, dtype=torch.uint8, device=target.device)
                    self.fill([copy], block, [0])
                    part.copy_(copy.view(piece.dtype).view(part.shape))
                    done += part.numel()
        else:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a kind whose memory torch cannot lock
                source = source.contiguous().pin_memory()
            target.copy_(source)


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


# The bytes of tensors.

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Only these classes are known to be nothing but their data."""

_STRIDED = torch.strided


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor``, on any device, holds its elements as they are stored, in any order."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def host_address(tensor: torch.Tensor) -> int | None:
    """The address of the bytes of ``tensor``; ``None`` if they are not in this process's memory, or not in order.

    It calls no operator of torch: these release the GIL, and with several threads each release costs more than the
    answer.

    Raises:
        RuntimeError: the tensor's memory was freed.
    """
    # A subclass may keep its data anywhere. Lazy conjugation and negation are flags that the bytes do not show.
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.layout is not _STRIDED:
        return None
    is_in_order = tensor.is_contiguous()
    nbytes = tensor.nbytes
    if nbytes:
        if not is_in_order:
            nbytes = extent_nbytes(tensor)
        held = tensor.untyped_storage().nbytes()
        if held < (needed := tensor.storage_offset() * tensor.itemsize + nbytes):
            # FSDP resizes the storage to 0, and shape and address stay.
            raise RuntimeError(
                f"its storage holds {held} bytes where its data ends at byte {needed}: its memory was freed"
            )
    return tensor.data_ptr() if is_in_order and not tensor.is_neg() and not tensor.is_conj() else None


def extent_nbytes(tensor: torch.Tensor) -> int:
    """The bytes from the first element of a tensor, which is not empty, to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


class TensorBytes:
    """The bytes that a contiguous copy of ``tensor`` would have, without making one.

    Only a tensor subclass is copied to the host as a whole, because only the subclass knows what a slice of it is.

    Attributes:
        nbytes: the number of bytes.
        address: the address of the first byte, if all bytes lie in this process's memory in order; else ``None``. It is
            valid as long as this object exists.

    Raises:
        RuntimeError: the tensor's memory was freed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in PLAIN:
            tensor = to_host(tensor)
        self._tensor = tensor
        self.nbytes = tensor.numel() * tensor.itemsize
        self.address = host_address(tensor)
        # The elements in order, if the tensor is contiguous and on a device.
        self._flat: torch.Tensor | None = None
        if not tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # Not reshape(-1): a contiguous tensor may have any stride where its size is 1, and reshape keeps that
            # stride.
            self._flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def copy(self, begin: int, end: int, block: Block, at: int, *, non_blocking: bool = False) -> None:
        """Copy bytes ``begin`` to ``end`` to ``at`` in ``block``.

        Args:
            non_blocking: return before a device has finished the copy, if the block is pinned. The caller waits.
        """
        if self.address is not None:
            # torch's own copy may use all cores, and the data loaders need them.
            copy_bytes(block.address + at, self.address + begin, end - begin)
            return
        target = block.tensor[at : at + end - begin]
        if self._flat is not None:
            target.copy_(self._flat[begin:end], non_blocking=non_blocking)
        else:
            self._copy_elements(begin, end, target, at, non_blocking)

    def _copy_elements(self, begin: int, end: int, target: torch.Tensor, at: int, non_blocking: bool) -> None:
        tensor, itemsize = self._tensor.detach(), self._tensor.itemsize
        if begin % itemsize == 0 == end % itemsize and at % itemsize == 0:
            _copy_range(tensor, begin // itemsize, end // itemsize, target.view(tensor.dtype), non_blocking)
            return
        first, last = begin // itemsize, -(-end // itemsize)
        elements = torch.empty(last - first, dtype=tensor.dtype)
        _copy_range(tensor, first, last, elements, non_blocking=False)
        target.copy_(elements.view(torch.uint8)[begin - first * itemsize : end - first * itemsize])


def _copy_range(tensor: torch.Tensor, first: int, last: int, into: torch.Tensor, non_blocking: bool) -> None:
    """Copy elements ``first`` to ``last`` of ``tensor`` to ``into``. They are counted in the order of a contiguous
    tensor.

    Args:
        into: ``[last - first]``, of the same dtype.
    """
    done = 0
    for part in parts_in_order(tensor, first, last):
        into[done : done + part.numel()].view(part.shape).copy_(part, non_blocking=non_blocking)
        done += part.numel()


def parts_in_order(
    tensor: torch.Tensor, first: int, last: int, *, at_most: int | None = None
) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of ``tensor``, in the order of a contiguous tensor, in as few views as possible.

    Args:
        at_most: the most elements of one view; ``None`` for no limit.
    """
    if at_most is not None and last - first > at_most:
        for begin in range(first, last, at_most):
            yield from parts_in_order(tensor, begin, min(begin + at_most, last))
        return
    if first >= last:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[first:last]
        return
    row_numel = tensor.numel() // tensor.shape[0]
    (top, from_column), (bottom, to_column) = divmod(first, row_numel), divmod(last, row_numel)
    if top == bottom:
        yield from parts_in_order(tensor[top], from_column, to_column)
        return
    if from_column:
        yield from parts_in_order(tensor[top], from_column, row_numel)
        top += 1
    if top < bottom:
        yield tensor[top:bottom]
    if to_column:
        yield from parts_in_order(tensor[bottom], 0, to_column)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or its copy if it is on a device. The copy comes after the work queued on the current stream."""
    if not tensor.is_cuda or type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.to("cpu")
    copy = torch.empty_like(tensor, device="cpu", memory_format=torch.preserve_format)
    copy.copy_(tensor, non_blocking=True)
    wait_for_copies(torch.cuda.current_stream(tensor.device))
    return copy


def wait_for_copies(stream: torch.cuda.Stream) -> None:
    """Wait until the work that was queued on a stream before this call is done."""
    done = torch.cuda.Event(blocking=True)
    done.record(stream)
    done.synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a contiguous, detached CPU tensor of the same dtype and shape.

    A contiguous CPU tensor is not copied. A copy from a device waits for the work queued on the current stream, so it
    has the values after the caller's last operation.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        # Lazy conjugation and negation are flags of the tensor. Its bytes do not show them.
        tensor = tensor.resolve_conj().resolve_neg()
    return on_cpu(tensor).contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The data of ``tensor`` on its own device, as uint8 ``[nbytes]``. It is copied only if it is not contiguous."""
    if type(tensor) not in PLAIN:
        tensor = to_host(tensor)  # only the subclass knows how its data lies
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): a contiguous tensor may have any stride where its size is 1, and reshape keeps that stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_host_together(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host. Tensors on one device are copied together.

    Args:
        parts: uint8 ``[n]`` each, on any device.

    Returns:
        uint8 ``[n]`` each, on the CPU, in the same order.
    """
    on_host = list(parts)
    for device in dict.fromkeys(part.device for part in parts):
        places = [place for place, part in enumerate(parts) if part.device == device]
        try:
            copied = on_cpu(torch.cat([parts[place] for place in places]))
        except torch.OutOfMemoryError:  # training has filled the device, and gathering needs room there
            copies = [on_cpu(parts[place]) for place in places]
        else:
            copies = list(copied.split([parts[place].numel() for place in places]))
        for place, copy in zip(places, copies, strict=True):
            on_host[place] = copy
    return on_host
