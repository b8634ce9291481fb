"""The bytes of tensors on any device and with any strides: where they are in memory, a range of them, many at once, and
copies that run beside other work.

It never keeps a buffer. ``Tensor.cpu()`` and ``Stream.synchronize()`` wait for a whole stream, and PyTorch counts them
as synchronizing calls, which a training loop may have forbidden (``torch.cuda.set_sync_debug_mode``). So everything in
this package waits for events. They are blocking ones: a thread that waits for another kind keeps a core busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from robust_dcp.staging.blocks import NOT_PINNED, Block, copy_bytes

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Only these classes are known to be nothing but their data."""

_STRIDED = torch.strided


def host_address(tensor: torch.Tensor) -> int | None:
    """The address of the bytes of ``tensor``; ``None`` if they are not in this process's memory, or not in order.

    It calls no operator of torch: these release the GIL, and with several threads each release costs more than the
    answer.

    Raises:
        RuntimeError: the tensor's memory was freed.
    """
    # A subclass may keep its data anywhere. Lazy conjugation and negation are flags that the bytes do not show.
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not _STRIDED:
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
        if type(tensor) not in _PLAIN:
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


def parts_in_order(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of ``tensor``, in the order of a contiguous tensor, in as few views as
    possible.
    """
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
    if not tensor.is_cuda or type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
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
    if type(tensor) not in _PLAIN:
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


class DeviceCopies:
    """The copies of one save or load. All its threads share one stream.

    Work that was queued on the current stream when this object is made comes before the copies: they have the contents
    of that moment. Later work does not wait for them. If a planner computes a tensor in one thread, it is ready when
    another thread copies it.

    Attributes:
        how: remarks for the report, if copies were slower than they could be.
    """

    def __init__(self) -> None:
        self.how: tuple[str, ...] = ()
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def in_this_thread(self) -> AbstractContextManager[object]:
        """A ``with`` block in which the calling thread uses the stream of the copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def can_run_ahead(self, data: TensorBytes | torch.Tensor) -> bool:
        """Whether a copy of ``data``, or to it, runs by itself once it has begun."""
        return self._stream is not None and data.device == self._stream.device

    def begin(self, data: TensorBytes, begin: int, end: int, block: Block, at: int) -> Callable[[], None]:
        """Begin to copy bytes ``begin`` to ``end`` of ``data`` to ``at`` in ``block``.

        Returns:
            A function that waits for the copy. Call it before you read the block.
        """
        if self._stream is None or not self.can_run_ahead(data):
            data.copy(begin, end, block, at)
            return lambda: None
        block.pin()
        if not block.is_pinned:
            self.how = (NOT_PINNED,)
        data.copy(begin, end, block, at, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._stream)
        return copied.synchronize

    def fill(self, target: torch.Tensor, block: Block, at: int) -> None:
        """Fill ``target``, uint8 ``[n]``, from ``block`` at ``at``. The copy is done when this returns, so the block is
        free.

        Other threads may read and copy meanwhile: this thread waits only for its own copy, without the GIL.
        """
        source = block.tensor[at : at + len(target)]
        if self._stream is None or not self.can_run_ahead(target):
            target.copy_(source)
            return
        block.pin()
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
