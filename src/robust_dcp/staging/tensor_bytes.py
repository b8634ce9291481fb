"""The bytes of one tensor, a range at a time, wherever the tensor is and however its elements lie.

Owns how a range is found in memory or copied out of it, so that no tensor is ever staged as a whole. Never keeps a
buffer. Called by ``pack``, ``large_record`` and ``append`` of ``storage.writing``, and by
``plan.loading.shared_reads``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from robust_dcp.staging.blocks import Block, copy_bytes
from robust_dcp.staging.host import to_host

__all__ = ["TensorBytes", "host_address", "parts_in_order"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def host_address(tensor: torch.Tensor) -> int | None:
    """Where in this process's memory the bytes of ``tensor`` lie, in order; ``None`` if they are not there, or not so.

    Asks nothing of torch that lets go of the GIL, as its operators do: where several threads run, each time costs more
    than the answer.

    Raises:
        RuntimeError: its memory was freed.
    """
    # A subclass may keep its data anywhere; lazy conjugation and negation live in a bit of the tensor.
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout != torch.strided:
        return None
    is_in_order = tensor.is_contiguous()
    numel = tensor.numel()
    if numel:
        last = numel - 1
        if not is_in_order:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
        if tensor.untyped_storage().nbytes() < needed:  # FSDP resizes to 0; shape and address stay
            raise RuntimeError(
                f"its storage holds {tensor.untyped_storage().nbytes()} bytes where its data ends at byte {needed}: "
                "its memory was freed"
            )
    return tensor.data_ptr() if is_in_order and not tensor.is_neg() and not tensor.is_conj() else None


class TensorBytes:
    """What a contiguous copy of ``tensor`` would hold, without making one.

    Only a tensor subclass is copied as a whole, to the host: what it makes of a slice is its own affair.

    Attributes:
        nbytes: of all of it.
        address: of the first byte, where all bytes lie in this process's memory in order; else ``None``. It holds as
            long as this object does.

    Raises:
        RuntimeError: the tensor's memory was freed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in _PLAIN:
            tensor = to_host(tensor)
        self._tensor = tensor
        self.nbytes = tensor.numel() * tensor.itemsize
        self.address = host_address(tensor)
        # On a device, in order.
        self._flat: torch.Tensor | None = None
        if not tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # Not reshape(-1): where a size is 1, a contiguous tensor may have any stride, and keeps it.
            self._flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def copy(self, begin: int, end: int, block: Block, at: int, *, non_blocking: bool = False) -> None:
        """Copy bytes ``begin`` to ``end`` into ``block``, from ``at`` on.

        Args:
            non_blocking: return before a device has copied; the block must be pinned, and the caller waits.
        """
        if self.address is not None:
            # torch's own copy may use all cores, which belong to the data loaders.
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
    """Copy elements ``first`` to ``last`` of ``tensor``, in the order of a contiguous one, to ``into``.

    Args:
        into: ``[last - first]``, of the same dtype.
    """
    done = 0
    for part in parts_in_order(tensor, first, last):
        into[done : done + part.numel()].view(part.shape).copy_(part, non_blocking=non_blocking)
        done += part.numel()


def parts_in_order(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of ``tensor``, in the order of a contiguous one, as few views as that takes."""
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
