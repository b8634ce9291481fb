"""The bytes of one tensor, a range at a time, on any device and with any strides.

This module finds a range in memory or copies it out of the tensor, so that no tensor is ever copied as a whole. It
never keeps a buffer. ``pack``, ``large_record`` and ``append`` of ``storage.writing`` call it, and so does
``plan.shared_reads``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from robust_dcp.staging.blocks import Block, copy_bytes
from robust_dcp.staging.host import to_host

__all__ = ["TensorBytes", "host_address", "parts_in_order"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
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
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            nbytes = (last + 1) * tensor.itemsize
        held = tensor.untyped_storage().nbytes()
        if held < (needed := tensor.storage_offset() * tensor.itemsize + nbytes):
            # FSDP resizes the storage to 0, and shape and address stay.
            raise RuntimeError(
                f"its storage holds {held} bytes where its data ends at byte {needed}: its memory was freed"
            )
    return tensor.data_ptr() if is_in_order and not tensor.is_neg() and not tensor.is_conj() else None


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
