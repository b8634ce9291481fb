"""Writes the blocks of a file: the bytes of many records on their way from tensors to the drive.

A block is made in memory and written in one call. What is large and lies right in the tensor is written from there; all
else is copied into the block and checksummed while the processor's cache still holds it. The checksums of a record that
was cut are known when its last piece is written, so they are put in at the end, with the footer or the head of the
file.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import StorageError
from robust_dcp.staging import Block as Memory
from robust_dcp.staging import (
    BlockLease,
    DeviceCopies,
    TensorBytes,
    copy_bytes,
    flat_bytes,
    host_address,
    memory_at,
    on_cpu,
    to_host_together,
)
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.kernel import BUFFERED
from robust_dcp.storage.layouts.footer import FileSums, footer_of
from robust_dcp.storage.layouts.places import LARGE_NBYTES, RECORD_ALIGNMENT, Slot
from robust_dcp.storage.records.checksum import SUM_NBYTES, block_counts, crc32, cuts, joined, merged, sums_of
from robust_dcp.storage.records.record import Record, bytes_of, framed_record, is_fixed_size, raw_record
from robust_dcp.storage.writing.blocks import Block, Cut, FileOrder, cut_into_blocks
from robust_dcp.storage.writing.item_source import Changes, ItemSource, NamedErrors, changed, planned_tensor

__all__ = ["DataFile", "Emission", "FileEmitter", "WriteContext", "saved_by_torch"]

_SMALL_NBYTES: Final = 16 << 10
"""If records are smaller than this on average, Python's work for each takes longer than copies and checksums."""

_CRC_DTYPE: Final = np.dtype("<u4")


@dataclass(eq=False)
class DataFile:
    """One open file of a save in progress.

    Attributes:
        number: the number of the file among the rank's files.
        committed_name: its name after the commit, relative to the checkpoint's directory.
        file: the file, open for writing.
        link: the path of the symbolic link to it in the checkpoint's directory; ``None`` if the file itself lies there.
        nbytes: its length once it has been written, without the footer.
        how: ``direct``, or ``buffered`` with the reason.
    """

    number: int
    committed_name: str
    file: OpenFile
    link: str | None = None
    nbytes: int = 0
    how: str = ""

    @property
    def name(self) -> str:
        """Its current name, relative to the checkpoint's directory."""
        return os.path.basename(self.file.path)

    def note_how(self) -> None:
        """Note for the report how its blocks were written."""
        if self.file.alignment is not None:
            self.how = "direct"
        else:
            self.how = f"buffered: {self.file.why_buffered}" if self.file.why_buffered else "buffered"


@dataclass(frozen=True)
class WriteContext:
    """What the files of a rank share.

    Attributes:
        source: the items.
        changes: notices tensors that change while they are saved.
        slots: the known places of the items of variable size.
        lease: lends blocks of memory.
        copies: copies from a device.
        page_nbytes: the unit of writes.
        must_be_direct: never go back to the page cache: if the file system refuses a direct write, that is an error.
        mark: the mark of the save.
        check_stop: raises if the save has been given up.
        wrote: is told how many bytes were written. What it raises ends the work.
        packing: a lock, held by the thread that packs small records.
        appended: for each item of variable size its place in the plan, its offset and its length in bytes.
    """

    disk: Disk
    source: ItemSource
    changes: Changes
    slots: dict[int, Slot]
    lease: BlockLease
    copies: DeviceCopies
    page_nbytes: int
    must_be_direct: bool
    mark: str
    check_stop: Callable[[], None]
    wrote: Callable[[int], None]
    packing: threading.Lock = field(default_factory=threading.Lock)
    appended: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _CutRecord:
    """A record that is written in pieces.

    Attributes:
        cut: one of its pieces.
        data: its bytes; ``None`` once all pieces are written.
        pieces: for each written piece its range of the data, and the checksums of its blocks.
        missing_nbytes: how much of the record is still to be written.
    """

    cut: Cut
    data: TensorBytes | None
    pieces: list[tuple[int, int, list[int]]] = field(default_factory=list)
    missing_nbytes: int = 0


