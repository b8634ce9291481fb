"""The items that a rank writes, copied, so that training may change the tensors while the copies are written.

Owns the copies: only of what this rank writes, in the order of the plan. Objects are pickled when this is made, on the
thread that asks for the save, since they may change at any time. Tensors for whose copies there is no room are borrowed
instead: the engine writes them first, and they must not change before. Called by ``async_save``.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import NamedTuple

import torch

from robust_dcp.report import sizes_in_words
from robust_dcp.staging import STAGING, StagingBuffer, StagingBuffers, TensorForm, host_address
from robust_dcp.storage.records.torch_zip import is_fixed_size
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors

__all__ = ["SharedCopies", "StagedSource"]

logger = logging.getLogger(__name__)

_BATCH_NBYTES = 256 << 20
"""Copied in one call: others hear after each that this rank has got on."""


class SharedCopies(NamedTuple):
    """Copies in memory that other processes can map.

    Attributes:
        fd: of the file whose memory it is.
        nbytes: of the memory.
        places: of the items that are tensors in it, in the order in which they lie there.
        forms: of these tensors.
        cpus: processors near this memory.
    """

    fd: int
    nbytes: int
    places: list[int]
    forms: list[TensorForm]
    cpus: frozenset[int]


class StagedSource:
    """An ``ItemSource`` over copies of what another one gives.

    Args:
        source: of the data. It is asked for all items now, and refers to them until they have been copied.
        note_progress: called with the bytes that are copied, and those of all tensors.
        buffers: where the copies lie.
        limit_nbytes: that all copies of tensors may take together; ``None`` for no such limit.
        when_given_back: called once the tensors that were borrowed have been written.

    Attributes:
        borrowed: places of the tensors that are not copied; known after :meth:`copy`.
        how: what the report says of tensors that were copied in another way than they should have been, or not at all.

    Raises:
        RobustCheckpointError: an item cannot be resolved, or its memory was freed; names it.
    """

    borrowed: Sequence[int] = ()
    how: tuple[str, ...] = ()

    def __init__(
        self,
        source: ItemSource,
        note_progress: Callable[[int, int], None],
        buffers: StagingBuffers = STAGING,
        *,
        limit_nbytes: int | None = None,
        when_given_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._note_progress = note_progress
        self._limit_nbytes = limit_nbytes
        self._when_given_back = when_given_back
        self._buffers = buffers
        self._names = [source.name(place) for place in range(len(source))]
        self._expected = [source.expected(place) for place in range(len(source))]
        self._chunk_offsets = [source.chunk_offset(place) for place in range(len(source))]
        self._ends = threading.Event()
        self._failure: BaseException | None = None
        self._buffer: StagingBuffer | None = None
        self._copied: list[int] = []
        self._forms: list[TensorForm] = []
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
        """Copy all tensors that are not :attr:`borrowed`. Returns when the copies are complete; their originals are no
        longer referred to.

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

    def give_back(self) -> None:
        """The borrowed tensors have been written."""
        for place in self.borrowed:
            self._data[place] = _WRITTEN
        self._when_given_back()

    def stream(self) -> AbstractContextManager[object]:
        """A ``with`` block in which the device does what it is given after the work that it had when this was made."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @property
    def shared(self) -> SharedCopies | None:
        """Where another process finds the copies; ``None`` if it cannot, or not all of them."""
        if self._buffer is None or self._buffer.fd is None or self.borrowed:
            return None
        return SharedCopies(self._buffer.fd, self._buffer.nbytes, self._copied, self._forms, self._buffer.cpus)

    def release(self) -> None:
        """Let the next save have the memory. The copies must not be used any more."""
        self._data = []
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None

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
        return data.tensor if isinstance(data, _Original) else data

    def _copy(self) -> None:
        tensors = {place: data.tensor for place, data in enumerate(self._data) if isinstance(data, _Original)}
        self.borrowed = self._without_room(tensors)
        if self.borrowed:
            self.how = (f"{_sizes(tensors, self.borrowed)} of it while training waited: they are over staging_nbytes",)
        places = sorted(tensors.keys() - set(self.borrowed))
        originals = [tensors[place] for place in places]
        forms = [(tensor.dtype, tensor.shape) for tensor in originals]
        buffer = self._buffer_for(forms)
        if buffer is None:
            self.borrowed = sorted(tensors)
            return
        self._copied, self._forms = places, forms
        copies = buffer.tensors(forms)
        total, done = sum(map(_nbytes, originals)), 0
        with torch.no_grad(), self.stream():
            for batch in _batches(originals):
                self._copy_batch(places[batch], copies[batch], originals[batch])
                done += sum(map(_nbytes, originals[batch]))
                self._note_progress(done, total)
        if self._stream is not None:
            self._stream.synchronize()
        for place, copy in zip(places, copies, strict=True):
            self._data[place] = copy

    def _without_room(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """Places of the tensors that are over the limit: as few as that takes, so the largest."""
        if self._limit_nbytes is None:
            return []
        smallest_first = sorted(tensors, key=lambda place: _nbytes(tensors[place]))
        ends = accumulate(_nbytes(tensors[place]) for place in smallest_first)
        return sorted(place for place, end in zip(smallest_first, ends, strict=True) if end > self._limit_nbytes)

    def _buffer_for(self, forms: list[TensorForm]) -> StagingBuffer | None:
        """``None`` if the host has no such memory: a save that takes longer is better than none."""
        try:
            self._buffer = self._buffers.take(forms, None if self._stream is None else self._stream.device)
        except (OSError, MemoryError) as error:
            nbytes = sum(dtype.itemsize * size.numel() for dtype, size in forms)
            why = f"there is no memory for copies of {sizes_in_words(nbytes)} ({error})"
            self._say(f"while training waited: {why}")
            return None
        if self._stream is not None:
            self._buffer.pin()
            if not self._buffer.is_pinned:
                self._say("copied slowly: the system does not lock memory for the device")
        return self._buffer

    def _say(self, how: str) -> None:
        self.how = (*self.how, how)
        _log_once(how.partition(":")[0], how)

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


_WRITTEN = io.BytesIO()
"""Stands for a tensor that was borrowed, and is no longer referred to."""

_LOGGED: set[str] = set()


def _log_once(kind: str, text: str) -> None:
    if kind not in _LOGGED:
        _LOGGED.add(kind)
        logger.warning("an async save has not gone as it should; said once: %s", text)


def _sizes(tensors: Mapping[int, torch.Tensor], places: Sequence[int]) -> str:
    return sizes_in_words(sum(_nbytes(tensors[place]) for place in places))


def _taken(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO | _Original:
    """What is known of an item's data when the save is asked for. What is no plain tensor is copied at once: it is
    saved together with all of its memory, so its copy needs memory of its own."""
    if not isinstance(data, torch.Tensor):
        return data
    host_address(data)  # raises where its memory was freed
    data = data.detach()
    if not is_fixed_size(data):
        data = data.to("cpu", copy=True)
    # Pending conjugation, say, is resolved by a copy: what comes of it is a tensor as others are.
    return _Original(data) if is_fixed_size(data) else data


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
