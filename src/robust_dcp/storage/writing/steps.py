"""The steps of writing a file: pack a block and write it, write a piece of a large record, or append items.

One thread does one step at a time. This module owns the steps of a file, and finishes the file once, after its last
step. It never runs threads. ``engine`` calls it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

from robust_dcp.staging import Block as Memory
from robust_dcp.storage.layouts.footer import FileSums, footer_of
from robust_dcp.storage.layouts.places import Slot
from robust_dcp.storage.writing.append import Appended, append_items
from robust_dcp.storage.writing.data_files import DataFile
from robust_dcp.storage.writing.earlier_file import Range
from robust_dcp.storage.writing.item_source import Changes, ItemSource
from robust_dcp.storage.writing.large_record import large_pieces
from robust_dcp.storage.writing.pack import Block, Packing
from robust_dcp.storage.writing.paged_file import FileOutput
from robust_dcp.storage.writing.write_order import LargeRecord, WriteOrder

__all__ = ["FileSteps", "Step", "StepQueue", "WriteContext"]

SMALL_NBYTES: Final = 16 << 10
"""If records are smaller than this on average, Python's work for each takes longer than copies and checksums."""


class Step(Protocol):
    """A step is done by one thread: :meth:`prepare`, then :meth:`write`, then :meth:`drop`, even if one of the first
    two failed.
    """

    def prepare(self) -> bool:
        """Begin a copy that runs by itself, if there is one. Returns whether there is: the thread then does something
        else.
        """

    def write(self) -> None: ...

    def drop(self) -> None: ...


@dataclass(frozen=True)
class WriteContext:
    """What the steps of all files of a rank share.

    Attributes:
        slots: the known places of the items of variable size.
        mark: the mark of the save.
        check_stop: raises if the save has been given up.
        packing: a lock, held by the thread that packs small records.
        changes: notices tensors that change while they are saved.
        appended: where the items of variable size were written.
    """

    source: ItemSource
    changes: Changes
    slots: dict[int, Slot]
    check_stop: Callable[[], None]
    mark: str
    packing: threading.Lock = field(default_factory=threading.Lock)
    appended: list[Appended] = field(default_factory=list)


class FileSteps:
    """The steps of one file, in order, and how many of them are being done.

    Args:
        borrowed: places of the items to write before all others.
    """

    def __init__(
        self,
        file: DataFile,
        order: WriteOrder,
        fixed_nbytes: int,
        output: FileOutput,
        context: WriteContext,
        borrowed: Collection[int] = (),
    ) -> None:
        self._file = file
        self._mark = context.mark
        self._output = output
        early, late = _split(order, borrowed)
        # A generator that never starts would keep a reference to this object, and so all memory of the save, until
        # Python's garbage collector runs.
        self._borrowed = self._in_order(early, fixed_nbytes, context) if borrowed else iter(())
        self._steps = self._in_order(late, fixed_nbytes, context)
        self._order = order
        self._appended = context.appended
        self._under_way = 0
        self._exhausted = False
        self._lock = threading.Lock()
        file.nbytes = fixed_nbytes

    def _in_order(self, order: WriteOrder, fixed_nbytes: int, context: WriteContext) -> Iterator[Step]:
        for piece in order.fixed:
            if isinstance(piece, Block):
                yield _PackedBlock(piece, self._output, context)
            else:
                yield from large_pieces(piece, context.source, context.changes, self._output)
        if order.variable:
            yield _Appended(self._file, order.variable, fixed_nbytes, self._output, context)

    def take(self, *, only_borrowed: bool = False) -> Step | None:
        """The next step; ``None`` after the last one. Call :meth:`done` after each step.

        Args:
            only_borrowed: take only steps of borrowed items. All of these must be done before others are taken.
        """
        with self._lock:
            step = next(self._borrowed if only_borrowed else self._steps, None)
            if step is not None:
                self._under_way += 1
                return step
            if only_borrowed:
                return None
            is_over = not self._exhausted and not self._under_way
            self._exhausted = True
        if is_over:
            self._finish()
        return None

    def done(self) -> None:
        """Note that a step is done. After the last one, make the file durable and close it."""
        with self._lock:
            self._under_way -= 1
            is_over = self._exhausted and not self._under_way
        if is_over:
            self._finish()

    def _finish(self) -> None:
        file, output = self._file, self._output
        sums = FileSums().columns() if output.sums is None else output.sums.columns()
        footer = b""
        if self._order.head is not None:
            output.file.put(0, self._order.head.encode(self._mark, sums if output.checksums else None))
        else:
            footer = footer_of(self._mark, file.nbytes, sums, self._items() if output.checksums else ())
            output.file.put(file.nbytes, footer)
        output.file.finish(file.nbytes + len(footer))
        file.digest = sums.digest if output.checksums else None

    def _items(self) -> tuple[int, ...]:
        """The identities of the file's items, in the order in which they lie there."""
        order = self._order
        offset_of = {place: offset for place, offset, _ in self._appended} if order.variable else {}
        appended = sorted(zip(map(offset_of.__getitem__, order.variable), order.variable_items, strict=True))
        return (*order.items, *(item for _, item in appended))


