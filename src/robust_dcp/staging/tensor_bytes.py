"""The bytes of one tensor, a range at a time, wherever the tensor is and however its elements lie.

Owns how a range is found in memory or copied out of it, so that no tensor is ever staged as a whole. Never keeps a
buffer. Called by ``storage.large_record`` and ``storage.append``.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.staging.blocks import Block
from robust_dcp.staging.host import to_host

__all__ = ["TensorBytes"]


class TensorBytes:
    """What a contiguous copy of ``tensor`` would hold, without making one.

    Only a tensor subclass is copied as a whole, to the host: what it makes of a slice is its own affair.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            tensor = to_host(tensor)
        self._tensor = tensor.detach()
        self.nbytes = tensor.numel() * tensor.itemsize
        # Lazy conjugation and negation live in a bit of the tensor, not in its bytes.
        self._flat = None
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # Not reshape(-1): where a size is 1, a contiguous tensor may have any stride, and keeps it.
            self._flat = self._tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def in_place(self) -> npt.NDArray[np.uint8] | None:
        """All bytes where they are, uint8 ``[nbytes]``; ``None`` if they are elsewhere, or in another order."""
        if self._flat is None or not self._flat.is_cpu:
            return None
        array: npt.NDArray[np.uint8] = self._flat.numpy()
        return array

    def copy(self, begin: int, end: int, block: Block, at: int, *, non_blocking: bool = False) -> None:
        """Copy bytes ``begin`` to ``end`` into ``block``, from ``at`` on.

        Args:
            non_blocking: return before a device has copied; the block must be pinned, and the caller waits.
        """
        target = block.tensor[at : at + end - begin]
        if self._flat is not None and self._flat.is_cpu:
            # torch's own copy may use all cores, which belong to the data loaders.
            ctypes.memmove(target.data_ptr(), self._flat.data_ptr() + begin, end - begin)
        elif self._flat is not None:
            target.copy_(self._flat[begin:end], non_blocking=non_blocking)
        else:
            self._copy_elements(begin, end, target, at, non_blocking)

    def _copy_elements(self, begin: int, end: int, target: torch.Tensor, at: int, non_blocking: bool) -> None:
        tensor, itemsize = self._tensor, self._tensor.itemsize
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
    if first >= last:
        return
    if tensor.dim() == 0:
        into.copy_(tensor.reshape(1), non_blocking=non_blocking)
        return
    row_numel = tensor.numel() // tensor.shape[0]
    (top, from_column), (bottom, to_column) = divmod(first, row_numel), divmod(last, row_numel)
    if top == bottom:
        _copy_range(tensor[top], from_column, to_column, into, non_blocking)
        return
    done = 0
    if from_column:
        done = row_numel - from_column
        _copy_range(tensor[top], from_column, row_numel, into[:done], non_blocking)
        top += 1
    rows = tensor[top:bottom]
    if rows.numel():
        into[done : done + rows.numel()].view(rows.shape).copy_(rows, non_blocking=non_blocking)
        done += rows.numel()
    if to_column:
        _copy_range(tensor[bottom], 0, to_column, into[done:], non_blocking)
