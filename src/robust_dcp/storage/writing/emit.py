"""Writes the blocks of a file: the bytes of many records on their way from tensors to the drive.

A block is made in memory and written in one call. What is large and lies right in the tensor is written from there; all
else is copied into the block and checksummed while the processor's cache still holds it. The checksums of a record that
was cut are known when its last piece is written, so they are put in at the end, with the footer or the head of the
file.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.comm import Stopped
from robust_dcp.staging.blocks import Block as Memory
from robust_dcp.staging.blocks import (
    BlockLease,
    TensorBytes,
    copy_bytes,
    flat_bytes,
    host_address,
    memory_at,
    to_host_together,
)
from robust_dcp.storage.committing.saving_file import is_gone
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.kernel import BUFFERED
from robust_dcp.storage.files.paths import uncommitted_name
from robust_dcp.storage.layouts.footer import footer_of, sorted_sums
from robust_dcp.storage.layouts.places import LARGE_NBYTES, RECORD_ALIGNMENT, Placements
from robust_dcp.storage.options import WriteOptions
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32, cuts, joined, merged, sums_of
from robust_dcp.storage.records.record import Record, bytes_of, framed_record, is_fixed_size, raw_record
from robust_dcp.storage.writing.blocks import Block, FileOrder, Piece, cut_into_blocks
from robust_dcp.storage.writing.item_source import (
    ItemSource,
    changed,
    planned_tensor,
    raise_named,
    saved_by_torch,
)

_SMALL_NBYTES: Final = 16 << 10
"""If records are smaller than this on average, Python's work for each takes longer than copies and checksums."""

_CRC_DTYPE: Final = np.dtype("<u4")


class FilesOfRank(msgspec.Struct, frozen=True, eq=False):
    """The files that one rank writes in a save, and how it writes them.

    Attributes:
        directory: the checkpoint's directory. It exists already.
        mark: the mark of the save, which is in the files.
        names: the names of the files after the commit. They have the mark, too.
        placements: where each item lies.
    """

    disk: Disk
    directory: str
    rank: int
    mark: str
    names: Sequence[str]
    placements: Placements
    options: WriteOptions

    def remove(self) -> list[str]:
        """Remove the files of a save that failed, or whose process died. Returns the paths of those that stay."""
        paths = [os.path.join(self.directory, uncommitted_name(name)) for name in self.names]
        return [path for path in paths if not is_gone(self.disk.unlink, path)]


class WriteContext(msgspec.Struct, eq=False):
    """What the files of a rank, and the threads that write them, share.

    It notices that somebody changes a tensor while it is saved: a side thread, or a hook. Data that is checksummed and
    then written from the tensor itself would be damaged. Data that is copied would be half old and half new. If the
    source does not know of changes, none are noticed.

    Args:
        files: the files, and how they are written.
        source: the items.
        lease: lends blocks of memory, and copies into them from a device.
        page_nbytes: the unit of writes.
        note_progress: is told the bytes written so far, and the bytes of all items of fixed size. It raises if the save
            has been given up elsewhere.

    Attributes:
        failed: whether a thread has failed, so that the others stop.
        packing: a lock, held by the thread that packs small records.
        appended: for each item of variable size its place in the plan, its offset and its length in bytes.
        taken: the items whose data is read where it lies, and their versions before that.
    """

    files: FilesOfRank
    source: ItemSource
    lease: BlockLease
    page_nbytes: int
    note_progress: Callable[[int, int], None]
    failed: threading.Event = msgspec.field(default_factory=threading.Event)
    packing: threading.Lock = msgspec.field(default_factory=threading.Lock)
    appended: list[tuple[int, int, int]] = []
    taken: dict[int, int] = {}
    _written_nbytes: int = 0
    _counting: threading.Lock = msgspec.field(default_factory=threading.Lock)

    def check_stop(self) -> None:
        """Raise if the save has been given up, here or elsewhere."""
        if self.failed.is_set():
            raise Stopped
        total_nbytes = sum(self.files.placements.file_nbytes)
        self.note_progress(min(self._written_nbytes, total_nbytes), total_nbytes)

    def wrote(self, nbytes: int) -> None:
        """Count bytes that are written, and :meth:`check_stop`."""
        with self._counting:
            self._written_nbytes += nbytes
        self.check_stop()

    def take(self, place: int) -> None:
        """Note an item whose data is read where it lies, from now until the end of the save."""
        self.taken.setdefault(place, *self.source.versions([place]))

    def check_unchanged(self, before: Mapping[int, int]) -> None:
        """Make sure that tensors have the versions that they had ``before``, by their places.

        Raises:
            PlanConflict: a tensor was changed.
        """
        for (place, earlier), later in zip(before.items(), self.source.versions(list(before)), strict=True):
            if earlier != later and -1 not in (earlier, later):
                raise changed(self.source, place)


