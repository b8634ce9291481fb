"""The items that a rank writes, copied, so that training may change the tensors while the copies are written.

Owns the copies: only of what this rank writes, in the order of the plan. Objects are pickled when this is made, on the
thread that asks for the save, since they may change at any time. Called by ``async_save``.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from robust_dcp.staging import STAGING, StagingBuffer, StagingBuffers, host_address
from robust_dcp.storage.records.torch_zip import is_fixed_size
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors

__all__ = ["StagedSource"]

_BATCH_NBYTES = 256 << 20
"""Copied in one call: others hear after each that this rank has got on."""


class StagedSource:
    """An ``ItemSource`` over copies of what another one gives.

    Args:
        source: of the data. It is asked for all items now, and refers to them until they have been copied.
        note_progress: called with the bytes that are copied, and those of all tensors.
        buffers: where the copies lie.

    Raises:
        RobustCheckpointError: an item cannot be resolved, or its memory was freed; names it.
    """

    def __init__(
        self,
        source: ItemSource,
        note_progress: Callable[[int, int], None],
        buffers: StagingBuffers = STAGING,
    ) -> None:
        self._note_progress = note_progress
        self._buffers = buffers
        self._names = [source.name(place) for place in range(len(source))]
        self._expected = [source.expected(place) for place in range(len(source))]
        self._chunk_offsets = [source.chunk_offset(place) for place in range(len(source))]
        self._ends = threading.Event()
        self._failure: BaseException | None = None
        self._buffer: StagingBuffer | None = None
        with torch.no_grad(), NamedErrors(self, 0) as errors:
            self._data: list[torch.Tensor | io.BytesIO | _Original] = []
            for place in range(len(source)):
                errors.place = place
                self._data.append(_taken(source.resolve(place)))
        # Work that the device was given before this call comes before the copies, whatever stream they run on.
        self._stream: torch.cuda.Stream | None = None
        if any(isinstance(data, _Original) and data.tensor.is_cuda for data in self._data):
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self) -> None:
        """Copy all tensors. Returns when the copies are complete; the originals are no longer referred to.

        Raises:
            RobustCheckpointError: a tensor cannot be copied; names it.
        """
        try:
            self._copy()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._ends.set()

    def wait(self) -> None:
        """Wait until :meth:`copy` has ended, in whatever thread, and however it has."""
        self._ends.wait()

    def release(self) -> None:
        """Let the next save have the memory. The copies must not be used any more."""
        self._data = []
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None

    @property
    def is_pinned(self) -> bool:
        """Whether a device copied by itself."""
        return self._buffer is not None and self._buffer.is_pinned

    @property
    def nbytes(self) -> int:
        """Of the copies, in bytes."""
        return sum(_nbytes(data) for data in self._data if isinstance(data, torch.Tensor))

    def __len__(self) -> int:
        return len(self._names)

    def name(self, place: int) -> str:
        return self._names[place]

    def expected(self, place: int) -> tuple[torch.dtype, torch.Size] | None:
        return self._expected[place]

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        return self._chunk_offsets[place]

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        self.wait()
        if self._failure is not None:
            raise self._failure
        data = self._data[place]
        if isinstance(data, _Original):
            raise RuntimeError("it was not copied")
        return data

    def _copy(self) -> None:
        places = [place for place, data in enumerate(self._data) if isinstance(data, _Original)]
        originals = [data.tensor for data in self._data if isinstance(data, _Original)]
        forms = [(tensor.dtype, tensor.shape) for tensor in originals]
        self._buffer = self._buffers.take(forms)
        if self._stream is not None:
            self._buffer.pin()
        copies = self._buffer.tensors(forms)
        total, done = sum(map(_nbytes, originals)), 0
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for batch in _batches(originals):
                self._copy_batch(places[batch], copies[batch], originals[batch])
                done += sum(map(_nbytes, originals[batch]))
                self._note_progress(done, total)
        if self._stream is not None:
            self._stream.synchronize()
        for place, copy in zip(places, copies, strict=True):
            self._data[place] = copy

    def _copy_batch(self, places: Sequence[int], copies: list[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
        try:
            torch._foreach_copy_(copies, list(originals), non_blocking=self._stream is not None)
        except Exception:  # one by one, to find out which it is about
            with NamedErrors(self, 0) as errors:
                for place, copy, original in zip(places, copies, originals, strict=True):
                    errors.place = place
                    copy.copy_(original)


class _Original(NamedTuple):
    """A tensor of which a copy is still to be made."""

    tensor: torch.Tensor


def _taken(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO | _Original:
    """What is known of an item's data when the save is asked for. What is no plain tensor is copied at once: it is
    saved together with all of its memory, so its copy needs memory of its own."""
    if not isinstance(data, torch.Tensor):
        return data
    host_address(data)  # raises where its memory was freed
    return _Original(data.detach()) if is_fixed_size(data) else data.detach().to("cpu", copy=True)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Ranges of ``tensors`` of about :data:`_BATCH_NBYTES` bytes each."""
    first, nbytes = 0, 0
    for place, tensor in enumerate(tensors):
        nbytes += _nbytes(tensor)
        if nbytes >= _BATCH_NBYTES:
            yield slice(first, place + 1)
            first, nbytes = place + 1, 0
    if first < len(tensors):
        yield slice(first, len(tensors))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
