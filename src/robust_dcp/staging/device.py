"""Copies from and to a device that run beside other work, on a stream of their own and through pinned blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from robust_dcp.staging.blocks import NOT_PINNED, Block
from robust_dcp.staging.tensor_bytes import TensorBytes

__all__ = ["DeviceCopies"]


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
        copied = torch.cuda.Event()
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
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
