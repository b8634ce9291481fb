"""Copies of the items that a rank writes, so that training may change the tensors while the copies are written.

Owns the copies. There is one for each item that this rank writes, in the order of the plan. Objects may change at any
time, so the caller's thread pickles them when a ``StagedSource`` is made. If there is no room for a copy of a tensor,
the tensor is borrowed: the engine writes it first, and until then it must not change. Called by ``async_save``.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from typing import NamedTuple

import torch

from robust_dcp.report import sizes_in_words
from robust_dcp.staging import (
    NOT_PINNED,
    STAGING,
    StagingBuffer,
    StagingBuffers,
    TensorForm,
    host_address,
    wait_for_copies,
)
from robust_dcp.storage.records.record import is_fixed_size
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors, saved_by_torch

__all__ = ["SharedCopies", "StagedSource"]

logger = logging.getLogger(__name__)

_BATCH_NBYTES = 256 << 20
"""About so many bytes are copied in one call. After each call the other ranks hear of the progress."""


class SharedCopies(NamedTuple):
    """Copies in memory that other processes can map.

    Attributes:
        fd: the open file of the memory.
        nbytes: the size of the memory.
        places: the places of the tensors in the memory, in their order there.
        forms: the forms of these tensors.
        cpus: the processors near this memory.
    """

    fd: int
    nbytes: int
    places: list[int]
    forms: list[TensorForm]
    cpus: frozenset[int]


class StagedSource(ItemSource):
    """An ``ItemSource`` with copies of the items of another source.

    Args:
        source: the source of the data. All its items are taken now, and referenced until they have been copied.
        note_progress: called with the number of bytes copied so far, and the number of bytes of all tensors.
        buffers: the memory for the copies.
        limit_nbytes: the most bytes that all copies of tensors may take together; ``None`` for no limit.
        when_given_back: called once the borrowed tensors have been written.

    Attributes:
        borrowed: the places of the tensors that are not copied. It is known after :meth:`copy`.
        how: remarks for the report, if tensors were not copied, or were copied in a slower way.

    Raises:
        RobustCheckpointError: an item cannot be resolved, or its memory was freed. The message names the item.
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
        # The copies must come after all work that was queued on the device before this call, on any stream.
        self._stream: torch.cuda.Stream | None = None
        if any(isinstance(data, _Original) and data.tensor.is_cuda for data in self._data):
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self) -> None:
        """Copy all tensors that are not :attr:`borrowed`.

        When this returns, the copies are complete, and their originals are no longer referenced.

        Raises:
            RobustCheckpointError: a tensor cannot be copied. The message names it.
        """
        try:
            self._copy()
        except BaseException as error:
            self._failure = error
            if self._stream is not None:
                with suppress(Exception):  # no copy that is under way may reach the memory when the next save has it
                    self._stream.synchronize()
            raise
        finally:
            self._ends.set()

    def wait(self) -> None:
        """Wait until :meth:`copy` has ended. It may run in another thread, and may have failed."""
        self._ends.wait()

    def give_back(self) -> None:
        """Note that the borrowed tensors have been written."""
        for place in self.borrowed:
            self._data[place] = _WRITTEN
        self._when_given_back()

    def stream(self) -> AbstractContextManager[object]:
        """A ``with`` block for work on the device. It runs after all work that was queued when this object was made."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @property
    def shared(self) -> SharedCopies | None:
        """The copies for another process, or ``None`` if it cannot get all of them."""
        if self._buffer is None or self._buffer.fd is None or self.borrowed:
            return None
        return SharedCopies(self._buffer.fd, self._buffer.nbytes, self._copied, self._forms, self._buffer.cpus)

    def release(self) -> None:
        """Give the memory to the next save. The copies must not be used any more."""
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
            wait_for_copies(self._stream)
        for place, copy in zip(places, copies, strict=True):
            self._data[place] = copy

    def _without_room(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """The places of the tensors that do not fit into the limit: the largest, so that they are few."""
        if self._limit_nbytes is None:
            return []
        smallest_first = sorted(tensors, key=lambda place: _nbytes(tensors[place]))
        ends = accumulate(_nbytes(tensors[place]) for place in smallest_first)
        return sorted(place for place, end in zip(smallest_first, ends, strict=True) if end > self._limit_nbytes)

    def _buffer_for(self, forms: list[TensorForm]) -> StagingBuffer | None:
        """A buffer for the copies, or ``None`` if the host lacks the memory. A slow save is better than none."""
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
                self._say(NOT_PINNED)
        return self._buffer

    def _say(self, how: str) -> None:
        self.how = (*self.how, how)
        _log_once(how.partition(":")[0], how)

    def _copy_batch(self, places: Sequence[int], copies: list[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
        try:
            torch._foreach_copy_(copies, list(originals), non_blocking=self._stream is not None)
        except Exception:  # copy one by one, to find out which tensor fails
            with NamedErrors(self, 0) as errors:
                for place, copy, original in zip(places, copies, originals, strict=True):
                    errors.place = place
                    copy.copy_(original)


class _Original(NamedTuple):
    """A tensor that is not copied yet."""

    tensor: torch.Tensor


_WRITTEN = io.BytesIO()
"""Takes the place of a borrowed tensor when it is no longer referenced."""

_LOGGED: set[str] = set()


def _log_once(kind: str, text: str) -> None:
    if kind not in _LOGGED:
        _LOGGED.add(kind)
        logger.warning("an async save has not gone as it should; said once: %s", text)


def _sizes(tensors: Mapping[int, torch.Tensor], places: Sequence[int]) -> str:
    return sizes_in_words(sum(_nbytes(tensors[place]) for place in places))


def _taken(data: torch.Tensor | io.BytesIO) -> io.BytesIO | _Original:
    """Take an item's data when the save begins. A plain tensor is only noted, and copied later.

    Any other tensor is pickled at once, as a save that waits pickles it.
    """
    if not isinstance(data, torch.Tensor):
        return data
    host_address(data)  # raises if its memory was freed
    data = data.detach()
    return _Original(data) if is_fixed_size(data) else saved_by_torch(data)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Divide ``tensors`` into ranges of about :data:`_BATCH_NBYTES` bytes."""
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