class FileEmitter:
    """The blocks of one file, and how many of them are on their way. The last one makes the file durable and closes it.

    Args:
        fixed_nbytes: the length of the file without items of variable size.
        borrowed: places of the items to write before all others.
    """

    def __init__(
        self, file: DataFile, order: FileOrder, fixed_nbytes: int, context: WriteContext, borrowed: Collection[int] = ()
    ) -> None:
        self.context = context
        self.sums = FileSums()
        self._file = file
        self._order = order
        self._under_way = 0
        self._exhausted = False
        self._switching = threading.Lock()
        self._lock = threading.Lock()  # of the blocks
        self._cutting = threading.Lock()  # of the records that are cut
        self._cut_records: dict[int, _CutRecord] = {}
        self._appended_here: list[tuple[int, int, int]] = []
        self._held: dict[int, torch.Tensor] = {}
        file.nbytes = fixed_nbytes
        blocks: Iterable[Block] = order.blocks
        self._early: Iterator[Block] = iter(())
        if order.variable:
            blocks = self._blocks_of_variable()
        if borrowed:
            of_all = frozenset(borrowed)
            if order.variable:
                if not of_all.isdisjoint((*order.variable, *order.places.tolist())):
                    self._early, blocks = iter(blocks), ()
            else:
                early = [block for block in order.blocks if not of_all.isdisjoint(_places_in(block))]
                self._early, blocks = iter(early), [block for block in order.blocks if block not in early]
        self._blocks = iter(blocks)

    def take(self, *, only_borrowed: bool = False) -> Emission | None:
        """The next block; ``None`` after the last one. Call :meth:`done` after each.

        Args:
            only_borrowed: take only blocks with borrowed items. All of these must be done before others are taken.
        """
        with self._lock:
            block = next(self._early if only_borrowed else self._blocks, None)
            if block is not None:
                self._under_way += 1
                return Emission(block, self)
            if only_borrowed:
                return None
            is_over = not self._exhausted and not self._under_way
            self._exhausted = True
        if is_over:
            self._finish()
        return None

    def done(self) -> None:
        """Note that a block is written. After the last one, make the file durable and close it."""
        with self._lock:
            self._under_way -= 1
            is_over = self._exhausted and not self._under_way
        if is_over:
            self._finish()

    # Items of variable size: objects, and tensors of a planner that is not ours.

    @property
    def resolve(self) -> Callable[[int, Record], torch.Tensor]:
        """Gives the data of an item. It is no attribute: in a cycle of references all tensors of the save would stay in
        memory until the garbage collector runs.
        """
        return self._resolve_held if self._order.variable else partial(planned_tensor, self.context.source)

    def _resolve_held(self, place: int, frame: Record) -> torch.Tensor:
        held = self._held.pop(place, None)
        return planned_tensor(self.context.source, place, frame) if held is None else held

    def _blocks_of_variable(self) -> Iterator[Block]:
        """Ask for the items one after the other, and cut the file as far as its records are known."""
        order, context = self._order, self.context
        known: list[tuple[int, int, Record]] = []  # place, start, frame
        block_nbytes = context.lease.block_nbytes
        done, end = 0, 0

        def blocks(up_to: int) -> list[Block]:
            places, starts = (np.array([row[n] for row in known], dtype=np.int64) for n in (0, 1))
            return cut_into_blocks(
                *(places, starts, [frame for _, _, frame in known]),
                begin=done,
                end=up_to,
                block_nbytes=block_nbytes,
                page_nbytes=context.page_nbytes,
            )

        known += zip(order.places.tolist(), order.starts.tolist(), order.frames, strict=True)
        for place, start, frame in self._variable_records():
            self._appended_here.append((place, start, frame.nbytes))
            known.append((place, start, frame))
            end = start + frame.nbytes
            whole = end // block_nbytes * block_nbytes
            if whole > done:
                yield from blocks(whole)
                done = whole
                known = [row for row in known if row[1] + row[2].nbytes > done]
        self._file.nbytes = max(self._file.nbytes, end)
        if known:
            yield from blocks(self._file.nbytes + 1)

    def _variable_records(self) -> Iterator[tuple[int, int, Record]]:
        """The place, start and frame of each item, by ascending start. An item that fits into its slot goes there; the
        others go to the end of the file.
        """
        slots, end = self.context.slots, self._file.nbytes
        too_large: list[tuple[int, Record, torch.Tensor]] = []
        places = self._order.variable
        for place in sorted(places, key=lambda place: slots[place].offset) if slots else places:
            self.context.check_stop()
            frame, tensor = self._resolved(place)
            slot = slots.get(place)
            if slot is not None and frame.nbytes > slot.nbytes:
                too_large.append((place, frame, tensor))
                continue
            start = _aligned(end) if slot is None else slot.offset
            end = start + frame.nbytes
            self._held[place] = tensor
            yield place, start, frame
        for place, frame, tensor in too_large:
            start = _aligned(end)
            end = start + frame.nbytes
            self._held[place] = tensor
            yield place, start, frame

    def _resolved(self, place: int) -> tuple[Record, torch.Tensor]:
        """An item as a frame and the tensor of its data. We do not look into what torch or pickle wrote: that has no
        frame, and its checksums cover all of it.
        """
        with NamedErrors(self.context.source, place):
            data = self.context.source.resolve(place)
            self.context.changes.take([place])
            if isinstance(data, torch.Tensor):
                frame = framed_record(data.dtype, tuple(data.shape)) if is_fixed_size(data) else None
                if frame is not None:
                    return frame, data
                data = saved_by_torch(data)
            tensor = _tensor_of(data.getvalue())
            return raw_record(torch.uint8, (len(tensor),)), tensor

    # Records that are cut.

    def data_of(self, cut: Cut) -> TensorBytes:
        """The data of the record that ``cut`` is a piece of. It is asked for once."""
        with self._cutting:
            record = self._cut_records.get(cut.place)
            if record is None:
                tensor = self.resolve(cut.place, cut.frame)
                self.context.changes.take([cut.place])
                record = _CutRecord(cut, TensorBytes(tensor), missing_nbytes=cut.frame.nbytes)
                self._cut_records[cut.place] = record
            if record.data is None:
                raise RuntimeError("a piece of a record came twice")
            return record.data

    def note_piece(self, cut: Cut, begin: int, end: int, sums: list[int]) -> None:
        """Keep the checksums of bytes ``begin`` to ``end`` of the data of a record, which is cut."""
        with self._cutting:
            record = self._cut_records[cut.place]
            if begin < end:
                record.pieces.append((begin, end, sums))
            record.missing_nbytes -= cut.end - cut.begin
            if not record.missing_nbytes:
                record.data = None

    def takes(self, address: int, offset: int) -> bool:
        """Whether whole pages of memory from ``address`` on can be written to ``offset`` without a copy."""
        alignment = self._file.file.alignment or BUFFERED
        return (address + -offset % self.context.page_nbytes) % alignment.memory == 0

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write whole pages. If the file system refuses direct I/O, go back to the page cache.

        Raises:
            StorageError: the file system refused.
        """
        disk, file = self.context.disk, self._file.file
        was_direct = file.alignment is not None
        data = parts[0] if len(parts) == 1 else parts
        try:
            disk.pwrite(file, data, offset)
        except StorageError as error:
            # A short direct write that ended within a block gives this error, too, because its rest is not aligned.
            if error.errno != errno.EINVAL or not was_direct or self.context.must_be_direct:
                raise
            with self._switching:
                if file.alignment is not None:
                    disk.use_page_cache(file, f"a direct write was refused: {error.message}")
            disk.pwrite(file, data, offset)
        self.context.wrote(sum(map(len, parts)))

    def _finish(self) -> None:
        """Put in what is known only now, make the file durable, and close it."""
        disk, file, context = self.context.disk, self._file, self.context
        late: list[tuple[int, bytes]] = []
        for record in self._cut_records.values():
            start, frame = record.cut.start, record.cut.frame
            blocks = merged(sorted(record.pieces, key=lambda piece: piece[0]))
            crc = joined(blocks, frame.data_nbytes).to_bytes(4, "little")
            late += [(start + at, crc) for at in frame.crc32_at]
            offset, nbytes = (np.array([n], dtype=np.int64) for n in (start + frame.data_offset, frame.data_nbytes))
            self.sums.add(offset, nbytes, np.array(blocks, dtype=np.uint32))
        sums = self.sums.columns()
        if self._order.head is None:
            late.append((file.nbytes, footer_of(context.mark, file.nbytes, sums, self._items())))
        else:
            late.append((0, self._order.head.encode(context.mark, sums)))
        file.note_how()
        if file.file.alignment is not None:
            disk.use_page_cache(file.file, "")  # these bytes are few, and not whole pages
        for at, data in sorted(late):
            disk.pwrite(file.file, data, at)
            context.wrote(len(data))
        disk.truncate(file.file, max(file.nbytes, late[-1][0] + len(late[-1][1])))  # the last page was written whole
        disk.fsync(file.file)
        disk.close(file.file)
        context.appended.extend(self._appended_here)

    def _items(self) -> tuple[int, ...]:
        """The identities of the file's items, in the order in which they lie there."""
        order = self._order
        offset_of = {place: offset for place, offset, _ in self._appended_here}
        appended = sorted(zip(map(offset_of.__getitem__, order.variable), order.variable_items, strict=True))
        return (*order.items, *(item for _, item in appended))