def _split(order: WriteOrder, borrowed: Collection[int]) -> tuple[WriteOrder, WriteOrder]:
    """Split the pieces of a file into those that hold borrowed items and the others."""
    if not borrowed:
        return WriteOrder((), ()), order

    def is_early(piece: Block | LargeRecord) -> bool:
        places = piece.places.tolist() if isinstance(piece, Block) else [piece.place]
        return not places_of_borrowed.isdisjoint(places)

    places_of_borrowed = frozenset(borrowed)
    is_variable_early = not places_of_borrowed.isdisjoint(order.variable)
    early = tuple(piece for piece in order.fixed if is_early(piece))
    late = tuple(piece for piece in order.fixed if not is_early(piece))
    return (
        WriteOrder(early, order.variable if is_variable_early else ()),
        WriteOrder(late, () if is_variable_early else order.variable),
    )


class StepQueue:
    """The steps of all files. It takes one step of each file in turn.

    Args:
        only_borrowed: as for :meth:`FileSteps.take`.
        in_turn: ``False``: take all steps of a file before those of the next one.
    """

    def __init__(self, files: Sequence[FileSteps], *, only_borrowed: bool = False, in_turn: bool = True) -> None:
        self._only_borrowed = only_borrowed
        self._in_turn = in_turn
        self._files = deque(files)
        self._lock = threading.Lock()

    def take(self) -> tuple[FileSteps, Step] | None:
        """The next step and its file; ``None`` when none is left."""
        while True:
            with self._lock:
                if not self._files:
                    return None
                file = self._files[0]
                if self._in_turn:
                    self._files.rotate(-1)
            step = file.take(only_borrowed=self._only_borrowed)
            if step is not None:
                return file, step
            with self._lock:
                if file in self._files:
                    self._files.remove(file)


class _PackedBlock:
    """Records that go out in one write."""

    def __init__(self, block: Block, output: FileOutput, context: WriteContext) -> None:
        self._block = block
        self._output = output
        self._context = context
        self._memory: Memory | None = None
        self._packing: Packing | None = None

    def prepare(self) -> bool:
        block = self._block
        if not block.large:
            return False
        runs = self._begin().begin_copies(self._output.copies)
        self._context.changes.take(block.places[list(block.large)].tolist())
        return runs

    def write(self) -> None:
        block, file = self._block, self._output.file
        packing = self._packing or self._begin()
        # Packing many small items is mostly Python code, and Python runs one thread at a time. Two threads that pack
        # would take turns at every call that releases the GIL, and need twice the time of one. So one packs while the
        # others write.
        is_small = block.nbytes < SMALL_NBYTES * len(block.places)
        with self._context.packing if is_small else nullcontext():
            # The save may have been given up while this thread waited for its turn.
            self._context.check_stop()
            places, changes = block.places.tolist(), self._context.changes
            before = changes.before(places)
            sums = packing.pack()
            changes.check(places, before)
        unchanged: tuple[Range, ...] = ()
        if self._output.sums is not None:
            at = block.offset + block.payload
            self._output.sums.add(at, block.payload_nbytes, sums)
            if file.shared is not None:
                unchanged = file.shared.earlier.likely_in_block(at, block.payload_nbytes, sums)
        self._context.check_stop()
        file.skip(block.offset - block.gap_before, block.gap_before)
        file.write(block.offset, *packing.parts(), unchanged=unchanged)

    def drop(self) -> None:
        if self._packing is not None:
            self._packing.drop()
        if self._memory is not None:
            self._output.lease.give_back(self._memory)
        self._packing = self._memory = None

    def _begin(self) -> Packing:
        output = self._output
        self._memory = output.lease.take()
        self._packing = Packing(
            self._block, self._context.source, output.file, self._memory, checksums=output.checksums
        )
        return self._packing


class _Appended:
    """The items of variable size of a file."""

    def __init__(
        self, file: DataFile, places: Sequence[int], after: int, output: FileOutput, context: WriteContext
    ) -> None:
        self._file = file
        self._places = places
        self._after = after
        self._output = output
        self._context = context

    def prepare(self) -> bool:
        return False

    def write(self) -> None:
        context = self._context
        appended, self._file.nbytes = append_items(
            self._places,
            context.slots,
            context.source,
            context.changes,
            self._output,
            after=self._after,
            check_stop=context.check_stop,
        )
        context.appended.extend(appended)

    def drop(self) -> None:
        pass
