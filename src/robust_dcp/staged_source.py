"""Copies of the items that a rank writes, so that training may change the tensors while the copies are written.

Owns the copies. There is one for each item that this rank writes, in the order of the plan. Objects may change at any
time, so the caller's thread pickles them when a ``StagedSource`` is made. If there is no room for a copy of a tensor,
the tensor is borrowed: the engine writes it first, and until then it must not change.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import accumulate

import torch

from robust_dcp.report import sizes_in_words
from robust_dcp.staging.blocks import NOT_PINNED, host_address, wait_for_copies
from robust_dcp.staging.staging_buffers import STAGING, StagingBuffer, StagingBuffers, TensorForm
from robust_dcp.storage.records.record import is_fixed_size
from robust_dcp.storage.writing.item_source import ItemSource, raise_named, saved_by_torch

logger = logging.getLogger(__name__)

_BATCH_NBYTES = 256 << 20
"""About so many bytes are copied in one call. After each call the other ranks hear of the progress."""


class HeldItems(ItemSource):
    """Items whose data is in memory."""

    data: list[torch.Tensor | io.BytesIO]

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        return self.data[place]


class StagedSource(HeldItems):
    """An ``ItemSource`` with copies of the items of another source.

    If an item cannot be taken or copied, the error is kept: :meth:`ready` raises it, in an exchange of all ranks.

    Args:
        make: makes the source of the data. All its items are taken now, and referenced until they have been copied.
        note_progress: called with the number of bytes copied so far, and the number of bytes of all tensors.
        buffers: the memory for the copies.
        limit_nbytes: the most bytes that all copies of tensors may take together; ``None`` for no limit.

    Attributes:
        are_free: a future that is done when the tensors may change.
        borrowed: the places of the tensors that are not copied. It is known after :meth:`copy`.
        copied, forms: the places of the copies in the plan, and their forms, in their order in the memory.
        how: remarks for the report, if tensors were not copied, or were copied in a slower way.
    """

    def __init__(
        self,
        make: Callable[[], ItemSource],
        note_progress: Callable[[int, int], None],
        buffers: StagingBuffers = STAGING,
        *,
        limit_nbytes: int | None = None,
    ) -> None:
        super().__init__((), (), ())
        self.data = []
        self.are_free: Future[None] = Future()
        self.borrowed: Sequence[int] = ()
        self.copied: list[int] = []
        self.forms: list[TensorForm] = []
        self.how: tuple[str, ...] = ()
        self._error: Exception | None = None
        self._note_progress = note_progress
        self._buffers = buffers
        self._limit_nbytes = limit_nbytes
        self._buffer: StagingBuffer | None = None
        self._streams: list[torch.cuda.Stream] = []  # one of each device that has a tensor
        try:
            self._take(make())
        except Exception as error:
            self._error = error

    def _take(self, source: ItemSource) -> None:
        """Note the tensors, and pickle all else, as a save that waits does."""
        self.names, self.expected, self.offsets = source.names, source.expected, source.offsets
        devices = set[torch.device]()
        with torch.no_grad():
            for place in range(len(source)):
                try:
                    data = source.resolve(place)
                    if isinstance(data, torch.Tensor):
                        host_address(data)  # raises if its memory was freed
                        data = data.detach()
                        if not is_fixed_size(data):
                            data = saved_by_torch(data)
                        elif data.is_cuda:
                            devices.add(data.device)
                except Exception as error:
                    raise_named(error, source, place)
                self.data.append(data)
        for device in sorted(devices, key=str):
            # The copies must come after all work that was queued on the device before this call, and before no other.
            self._streams.append(stream := torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, phase: AbstractContextManager[object]) -> None:
        """Copy all tensors that are not :attr:`borrowed`, within a phase.

        When this returns, the copies are complete, and their originals are no longer referenced.
        """
        if self._error is None:
            try:
                with phase:
                    self._copy()
            except BaseException as error:
                for stream in self._streams:
                    with suppress(Exception):  # no copy under way may reach the memory when the next save has it
                        stream.synchronize()
                if not isinstance(error, Exception):  # Ctrl-C
                    self.release()
                    raise
                self._error = error
        if self._error is not None or not self.borrowed:
            self._free()

    def _copy(self) -> None:
        tensors = {place: data for place, data in enumerate(self.data) if isinstance(data, torch.Tensor)}
        if self._limit_nbytes is not None:  # the largest have no room, so that they are few
            smallest_first = sorted(tensors, key=lambda place: tensors[place].nbytes)
            ends = accumulate(tensors[place].nbytes for place in smallest_first)
            limited = zip(smallest_first, ends, strict=True)
            self.borrowed = sorted(place for place, end in limited if end > self._limit_nbytes)
        if self.borrowed:
            size = sizes_in_words(sum(tensors[place].nbytes for place in self.borrowed))
            self.how = (f"{size} of it while training waited: they are over staging_nbytes",)
        places = sorted(tensors.keys() - set(self.borrowed))
        originals = [tensors[place] for place in places]
        forms = [(tensor.dtype, tensor.shape) for tensor in originals]
        total_nbytes, done_nbytes = sum(tensor.nbytes for tensor in originals), 0
        try:
            buffer = self._buffers.take(forms, self._streams[0].device if self._streams else None)
        except (OSError, MemoryError) as error:  # a slow save is better than none
            why = f"there is no memory for copies of {sizes_in_words(total_nbytes)} ({error})"
            self._say(f"while training waited: {why}")
            self.borrowed = sorted(tensors)
            return
        self._buffer, self.copied, self.forms = buffer, places, forms
        if self._streams:
            buffer.block.pin(self._streams[0].device)
            if buffer.block.pinned_by is None:
                self._say(NOT_PINNED)
        copies = buffer.tensors(forms)
        with torch.no_grad(), self.streams():
            first, nbytes = 0, 0
            for end, original in enumerate(originals, 1):
                nbytes += original.nbytes
                if nbytes >= _BATCH_NBYTES or end == len(originals):
                    self._copy_batch(places[first:end], copies[first:end], originals[first:end])
                    first, nbytes, done_nbytes = end, 0, done_nbytes + nbytes
                    self._note_progress(done_nbytes, total_nbytes)
        for stream in self._streams:
            wait_for_copies(stream)
        for place, copy in zip(places, copies, strict=True):
            self.data[place] = copy

    def _copy_batch(self, places: Sequence[int], copies: list[torch.Tensor], originals: list[torch.Tensor]) -> None:
        try:
            torch._foreach_copy_(copies, originals, non_blocking=bool(self._streams))
        except Exception:  # copy one by one, to find out which tensor fails
            place = 0
            try:
                for number, copy in enumerate(copies):
                    place = places[number]
                    copy.copy_(originals[number])
            except Exception as error:
                raise_named(error, self, place)

    def _say(self, how: str) -> None:
        self.how = (*self.how, how)
        if (kind := how.partition(":")[0]) not in _LOGGED:
            _LOGGED.add(kind)
            logger.warning("an async save takes longer than it could (said once): %s", how)

    @contextmanager
    def streams(self) -> Iterator[None]:
        """A ``with`` block for work on the devices. It runs after all work that was queued when this object was
        made."""
        with ExitStack() as within:
            for stream in self._streams:
                within.enter_context(torch.cuda.device(stream.device))  # to leave a stream wakes the device before it
                within.enter_context(torch.cuda.stream(stream))
            yield

    def ready(self) -> StagedSource:
        """This source, for the writer.

        Raises:
            Exception: an item could not be taken or copied. A ``RobustCheckpointError`` names it.
        """
        if self._error is not None:
            raise self._error
        return self

    @property
    def shared(self) -> StagingBuffer | None:
        """The memory of the copies, if another process can map it and it holds all of them."""
        return None if self._buffer is None or self._buffer.fd is None or self.borrowed else self._buffer

    def give_back(self) -> None:
        """Note that the borrowed tensors have been written."""
        for place in self.borrowed:
            self.data[place] = io.BytesIO()  # so that the tensor is no longer referenced
        self._free()

    def release(self) -> None:
        """Give the memory to the next save: this one is over. The copies must not be used any more."""
        self._free()
        self.data = []
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None

    def _free(self) -> None:
        if not self.are_free.done():
            self.are_free.set_result(None)


_LOGGED: set[str] = set()