class _CutRecord(msgspec.Struct):
    """A record that is written in pieces.

    Attributes:
        data: its bytes.
        missing_nbytes: how much of the record is still to be written.
        sums: for each written piece its range of the data, and the checksums of its blocks.
    """

    data: TensorBytes
    missing_nbytes: int
    sums: list[tuple[int, int, list[int]]] = msgspec.field(default_factory=list)


class FileEmitter(msgspec.Struct, eq=False):
    """The blocks of one file, and what is put in when all of them are written.

    Attributes:
        file, order: the file, and what is written to it.
        nbytes: the length of the file, without the footer. It grows as items of variable size get their places.
        sums: the checksums of its items.
        held: the data of items of variable size that has been asked for, and not been copied.
        how: ``direct``, or ``buffered`` with the reason. This and what follows are known after :meth:`finish`.
        crcs_of_parameters, crcs_of_others: the checksums in ``sums``, as uint32 in the order of the file.
    """

    file: OpenFile
    order: FileOrder
    nbytes: int
    context: WriteContext
    sums: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint32]]] = []
    held: dict[int, torch.Tensor] = {}
    how: str = ""
    crcs_of_parameters: bytes = b""
    crcs_of_others: bytes = b""
    _cutting: threading.Lock = msgspec.field(default_factory=threading.Lock)  # of the records in pieces
    _pieces: dict[int, _CutRecord] = {}
    _late: list[tuple[int, bytes]] = []
    _appended: list[tuple[int, int, int]] = []

    def blocks(self, borrowed: Collection[int], *, are_borrowed: bool) -> Iterator[Block]:
        """The blocks that hold borrowed items, or those that hold none.

        A file with items of variable size is cut while it is written, so all its blocks belong to one of the two.
        """
        order = self.order
        if order.variable:
            is_early = not {*order.variable, *order.places.tolist()}.isdisjoint(borrowed) if borrowed else False
            return self._blocks_of_variable() if is_early == are_borrowed else iter(())
        if borrowed:
            return (block for block in order.blocks if block.all_places.isdisjoint(borrowed) != are_borrowed)
        return iter(() if are_borrowed else order.blocks)

    # Items of variable size: objects, and tensors of a planner that is not ours.

    def resolve(self, place: int, record: Record) -> torch.Tensor:
        """The data of an item."""
        held = self.held.pop(place, None)
        return planned_tensor(self.context.source, place, record) if held is None else held

    def _blocks_of_variable(self) -> Iterator[Block]:
        """Ask for the items one after the other, and cut the file as far as its records are known."""
        order, block_nbytes, done = self.order, self.context.lease.block_nbytes, 0
        places, starts, records = order.places.tolist(), order.starts.tolist(), list(order.records)

        def blocks(begin: int, end: int) -> list[Block]:
            return cut_into_blocks(
                np.array(places, dtype=np.int64),
                np.array(starts, dtype=np.int64),
                records,
                begin=begin,
                end=end,
                block_nbytes=block_nbytes,
                page_nbytes=self.context.page_nbytes,
            )

        for place in order.variable:
            self.context.check_stop()
            record, self.held[place] = self._resolved(place)
            start = -(-self.nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
            self.nbytes = start + record.nbytes
            self._appended.append((place, start, record.nbytes))
            places.append(place)
            starts.append(start)
            records.append(record)
            whole = self.nbytes // block_nbytes * block_nbytes
            if whole > done:
                yield from blocks(done, whole)
                done = whole
                n_over = bisect_right(range(len(starts)), done, key=lambda n: starts[n] + records[n].nbytes)
                del places[:n_over], starts[:n_over], records[:n_over]
        if places:
            yield from blocks(done, self.nbytes + 1)

    def _resolved(self, place: int) -> tuple[Record, torch.Tensor]:
        """An item as a record and the tensor of its data. We do not look into what torch or pickle wrote: there is
        nothing around it, and its checksums cover all of it.
        """
        try:
            data = self.context.source.resolve(place)
            self.context.take(place)
            if isinstance(data, torch.Tensor):
                record = framed_record(data.dtype, tuple(data.shape)) if is_fixed_size(data) else None
                if record is not None:
                    return record, data
                data = saved_by_torch(data)
            tensor = _tensor_of(data.getvalue())
            return raw_record(torch.uint8, (len(tensor),)), tensor
        except Exception as error:
            raise_named(error, self.context.source, place)

    # Records in pieces.

    def data_of(self, piece: Piece) -> TensorBytes:
        """The data of the record that ``piece`` is a part of. It is asked for once."""
        with self._cutting:
            known = self._pieces.get(piece.place)
            if known is None:
                tensor = self.resolve(piece.place, piece.record)
                self.context.take(piece.place)
                known = self._pieces[piece.place] = _CutRecord(TensorBytes(tensor), piece.record.nbytes)
            return known.data

    def note_sums(self, piece: Piece, begin: int, end: int, sums: list[int]) -> int:
        """Keep the checksums of bytes ``begin`` to ``end`` of the data of a record in pieces.

        Returns:
            the CRC-32 of its data if this was the last of it. If other blocks have written the rest, it is put in when
            the file is finished.
        """
        record = piece.record
        with self._cutting:
            known = self._pieces[piece.place]
            if begin < end:
                known.sums.append((begin, end, sums))
            known.missing_nbytes -= piece.end - piece.begin
            if known.missing_nbytes:
                return 0
            del self._pieces[piece.place]
        blocks = merged(sorted(known.sums, key=lambda part: part[0]))
        crc = joined(blocks, record.data_nbytes)
        offset, nbytes = (np.array([n]) for n in (piece.start + record.data_offset, record.data_nbytes))
        self.sums.append((offset, nbytes, np.array(blocks, dtype=np.uint32)))
        if not piece.is_whole:
            self._late += [(piece.start + at, crc.to_bytes(4, "little")) for at in record.crc32_at]
        return crc

    # Writes.

    def takes(self, address: int, offset: int) -> bool:
        """Whether whole pages of memory from ``address`` on can be written to ``offset`` without a copy."""
        alignment = self.file.alignment or BUFFERED
        return (address + -offset % self.context.page_nbytes) % alignment.memory == 0

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write whole pages.

        Raises:
            StorageError: the file system refused.
        """
        self.context.files.disk.write_pages(self.file, parts[0] if len(parts) == 1 else parts, offset)
        self.context.wrote(sum(map(len, parts)))

    def finish(self) -> None:
        """After the last block, put in what is known only now, make the file durable, and close it."""
        disk, file, context, order = self.context.files.disk, self.file, self.context, self.order
        sums, late = sorted_sums(self.sums), self._late
        are_parameters = np.append(order.are_parameters, np.zeros(len(order.variable), dtype=np.bool_))
        are_parameters = np.repeat(are_parameters, -(-sums.nbytes // SUM_NBYTES))
        self.crcs_of_parameters = sums.crcs[are_parameters].tobytes()
        self.crcs_of_others = sums.crcs[~are_parameters].tobytes()
        if order.head is None:
            items = (*order.items, *order.variable_items)
            late.append((self.nbytes, footer_of(context.files.mark, self.nbytes, sums, items)))
        else:
            late.append((0, order.head.encode(context.files.mark, sums)))
        if file.alignment is not None:
            self.how = "direct"
            disk.use_page_cache(file, "")  # these bytes are few, and not whole pages
        else:
            self.how = f"buffered: {file.why_buffered}" if file.why_buffered else "buffered"
        end = self.nbytes
        for at, data in sorted(late):
            disk.pwrite(file, data, at)
            context.wrote(len(data))
            end = max(end, at + len(data))
        disk.truncate(file, end)  # the last page was written whole
        disk.fsync(file)
        disk.close(file)
        context.appended.extend(self._appended)


def _tensor_of(data: bytes) -> torch.Tensor:
    """``data`` as a uint8 tensor, without a copy and without torch's warning of read-only memory. It is only read."""
    # Not `getbuffer` of the BytesIO: a buffer with a view of it cannot be closed, and Python 3.14 complains on stderr
    # if both become garbage together, in an error's traceback for example.
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    array: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * len(data)).from_address(address))
    tensor = torch.from_numpy(array)
    tensor.keeps_alive = data  # type: ignore[attr-defined]
    return tensor


