"""Recognises small records by their frame, so that each of thousands of similar records costs only a few comparisons.

A form is what all records of one writer, dtype and shape have in common. It is learnt from the first such record, after
``parse_record`` has understood it. A later record has the form only if all its bytes outside of data and checksums are
equal. ``plan_reader`` uses this for records that lie in memory.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from robust_dcp.storage.layouts.read_head import StoredTensor
from robust_dcp.storage.records.parse_record import parse_record
from robust_dcp.storage.records.torch_zip import record_template

__all__ = ["RecordForm", "RecordForms", "form_of_raw"]

_MOST_FORMS: Final = 1024
"""Each form takes 1 to 2 KiB. A load with more forms has few tensors of each, so learning forms gains little."""

_MOST_FRAME_NBYTES: Final = 1 << 14
_UINT32: Final = struct.Struct("<I")


@dataclass(frozen=True)
class RecordForm:
    """The form of contiguous records of one length, dtype and shape: the bytes that are the same in all of them.

    Attributes:
        parts: the bytes before the data and those from the zip directory on, with their places. Checksums are left out.
        data_offset, data_nbytes: where the tensor's bytes lie, counted from the start of the record.
        crc32_at: where the CRC-32 of the data is stored. If there is none, a field of zeros is there.
    """

    parts: tuple[tuple[int, int, bytes], ...]
    data_offset: int
    data_nbytes: int
    crc32_at: int

    def crc32_of(self, memory: mmap.mmap, at: int) -> int | None:
        """The CRC-32 in the record that begins at ``at``; ``None`` if it does not have this form."""
        for start, end, part in self.parts:
            if memory[at + start : at + end] != part:
                return None
        crc32_at = at + self.crc32_at
        return int.from_bytes(memory[crc32_at : crc32_at + 4], "little")

    def crc32s_of(self, memory: mmap.mmap, at: Sequence[int]) -> list[int | None]:
        """:meth:`crc32_of` for many records."""
        alike = [True] * len(at)
        for begin, end, part in self.parts:
            alike = [is_so and memory[a + begin : a + end] == part for is_so, a in zip(alike, at, strict=True)]
        crc32s = [_UINT32.unpack_from(memory, a + self.crc32_at)[0] for a in at]
        return [crc32 if is_so else None for is_so, crc32 in zip(alike, crc32s, strict=True)]


class RecordForms:
    """The forms of one load."""

    def __init__(self) -> None:
        self._forms: dict[tuple[int, torch.dtype, torch.Size], RecordForm | None] = {}

    def find(
        self, memory: mmap.mmap, at: int, nbytes: int, dtype: torch.dtype, shape: torch.Size
    ) -> tuple[RecordForm, int] | None:
        """The form and the CRC-32 (0 if there is none) of the record of ``nbytes`` bytes at ``at``.

        Returns:
            ``None`` if it is not the usual record of a contiguous tensor of ``dtype`` and ``shape``. It may still be
            another kind of record, which ``stored_tensor`` can read.
        """
        key = (nbytes, dtype, shape)
        try:
            form = self._forms[key]
        except KeyError:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            form = self._forms[key] = _form_of(memory, at, nbytes, dtype, shape)
        if form is None:
            return None
        crc32 = form.crc32_of(memory, at)
        return None if crc32 is None else (form, crc32)

    def place_of_data(self, nbytes: int, dtype: torch.dtype, shape: torch.Size) -> tuple[int, int] | None:
        """Where the data of a record of ``nbytes`` bytes should be: its start, counted from the start of the record,
        and its length.

        This is a guess until :meth:`find` has found the same. ``None`` if no such record is known.
        """
        form = self._forms.get((nbytes, dtype, shape))
        if form is not None:
            return form.data_offset, form.data_nbytes
        template = record_template(dtype, tuple(shape))
        if template is None or template.nbytes != nbytes:
            return None
        return template.header_nbytes, template.payload_nbytes


def form_of_raw(raw: StoredTensor, dtype: torch.dtype, shape: torch.Size) -> tuple[RecordForm, int] | None:
    """The result of :meth:`RecordForms.find` for an item that the head of its file describes."""
    if (raw.dtype, raw.shape) != (dtype, shape):
        return None
    return RecordForm((), 0, raw.nbytes, 0), raw.crc32 or 0


def _form_of(memory: mmap.mmap, at: int, nbytes: int, dtype: torch.dtype, shape: torch.Size) -> RecordForm | None:
    record = parse_record(lambda offset, count: memory[at + offset : at + offset + count], nbytes)
    if record is None or (record.dtype, record.shape) != (dtype, tuple(shape)) or not record.is_contiguous:
        return None
    if not record.is_framed or record.data_nbytes != shape.numel() * dtype.itemsize:
        return None
    if record.data_offset + nbytes - record.directory_at > _MOST_FRAME_NBYTES:
        return None
    parts: list[tuple[int, int, bytes]] = []
    for start, end in ((0, record.data_offset), (record.directory_at, nbytes)):
        for unread_from, unread_to in record.unread_at:
            if start <= unread_from < end:
                parts.append((start, unread_from, memory[at + start : at + unread_from]))
                start = unread_to
        parts.append((start, end, memory[at + start : at + end]))
    parts = [part for part in parts if part[2]]
    return RecordForm(tuple(parts), record.data_offset, record.data_nbytes, record.crc32_at)