def _places_in(block: Block) -> list[int]:
    return [*block.places.tolist(), *(cut.place for cut in block.cuts)]


def _aligned(offset: int) -> int:
    return -(-offset // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def _tensor_of(data: bytes) -> torch.Tensor:
    """``data`` as a uint8 tensor, without a copy and without torch's warning of read-only memory. It is only read."""
    # Not `getbuffer` of the BytesIO: a buffer with a view of it cannot be closed, and Python 3.14 complains on stderr
    # if both become garbage together, in an error's traceback for example.
    array: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * len(data)).from_address(_address_of(data)))
    tensor = torch.from_numpy(array)
    tensor.keeps_alive = data  # type: ignore[attr-defined]
    return tensor


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def saved_by_torch(tensor: torch.Tensor) -> io.BytesIO:
    """The record of a tensor that dtype, shape and data do not describe fully."""
    tensor = on_cpu(tensor.detach())
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save would write all of a larger shared storage
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer


class _Elsewhere(NamedTuple):
    """Small data on a device: the number of its record, where it goes to, and its bytes as uint8 ``[nbytes]``."""

    number: int
    begin: int
    data: torch.Tensor


class _Begun(NamedTuple):
    """Large data that has been asked for already. A copy of it from a device may be running. It is kept until the block
    is written, because it may be written from where it lies.
    """

    data: TensorBytes
    wait: Callable[[], None] | None


