"""Writes a large record in pieces. Each piece is checksummed and written by itself; the frame follows when all are
done.

This module owns a record while it is being written. It does not decide places (``layouts`` does) and does not run
threads: ``engine`` calls it from several. ``append`` writes ranges of a payload with it, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from robust_dcp.staging import Block, TensorBytes, memory_at
from robust_dcp.storage.layouts import Frame
from robust_dcp.storage.records.block_sums import joined, merged
from robust_dcp.storage.writing.copy_checked import copy_checked
from robust_dcp.storage.writing.earlier_file import Range
from robust_dcp.storage.writing.item_source import Changes, ItemSource, NamedErrors, planned_tensor
from robust_dcp.storage.writing.paged_file import FileOutput
from robust_dcp.storage.writing.write_order import LargeRecord

__all__ = ["LargePiece", "PayloadRange", "cut", "finish_record", "large_pieces"]


def cut(payload_at: int, nbytes: int, output: FileOutput) -> Iterator[tuple[int, int]]:
    """Cut a payload into ranges that fit into a block, from front to back. An empty payload gives one range of 0 bytes.

    Args:
        payload_at: where the payload begins in the file.
    """
    begin = 0
    room = output.lease.block_nbytes - payload_at % output.file.page_nbytes
    while True:
        end = min(begin + room, nbytes)
        yield begin, end
        if end == nbytes:
            return
        begin, room = end, output.lease.block_nbytes


class PayloadRange:
    """Bytes ``begin`` to ``end`` of a payload, on their way into a file.

    They are written straight from the tensor if its address and the file allow that, and through a block otherwise.

    Args:
        offset: where in the file byte ``begin`` goes.
    """

    def __init__(self, output: FileOutput, data: TensorBytes, begin: int, end: int, offset: int) -> None:
        self._output = output
        self._data = data
        self._begin, self._end = begin, end
        self._offset = offset
        self._block: Block | None = None
        self._wait: Callable[[], None] | None = None

    def begin_copy(self) -> bool:
        """Begin the copy if it will run by itself. Returns whether it does."""
        output = self._output
        runs = output.copies.can_run_ahead(self._data)
        if runs:
            self._block = output.lease.take()
            self._wait = output.copies.begin(self._data, self._begin, self._end, self._block, self._at)
        return runs

    def write(self) -> list[int]:
        """Write the range. Returns the CRC-32s of its pieces, as ``sums_of`` computes them."""
        straight = self._straight()
        if straight is not None:
            sums = self._output.sums_of(straight, self._begin)
            self._output.file.write(self._offset, straight, unchanged=self._likely(sums))
            return sums
        try:
            sums, copied = self._copied()
            self._output.file.write(self._offset, copied, unchanged=self._likely(sums))
        finally:
            self.drop()
        return sums

    def drop(self) -> None:
        """Give the block back. A range must be written or dropped once its copy has begun."""
        if self._block is not None:
            if self._wait is not None:
                self._wait()  # nobody else may use the block while a device copies into it
            self._output.lease.give_back(self._block)
            self._block = self._wait = None

    def _likely(self, sums: list[int]) -> tuple[Range, ...]:
        at = self._offset - self._begin
        return self._output.likely_in_payload(at, self._data.nbytes, self._begin, self._end, sums)

    def _straight(self) -> memoryview | None:
        data = self._data
        if data.address is None or not self._output.file.takes(data.address + self._begin, self._offset):
            return None
        return memory_at(data.address + self._begin, self._end - self._begin)

    def _copied(self) -> tuple[list[int], memoryview]:
        """The CRC-32s of the range, and its bytes in the block."""
        output, at, nbytes = self._output, self._at, self._end - self._begin
        if self._block is not None and self._wait is not None:
            self._wait()
            copied = self._block.view[at : at + nbytes]
            return output.sums_of(copied, self._begin), copied
        self._block = block = output.lease.take()
        sums = copy_checked(self._data, self._begin, self._end, block, at, checksums=output.checksums)
        return sums, block.view[at : at + nbytes]

    @property
    def _at(self) -> int:
        """Where in the block the range begins: at the same place within a page as in the file."""
        return self._offset % self._output.file.page_nbytes


class LargePiece:
    """One piece of a large record: a step of the engine."""

    def __init__(self, record: _Record, number: int, begin: int, end: int) -> None:
        self._record = record
        self._number = number
        self._begin, self._end = begin, end
        self._range: PayloadRange | None = None

    def prepare(self) -> bool:
        """Ask for the data, unless another piece has done so, and begin the copy if it runs by itself. Returns whether
        it does.
        """
        record = self._record
        with NamedErrors(record.source, record.place):
            self._range = PayloadRange(
                record.output, record.data(), self._begin, self._end, record.payload_at + self._begin
            )
            return self._range.begin_copy()

    def write(self) -> None:
        """Write the piece that was prepared."""
        if self._range is None:
            raise RuntimeError("a piece must be prepared before it is written")
        with NamedErrors(self._record.source, self._record.place):
            self._record.written(self._number, self._range.write())

    def drop(self) -> None:
        """Give up the piece, instead of :meth:`write` or after it failed."""
        if self._range is not None:
            self._range.drop()


def large_pieces(large: LargeRecord, source: ItemSource, changes: Changes, output: FileOutput) -> Iterator[LargePiece]:
    """The pieces of a record, in order. Several threads may write them."""
    record = _Record(large, source, changes, output)
    for number, (begin, end) in enumerate(record.ranges):
        yield LargePiece(record, number, begin, end)


def finish_record(
    output: FileOutput, offset: int, template: Frame, ranges: Sequence[tuple[int, int]], sums: Sequence[Sequence[int]]
) -> None:
    """Write what comes before and after a payload, and keep the payload's checksums.

    Args:
        offset: where the record begins in the file.
        ranges: the ranges of the payload, in order.
        sums: for each range, what :meth:`PayloadRange.write` returned.
    """
    nbytes = template.payload_nbytes
    blocks: list[int] = []
    if output.checksums:
        blocks = merged((begin, end, some) for (begin, end), some in zip(ranges, sums, strict=True))
    checksum = joined(blocks, nbytes)
    payload_at = offset + template.header_nbytes
    output.file.put(offset, template.header(checksum))
    output.file.put(payload_at + nbytes, template.trailer(checksum))
    output.note(payload_at, nbytes, blocks)


class _Record:
    """What the pieces of one record share: the data while they are being written, and their checksums."""

    def __init__(self, large: LargeRecord, source: ItemSource, changes: Changes, output: FileOutput) -> None:
        self.place = large.place
        self.source = source
        self._changes = changes
        self.output = output
        self._large = large
        self.payload_at = large.offset + large.template.header_nbytes
        self.ranges = list(cut(self.payload_at, large.template.payload_nbytes, output))
        self._sums: list[Sequence[int]] = [()] * len(self.ranges)
        self._missing = len(self.ranges)
        self._data: TensorBytes | None = None
        self._lock = threading.Lock()

    def data(self) -> TensorBytes:
        with self._lock:
            if self._data is None:
                tensor = planned_tensor(self.source, self.place, self._large.template)
                self._changes.take([self.place])
                self._data = TensorBytes(tensor)
            return self._data

    def written(self, number: int, sums: Sequence[int]) -> None:
        """Note that a piece is written. After the last one, write the frame, too."""
        with self._lock:
            self._sums[number] = sums
            self._missing -= 1
            if self._missing:
                return
            self._data = None
        output, large = self.output, self._large
        output.file.skip(large.offset - large.gap_before, large.gap_before)
        finish_record(output, large.offset, large.template, self.ranges, self._sums)
