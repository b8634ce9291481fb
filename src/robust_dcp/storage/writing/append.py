"""Writes items of unknown length one after the other: objects, and tensors that only ``torch.save`` can write.

This module decides where in its file each of them goes, and makes its bytes. ``engine`` calls it, with one thread for
each file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from robust_dcp.staging import TensorBytes, on_cpu, to_host
from robust_dcp.storage.layouts.places import LARGE_NBYTES, RECORD_ALIGNMENT, Slot
from robust_dcp.storage.records.block_sums import joined
from robust_dcp.storage.records.torch_zip import RecordTemplate, is_fixed_size, payload_view, record_template
from robust_dcp.storage.writing.item_source import Changes, ItemSource, NamedErrors
from robust_dcp.storage.writing.large_record import PayloadRange, cut, finish_record
from robust_dcp.storage.writing.paged_file import FileOutput

__all__ = ["Appended", "append_items", "saved_by_torch"]

Appended = tuple[int, int, int]
"""An item: its place in the plan, and its offset and length in the file, in bytes."""


@dataclass(frozen=True)
class _Whole:
    """A record that is in memory, in parts that follow each other.

    Attributes:
        data_at: where the bytes that ``sums`` cover begin, counted from the start of the record.
        data_nbytes: how many bytes ``sums`` cover.
        sums: their CRC-32s, as ``sums_of`` computes them.
    """

    parts: tuple[bytes | memoryview, ...]
    data_at: int
    data_nbytes: int
    sums: list[int]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts))


@dataclass(frozen=True)
class _Large:
    """A record with a payload that is written in pieces."""

    template: RecordTemplate
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.template.nbytes


def append_items(
    places: Sequence[int],
    slots: dict[int, Slot],
    source: ItemSource,
    changes: Changes,
    output: FileOutput,
    *,
    after: int,
    check_stop: Callable[[], None],
) -> tuple[list[Appended], int]:
    """Write each item to its slot if it has one and fits into it. Write the others to the end of the file.

    Args:
        places: the places of the items in the plan.
        after: where the other contents of the file end, in bytes.
        check_stop: called between blocks. What it raises ends the work.

    Returns:
        (where each item was written, the length of the file).
    """
    stream = _Stream(output, after, check_stop)
    written: list[Appended] = []
    too_large: list[tuple[int, _Whole | _Large]] = []
    try:
        for place in sorted(places, key=lambda place: slots[place].offset) if slots else places:
            slot = slots.get(place)
            with NamedErrors(source, place):
                data = source.resolve(place)
                changes.take([place])
                record = _record(data, output)
                if slot is not None and record.nbytes > slot.nbytes:
                    too_large.append((place, record))
                    continue
                written.append((place, stream.append(record, None if slot is None else slot.offset), record.nbytes))
        for place, record in too_large:
            with NamedErrors(source, place):
                written.append((place, stream.append(record, None), record.nbytes))
        stream.flush()
    finally:
        stream.close()
    return written, stream.end


def _record(data: torch.Tensor | io.BytesIO, output: FileOutput) -> _Whole | _Large:
    if not isinstance(data, torch.Tensor):
        return _opaque(data, output)
    template = record_template(data.dtype, tuple(data.shape)) if is_fixed_size(data) else None
    if template is None:
        return _opaque(saved_by_torch(data), output)
    if template.payload_nbytes >= LARGE_NBYTES:
        return _Large(template, data)
    payload = payload_view(to_host(data))
    sums = output.sums_of(payload)
    checksum = joined(sums, len(payload))
    parts = (template.header(checksum), payload, template.trailer(checksum))
    return _Whole(parts, template.header_nbytes, len(payload), sums)


def saved_by_torch(tensor: torch.Tensor) -> io.BytesIO:
    """The record of a tensor that dtype, shape and data do not describe fully."""
    buffer = io.BytesIO()
    torch.save(_compact(tensor), buffer)
    return buffer


def _opaque(buffer: io.BytesIO, output: FileOutput) -> _Whole:
    """A record in which we do not know where the data begins. So its checksums cover all of it."""
    # Not `getbuffer`: a buffer with a view of it cannot be closed, and Python 3.14 complains on stderr if both become
    # garbage together, in an error's traceback for example. `getvalue` does not copy either.
    data = memoryview(buffer.getvalue())
    return _Whole((data,), 0, len(data), output.sums_of(data))


class _Stream:
    """The end of a file. Bytes are gathered in a block, which is written when it is full."""

    def __init__(self, output: FileOutput, begin: int, check_stop: Callable[[], None]) -> None:
        self._output = output
        self._check_stop = check_stop
        self._block = output.lease.take()
        self._begin = begin  # the block holds bytes of the file from here on
        self.end = begin

    def append(self, record: _Whole | _Large, at: int | None) -> int:
        """Write a record at ``at``, or at the next free place. Returns its offset."""
        offset = -(-self.end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT if at is None else at
        self._move_to(offset)
        if isinstance(record, _Large):
            self._append_large(record)
        else:
            for part in record.parts:
                self._append(part)
            self._output.note(offset + record.data_at, record.data_nbytes, record.sums)
        return offset

    def flush(self) -> None:
        """Write what is in the block."""
        self._check_stop()
        if self.end > self._begin:
            at = self._begin % self._page_nbytes
            self._output.file.write(self._begin, self._block.view[at : at + self.end - self._begin])
        self._begin = self.end

    def close(self) -> None:
        self._output.lease.give_back(self._block)

    def _move_to(self, offset: int) -> None:
        """Go on at ``offset``. Bytes that are skipped read as zeros."""
        gap = offset - self.end
        if gap > self._page_nbytes:
            self.flush()
            self._begin = self.end = offset
        elif gap > 0:
            self._append(bytes(gap))

    def _append(self, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            at = self._begin % self._page_nbytes + self.end - self._begin
            nbytes = min(self._output.lease.block_nbytes - at, len(data) - done)
            self._block.data.data[at : at + nbytes] = data[done : done + nbytes]
            self.end += nbytes
            done += nbytes
            if at + nbytes == self._output.lease.block_nbytes:
                self.flush()

    def _append_large(self, record: _Large) -> None:
        self.flush()
        output, template, offset = self._output, record.template, self.end
        data = TensorBytes(record.tensor)
        payload_at = offset + template.header_nbytes
        ranges = list(cut(payload_at, template.payload_nbytes, output))
        sums = []
        for begin, end in ranges:
            self._check_stop()
            sums.append(PayloadRange(output, data, begin, end, payload_at + begin).write())
        finish_record(output, offset, template, ranges, sums)
        self._begin = self.end = offset + template.nbytes

    @property
    def _page_nbytes(self) -> int:
        return self._output.file.page_nbytes


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, with a storage of its own. ``torch.save`` would write all of a larger shared storage."""
    tensor = on_cpu(tensor.detach())
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    return tensor