class Emission:
    """One block on its way to its file. One thread calls :meth:`prepare`, :meth:`write` and then :meth:`drop`, even if
    one of the first two failed.
    """

    def __init__(self, block: Block, file: FileEmitter) -> None:
        self._block = block
        self._of = file
        self._memory: Memory | None = None
        self._values = np.zeros(len(block.places), dtype=_CRC_DTYPE)
        self._sums: dict[int, list[int]] = {}
        self._begun: dict[int, _Begun] = {}
        self._elsewhere: list[_Elsewhere] = []
        self._straight: list[tuple[int, int, memoryview]] = []

    @property
    def file(self) -> FileEmitter:
        """The file that the block belongs to."""
        return self._of

    def prepare(self) -> bool:
        """Ask for the large data, and begin the copies that run by themselves. Returns whether any does: then the
        thread does something else.
        """
        block, context = self._block, self._of.context
        if not block.large and not block.cuts:
            return False
        memory = self._take_memory()
        with NamedErrors(context.source, 0) as current:
            for cut in block.cuts:
                current.place = cut.place
                data = self._of.data_of(cut)
                begin, end = _data_range(cut)
                at = cut.start + cut.frame.data_offset + begin - block.offset
                self._begin(cut.place, data, begin, end, memory, at)
            for number in block.large:
                current.place = place = int(block.places[number])
                frame = block.frames[number]
                data = TensorBytes(self._of.resolve(place, frame))
                self._begin(place, data, 0, frame.data_nbytes, memory, int(block.payload[number]))
        context.changes.take(block.places[list(block.large)].tolist())
        return any(begun.wait is not None for begun in self._begun.values())

    def write(self) -> None:
        """Make the bytes of the block and write them.

        Raises:
            PlanConflict: an item is not what was planned.
            RobustCheckpointError: an item cannot be resolved or read; the error names it.
            StorageError: the file system refused.
        """
        block, context = self._block, self._of.context
        self._take_memory()
        # Packing many small items is mostly Python code, and Python runs one thread at a time. Two threads that pack
        # would take turns at every call that releases the GIL, and need twice the time of one. So one packs while the
        # others write.
        is_small = block.nbytes < _SMALL_NBYTES * len(block.places)
        with context.packing if is_small else nullcontext():
            context.check_stop()  # the save may have been given up while this thread waited for its turn
            places = block.places.tolist()
            before = context.changes.before(places)
            sums = self._pack()
            context.changes.check(places, before)
        if places:
            self._of.sums.add(block.offset + block.payload, block.payload_nbytes, sums)
        context.check_stop()
        if block.nbytes:
            self._of.write(block.offset, self._parts())

    def drop(self) -> None:
        """Give the memory back, once no device copies into it any more."""
        for begun in self._begun.values():
            if begun.wait is not None:
                begun.wait()
        self._begun = {}
        if self._memory is not None:
            self._of.context.lease.give_back(self._memory)
        self._memory = None

    def _take_memory(self) -> Memory:
        if self._memory is None:
            self._memory = self._of.context.lease.take()
        return self._memory

    def _begin(self, place: int, data: TensorBytes, begin: int, end: int, memory: Memory, at: int) -> None:
        copies, wait = self._of.context.copies, None
        if begin < end and copies.can_run_ahead(data):
            wait = copies.begin(data, begin, end, memory, at)
        self._begun[place] = _Begun(data, wait)

    def _pack(self) -> npt.NDArray[np.uint32]:
        """Make the bytes. Returns uint32 ``[m]``, the CRC-32 of each block of the data of each whole record, one record
        after the other.
        """
        block, memory = self._block, self._take_memory()
        for begin, end in block.zeros:
            memory.data[begin:end] = 0
        payload = block.payload.tolist()
        items = zip(block.places.tolist(), payload, block.frames, block.tails, strict=True)
        deferred: list[int] = []  # records with data that has yet to come from a device
        first = 0
        with NamedErrors(self._of.context.source, 0) as current:
            for cut in block.cuts:
                current.place = cut.place
                self._put_cut(cut, memory)
            for n_records in block.runs:
                n_elsewhere = len(self._elsewhere)
                known = self._copy_run(first, islice(items, n_records), current, memory)
                numbers: Sequence[int] = range(first, first + n_records)
                waiting = {item.number for item in self._elsewhere[n_elsewhere:]}
                if known or waiting:
                    numbers = [number for number in numbers if number not in known and number not in waiting]
                    deferred += waiting
                self._checksum(numbers, payload, memory)
                first += n_records
            self._fetch(current, memory)
        self._checksum(deferred, payload, memory)
        if len(block.checked):
            digits = self._values[block.checked].view(np.uint8).reshape(-1, 1, _CRC_DTYPE.itemsize)
            memory.data[block.crc[:, :, None] + np.arange(_CRC_DTYPE.itemsize)] = digits
        counts = block_counts(block.payload_nbytes)
        sums = np.repeat(self._values, counts).astype(np.uint32)
        behind = np.cumsum(counts).tolist()
        for number, blocks in self._sums.items():
            sums[behind[number] - len(blocks) : behind[number]] = blocks
        return sums

    def _put_cut(self, cut: Cut, memory: Memory) -> None:
        offset, frame = self._block.offset, cut.frame
        begin, end = _data_range(cut)
        data_at = cut.start + frame.data_offset
        for at, content in ((cut.start, frame.header), (data_at + frame.data_nbytes, frame.trailer)):
            low, high = max(at, cut.begin), min(at + len(content), cut.end)
            if low < high:
                memory.view[low - offset : high - offset] = content[low - at : high - at]
        data, wait = self._begun[cut.place]
        sums = self._take(data, wait, begin, end, memory, data_at + begin - offset) if begin < end else []
        self._of.note_piece(cut, begin, end, sums)

    def _take(
        self, data: TensorBytes, wait: Callable[[], None] | None, begin: int, end: int, memory: Memory, at: int
    ) -> list[int]:
        """Put bytes ``begin`` to ``end`` of ``data`` to ``at`` in the block. Returns the CRC-32s of their blocks."""
        view = memory.view[at : at + end - begin]
        if wait is not None:
            wait()
            return sums_of(view, begin)
        if data.address is not None:
            address = data.address + begin
            if end - begin >= LARGE_NBYTES and self._of.takes(address, at):
                return self._take_straight(memory_at(address, end - begin), begin, memory, at)
            sums = []
            for first, last in cuts(begin, end):
                piece = view[first - begin : last - begin]
                data.copy(first, last, memory, at + first - begin)
                sums.append(crc32(piece))
            return sums
        data.copy(begin, end, memory, at)  # at once: each copy from a device waits for the device
        return sums_of(view, begin)

    def _take_straight(self, data: memoryview, begin: int, memory: Memory, at: int) -> list[int]:
        """Copy only those bytes that share a page with their neighbours. The rest is written from the tensor itself."""
        page_nbytes, end = self._of.context.page_nbytes, at + len(data)
        first, last = -(-at // page_nbytes) * page_nbytes, end // page_nbytes * page_nbytes
        memory.view[at:first] = data[: first - at]
        memory.view[last:end] = data[last - at :]
        self._straight.append((first, last, data[first - at : last - at]))
        return sums_of(data, begin)

    def _parts(self) -> list[memoryview]:
        """The bytes of the block in the order of the file: its memory, and between its pages that of tensors."""
        view, parts, done = self._take_memory().view, list[memoryview](), 0
        for begin, end, data in sorted(self._straight, key=lambda straight: straight[0]):
            parts += [view[done:begin], data]
            done = end
        return [part for part in (*parts, view[done : self._block.nbytes]) if len(part)]

    def _copy_run(
        self, first: int, items: Iterable[tuple[int, int, Record, bytes]], current: NamedErrors, memory: Memory
    ) -> set[int]:
        """Copy some records. Returns the numbers of those that were checksummed during the copy."""
        target, address, resolve = memory.view, memory.address, self._of.resolve
        known = set()
        for number, (place, begin, frame, tail) in enumerate(items, first):
            current.place = place
            nbytes, header = frame.data_nbytes, frame.header
            end = begin + nbytes
            target[begin - len(header) : begin] = header
            target[end : end + len(tail)] = tail
            if place in self._begun:
                known.add(number)
                self._note(number, self._take(*self._begun[place], 0, nbytes, memory, begin))
                continue
            tensor = resolve(place, frame)
            if nbytes == 0:
                continue
            try:
                version = tensor._version
            except RuntimeError:  # torch does not count the changes of tensors that were made in inference mode
                version = -1
            found = host_address(tensor)
            if found is not None:
                copy_bytes(address + begin, found, nbytes)
            elif tensor.is_cpu:
                TensorBytes(tensor).copy(0, nbytes, memory, begin)
            else:
                self._elsewhere.append(_Elsewhere(number, begin, flat_bytes(tensor)))
            if version >= 0 and tensor._version != version:
                raise changed(self._of.context.source, place)
        return known

    def _fetch(self, current: NamedErrors, memory: Memory) -> None:
        """Copy everything that is on a device, all at once: each copy from a device waits for it, however small the
        copy is.
        """
        if self._elsewhere:
            current.place = int(self._block.places[self._elsewhere[0].number])
            copies = to_host_together([item.data for item in self._elsewhere])
            for item, copy in zip(self._elsewhere, copies, strict=True):
                memory.view[item.begin : item.begin + copy.numel()] = bytes_of(copy)

    def _checksum(self, numbers: Sequence[int], payload: list[int], memory: Memory) -> None:
        target, frames = memory.view, self._block.frames
        small = [n for n in numbers if frames[n].data_nbytes <= SUM_NBYTES]
        self._values[small] = [crc32(target[payload[n] : payload[n] + frames[n].data_nbytes]) for n in small]
        if len(small) < len(numbers):
            for n in set(numbers).difference(small):
                self._note(n, sums_of(target[payload[n] : payload[n] + frames[n].data_nbytes]))

    def _note(self, number: int, sums: list[int]) -> None:
        """Keep the CRC-32s of the blocks of a record's data, and the CRC-32 of all its data that follows from them."""
        self._values[number] = joined(sums, int(self._block.payload_nbytes[number]))
        self._sums[number] = sums


def _data_range(cut: Cut) -> tuple[int, int]:
    """The range of a record's data that lies in a piece of it; an empty one if there is none."""
    data_at = cut.start + cut.frame.data_offset
    begin = min(max(cut.begin - data_at, 0), cut.frame.data_nbytes)
    return begin, max(min(cut.end - data_at, cut.frame.data_nbytes), begin)