class Emission(msgspec.Struct, eq=False):
    """One block on its way to its file. One thread calls :meth:`prepare`, :meth:`write` and then :meth:`drop`, even if
    one of the first two failed.
    """

    block: Block
    file: FileEmitter
    _memory: Memory | None = None
    # Large data that has been asked for, and its copies from a device that are running. It is kept until the block is
    # written, because it may be written from where it lies.
    _data: dict[int, TensorBytes] = {}
    _waits: dict[int, Callable[[], None]] = {}
    _straight: list[tuple[int, int, memoryview]] = []

    def prepare(self) -> bool:
        """Ask for the large data, and begin the copies that run by themselves. Returns whether any does: then the
        thread does something else.
        """
        block, context = self.block, self.file.context
        self._memory = memory = context.lease.take()
        place = 0
        try:
            for piece in block.pieces:
                place = piece.place
                data = self._data[place] = self.file.data_of(piece)
                begin, end = piece.data_range
                if begin < end and context.lease.can_run_ahead(data):
                    at = piece.start + piece.record.data_offset + begin - block.offset
                    self._waits[place] = context.lease.begin(data, begin, end, memory, at)
        except Exception as error:
            raise_named(error, context.source, place)
        return bool(self._waits)

    def write(self) -> None:
        """Make the bytes of the block and write them.

        Raises:
            PlanConflict: an item is not what was planned.
            RobustCheckpointError: an item cannot be resolved or read; the error names it.
            StorageError: the file system refused.
        """
        block, context, memory = self.block, self.file.context, self._memory
        if memory is None:
            raise RuntimeError("a block is written before it is prepared")
        # Packing many small items is mostly Python code, and Python runs one thread at a time. Two threads that pack
        # would take turns at every call that releases the GIL, and need twice the time of one. So one packs while the
        # others write.
        is_small = block.nbytes < _SMALL_NBYTES * len(block.places)
        with context.packing if is_small else nullcontext():
            context.check_stop()  # the save may have been given up while this thread waited for its turn
            for begin, end in block.zeros:
                memory.data[begin:end] = 0
            place = 0
            try:
                for piece in block.pieces:
                    place = piece.place
                    self._put_piece(piece, memory)
            except Exception as error:
                raise_named(error, context.source, place)
            if len(block.places):
                self._put_small(memory)
        context.check_stop()
        if block.nbytes:
            # The bytes of the block in the order of the file: its memory, and between its pages that of tensors.
            parts, done = list[memoryview](), 0
            for begin, end, data in sorted(self._straight, key=lambda straight: straight[0]):
                parts += [memory.view[done:begin], data]
                done = end
            self.file.write(block.offset, list(filter(len, (*parts, memory.view[done : block.nbytes]))))

    def drop(self) -> None:
        """Give the memory back, once no device copies into it any more."""
        for wait in self._waits.values():
            wait()
        self._data, self._waits = {}, {}
        if self._memory is not None:
            self.file.context.lease.give_back(self._memory)
        self._memory = None

    # Pieces.

    def _put_piece(self, piece: Piece, memory: Memory) -> None:
        offset, record = self.block.offset, piece.record
        begin, end = piece.data_range
        data_at = piece.start + record.data_offset
        for at, content in ((piece.start, record.header), (data_at + record.data_nbytes, record.trailer)):
            low, high = max(at, piece.begin), min(at + len(content), piece.end)
            if low < high:
                memory.view[low - offset : high - offset] = content[low - at : high - at]
        sums = self._put_data(piece.place, begin, end, memory, data_at + begin - offset) if begin < end else []
        crc = self.file.note_sums(piece, begin, end, sums)
        if piece.is_whole:
            for at in record.crc32_at:
                memory.view[piece.start - offset + at :][:4] = crc.to_bytes(4, "little")

    def _put_data(self, place: int, begin: int, end: int, memory: Memory, at: int) -> list[int]:
        """Put bytes ``begin`` to ``end`` of an item to ``at`` in the block. Returns the CRC-32s of their blocks."""
        data, view = self._data[place], memory.view[at : at + end - begin]
        if place in self._waits:
            self._waits[place]()
            return sums_of(view, begin)
        if data.address is None:
            data.copy(begin, end, memory, at)  # at once: each copy from a device waits for the device
            return sums_of(view, begin)
        address = data.address + begin
        if end - begin >= LARGE_NBYTES and self.file.takes(address, at):
            return self._put_straight(memory_at(address, end - begin), begin, memory, at)
        sums = []
        for first, last in cuts(begin, end):
            data.copy(first, last, memory, at + first - begin)
            sums.append(crc32(view[first - begin : last - begin]))
        return sums

    def _put_straight(self, data: memoryview, begin: int, memory: Memory, at: int) -> list[int]:
        """Copy only those bytes that share a page with their neighbours. The rest is written from the tensor itself."""
        page_nbytes, end = self.file.context.page_nbytes, at + len(data)
        first, last = -(-at // page_nbytes) * page_nbytes, end // page_nbytes * page_nbytes
        memory.view[at:first] = data[: first - at]
        memory.view[last:end] = data[last - at :]
        self._straight.append((first, last, data[first - at : last - at]))
        return sums_of(data, begin)

    # Small records, in columns.

    def _put_small(self, memory: Memory) -> None:
        block, context = self.block, self.file.context
        places, data_at = block.places.tolist(), block.data_at.tolist()
        # Usually the items' own tensors tell of changes. Asking the source for each would take a tenth of the copy.
        asked = places if context.source.holds_wrappers else []
        versions = dict(zip(asked, context.source.versions(asked), strict=True))
        crcs = np.zeros(len(places), dtype=_CRC_DTYPE)
        sums: dict[int, list[int]] = {}  # of records of several blocks
        on_device: list[tuple[int, int, torch.Tensor]] = []
        items = zip(places, data_at, block.records, block.tails, strict=True)
        first = 0
        for n_records in block.runs:
            n_before = len(on_device)
            self._copy_run(first, islice(items, n_records), memory, on_device)
            numbers: Sequence[int] = range(first, first + n_records)
            if len(on_device) > n_before:
                waiting = {number for number, _, _ in on_device[n_before:]}
                numbers = [number for number in numbers if number not in waiting]
            self._checksum(numbers, data_at, memory, crcs, sums)
            first += n_records
        if on_device:
            # All at once: each copy from a device waits for it, however small the copy is.
            try:
                copies = to_host_together([data for _, _, data in on_device])
            except Exception as error:
                raise_named(error, context.source, places[on_device[0][0]])
            for (_, begin, _), copy in zip(on_device, copies, strict=True):
                memory.view[begin : begin + copy.numel()] = bytes_of(copy)
            self._checksum([number for number, _, _ in on_device], data_at, memory, crcs, sums)
        if versions:
            context.check_unchanged(versions)
        if len(block.checked):
            digits = crcs[block.checked].view(np.uint8).reshape(-1, 1, _CRC_DTYPE.itemsize)
            memory.data[block.crc32_at[:, :, None] + np.arange(_CRC_DTYPE.itemsize)] = digits
        counts = -(-block.data_nbytes // SUM_NBYTES)
        of_blocks, behind = np.repeat(crcs, counts).astype(np.uint32), np.cumsum(counts).tolist()
        for number, blocks in sums.items():
            of_blocks[behind[number] - len(blocks) : behind[number]] = blocks
        self.file.sums.append((block.offset + block.data_at, block.data_nbytes, of_blocks))

    def _copy_run(
        self,
        first: int,
        items: Iterable[tuple[int, int, Record, bytes]],
        memory: Memory,
        on_device: list[tuple[int, int, torch.Tensor]],
    ) -> None:
        """Copy some records, but for data on a device. Of that, ``on_device`` receives the number of the record, where
        it goes to, and its bytes.
        """
        target, address, file, source = memory.view, memory.address, self.file, self.file.context.source
        place = 0
        try:
            for number, (place, begin, record, tail) in enumerate(items, first):
                nbytes, header = record.data_nbytes, record.header
                end = begin + nbytes
                target[begin - len(header) : begin] = header
                target[end : end + len(tail)] = tail
                tensor = file.resolve(place, record) if file.held else planned_tensor(source, place, record)
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
                    on_device.append((number, begin, flat_bytes(tensor)))
                if version >= 0 and tensor._version != version:
                    raise changed(source, place)
        except Exception as error:
            raise_named(error, source, place)

    def _checksum(
        self,
        numbers: Sequence[int],
        data_at: list[int],
        memory: Memory,
        crcs: npt.NDArray[np.uint32],
        sums: dict[int, list[int]],
    ) -> None:
        """Checksum the data of some records: all of it, and each block of those that have several."""
        view, records = memory.view, self.block.records
        short = [n for n in numbers if records[n].data_nbytes <= SUM_NBYTES]
        crcs[short] = [crc32(view[data_at[n] : data_at[n] + records[n].data_nbytes]) for n in short]
        if len(short) < len(numbers):
            for n in set(numbers).difference(short):
                nbytes = records[n].data_nbytes
                sums[n] = sums_of(view[data_at[n] : data_at[n] + nbytes])
                crcs[n] = joined(sums[n], nbytes)
