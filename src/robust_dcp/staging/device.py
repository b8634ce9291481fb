"""Copies from and to a device that run beside other work: on a stream of their own, through pinned blocks.

Owns the streams and the one moment at which they wait for the stream that training uses. Called by ``storage.engine``
once a save, and by ``storage.reading_threads`` once a load, from the thread that asked for it; then by its threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from robust_dcp.staging.blocks import Block
from robust_dcp.staging.tensor_bytes import TensorBytes

__all__ = ["CopiesToDevice", "DeviceCopies"]


class DeviceCopies:
    """Copies of what a device holds at the moment at which this is made.

    What the current stream has been given to do so far comes before the copies; what it is given later does not wait
    for them. All threads of a save share one stream, so that what a planner computes in one thread is there when
    another copies it.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def in_this_thread(self) -> AbstractContextManager[object]:
        """A ``with`` block in which the calling thread works on the stream of the copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def can_run_ahead(self, data: TensorBytes) -> bool:
        """Whether a copy of ``data`` goes on by itself once it has begun."""
        return self._stream is not None and data.device == self._stream.device

    def begin(self, data: TensorBytes, begin: int, end: int, block: Block, at: int) -> Callable[[], None]:
        """Begin to copy bytes ``begin`` to ``end`` of ``data`` into ``block`` from ``at`` on.

        Returns:
            What to call before the block is read: it waits for the copy.
        """
        if self._stream is None or not self.can_run_ahead(data):
            data.copy(begin, end, block, at)
            return _nothing_to_wait_for
        block.pin()
        data.copy(begin, end, block, at, non_blocking=block.is_pinned)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied.synchronize


class CopiesToDevice:
    """Copies of blocks into tensors on a device, after what the current stream has been given to do so far."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, block: Block, at: int, target: torch.Tensor) -> None:
        """Fill ``target``, uint8 ``[n]``, from ``block`` at ``at``; returns when that is done, so the block is free.

        Other threads may read and copy meanwhile: this one waits for its own copy alone, without the GIL.
        """
        source = block.tensor[at : at + len(target)]
        if self._stream is None or target.device != self._stream.device:
            target.copy_(source)
            return
        block.pin()
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=block.is_pinned)
            copied.record(self._stream)
        copied.synchronize()


def _nothing_to_wait_for() -> None:
    """The copy is complete."""
