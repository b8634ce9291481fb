"""A large record in pieces: each goes out by itself, checksummed on the way, and the frame when all are known.

Owns a record while it is being written. Never decides places (``layouts``) nor runs threads (``engine``, which calls it
from several). Ranges of a payload are also what ``append`` writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.staging import Block, BlockLease, DeviceCopies, TensorBytes, memory_at
from robust_dcp.storage.layouts import Frame
from robust_dcp.storage.records.checksum import crc32, crc32_of_both
from robust_dcp.storage.writing.copy_checked import copy_checked
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors, planned_tensor
from robust_dcp.storage.writing.paged_file import PagedFile
from robust_dcp.storage.writing.write_order import LargeRecord

__all__ = ["LargePiece", "Outlet", "PayloadRange", "cut", "large_pieces", "put_frame"]


@dataclass(frozen=True)
class Outlet:
    """What the bytes of one file pass through.

    Attributes:
        file: where they go to.
        lease: of the blocks of memory.
        copies: from a device.
        checksums: whether CRC-32s are computed; 0 stands for them otherwise.
        for_head: uint32, the CRC-32 of each item by its place in the plan, filled in on the way: for a file whose
            head holds them. ``None`` for a file of records.
    """

    file: PagedFile
    lease: BlockLease
    copies: DeviceCopies
    checksums: bool = True
    for_head: npt.NDArray[np.uint32] | None = None

    def crc32(self, data: memoryview) -> int:
        """The CRC-32 of ``data``, or 0."""
        return crc32(data) if self.checksums else 0

    def note(self, places: npt.NDArray[np.int64] | int, checksums: npt.NDArray[np.uint32] | int) -> None:
        """Keep the CRC-32 of items for the head, if there is one."""
        if self.for_head is not None and self.checksums:
            self.for_head[places] = checksums


def cut(payload_at: int, nbytes: int, outlet: Outlet) -> Iterator[tuple[int, int]]:
    """Ranges of a payload, front to back, each of which fits into a block; one of no bytes for an empty payload.

    Args:
        payload_at: where the payload begins in the file.
    """
    begin = 0
    room = outlet.lease.block_nbytes - payload_at % outlet.file.page_nbytes
    while True:
        end = min(begin + room, nbytes)
        yield begin, end
        if end == nbytes:
            return
        begin, room = end, outlet.lease.block_nbytes


class PayloadRange:
    """Bytes ``begin`` to ``end`` of a payload on their way into a file: straight from the tensor where its address and
    the file allow that, through a block where not.

    Args:
        offset: where byte ``begin`` goes to in the file.
    """

    def __init__(self, outlet: Outlet, data: TensorBytes, begin: int, end: int, offset: int) -> None:
        self._outlet = outlet
        self._data = data
        self._begin, self._end = begin, end
        self._offset = offset
        self._block: Block | None = None
        self._wait: Callable[[], None] | None = None

    def begin_copy(self) -> bool:
        """Begin the copy if it will go on by itself, and say whether it does."""
        outlet = self._outlet
        runs = outlet.copies.can_run_ahead(self._data)
        if runs:
            self._block = outlet.lease.take()
            self._wait = outlet.copies.begin(self._data, self._begin, self._end, self._block, self._at)
        return runs

    def write(self) -> int:
        """Write the range; its CRC-32."""
        straight = self._straight()
        if straight is not None:
            checksum = self._outlet.crc32(straight)
            self._outlet.file.write(self._offset, straight)
            return checksum
        try:
            checksum, copied = self._copied()
            self._outlet.file.write(self._offset, copied)
        finally:
            self.drop()
        return checksum

    def drop(self) -> None:
        """Give the block back. A range that was begun must be written or dropped."""
        if self._block is not None:
            if self._wait is not None:
                self._wait()  # nobody else may have the block while a device copies into it
            self._outlet.lease.give_back(self._block)
            self._block = self._wait = None

    def _straight(self) -> memoryview | None:
        data = self._data
        if data.address is None or not self._outlet.file.takes(data.address + self._begin, self._offset):
            return None
        return memory_at(data.address + self._begin, self._end - self._begin)

    def _copied(self) -> tuple[int, memoryview]:
        """The CRC-32 of the range, and its bytes in the block."""
        outlet, at, nbytes = self._outlet, self._at, self._end - self._begin
        if self._block is not None and self._wait is not None:
            self._wait()
            copied = self._block.view[at : at + nbytes]
            return outlet.crc32(copied), copied
        self._block = block = outlet.lease.take()
        checksum = copy_checked(self._data, self._begin, self._end, block, at, checksums=outlet.checksums)
        return checksum, block.view[at : at + nbytes]

    @property
    def _at(self) -> int:
        """Where in the block: pages of the file are pages of the block."""
        return self._offset % self._outlet.file.page_nbytes


class LargePiece:
    """One piece of a large record: a step of the engine."""

    def __init__(self, record: _Record, number: int, begin: int, end: int) -> None:
        self._record = record
        self._number = number
        self._begin, self._end = begin, end
        self._range: PayloadRange | None = None

    def prepare(self) -> bool:
        """Ask for the data, if nobody has, and begin to copy it if that goes on by itself; whether it does."""
        record = self._record
        with NamedErrors(record.source, record.place):
            self._range = PayloadRange(
                record.outlet, record.data(), self._begin, self._end, record.payload_at + self._begin
            )
            return self._range.begin_copy()

    def write(self) -> None:
        """Write what was prepared."""
        if self._range is None:
            raise RuntimeError("a piece must be prepared before it is written")
        with NamedErrors(self._record.source, self._record.place):
            self._record.written(self._number, self._range.write())

    def drop(self) -> None:
        """Instead of :meth:`write`, or after it failed."""
        if self._range is not None:
            self._range.drop()


def large_pieces(large: LargeRecord, source: ItemSource, outlet: Outlet) -> Iterator[LargePiece]:
    """The pieces of a record, in order; they may be written by several threads."""
    record = _Record(large, source, outlet)
    for number, (begin, end) in enumerate(record.ranges):
        yield LargePiece(record, number, begin, end)


def put_frame(file: PagedFile, offset: int, template: Frame, checksum: int) -> None:
    """Write what stands before and after a payload.

    Args:
        offset: of the record.
    """
    file.put(offset, template.header(checksum))
    file.put(offset + template.header_nbytes + template.payload_nbytes, template.trailer(checksum))


class _Record:
    """What the pieces of one record share: the data while they are written, and their checksums."""

    def __init__(self, large: LargeRecord, source: ItemSource, outlet: Outlet) -> None:
        self.place = large.place
        self.source = source
        self.outlet = outlet
        self._large = large
        self.payload_at = large.offset + large.template.header_nbytes
        self.ranges = list(cut(self.payload_at, large.template.payload_nbytes, outlet))
        self._checksums: list[int | None] = [None] * len(self.ranges)
        self._missing = len(self.ranges)
        self._data: TensorBytes | None = None
        self._lock = threading.Lock()

    def data(self) -> TensorBytes:
        with self._lock:
            if self._data is None:
                self._data = TensorBytes(planned_tensor(self.source, self.place, self._large.template))
            return self._data

    def written(self, number: int, checksum: int) -> None:
        """One piece is; with the last one the frame is written too."""
        with self._lock:
            self._checksums[number] = checksum
            self._missing -= 1
            if self._missing:
                return
            self._data = None
        total = 0
        for (begin, end), part in zip(self.ranges, self._checksums, strict=True):
            total = crc32_of_both(total, part or 0, end - begin)
        file, large = self.outlet.file, self._large
        file.leave(large.offset - large.gap_before, large.gap_before)
        put_frame(file, large.offset, large.template, total)
        self.outlet.note(self.place, total)
