"""Small records recognised by their frame, so that each of thousands of alike ones costs a few comparisons.

Owns what is the same in all records of one writer, dtype and shape, learnt from the first one that ``parse_record`` has
understood. Never believes a record that differs from it in a single byte but those of checksums. Called by
``plan_reader`` with records that lie in memory.
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
"""Each holds 1 to 2 KiB. Where there are more, tensors are hardly alike, and what is learnt is of little use."""

_MOST_FRAME_NBYTES: Final = 1 << 14
_UINT32: Final = struct.Struct("<I")


@dataclass(frozen=True)
class RecordForm:
    """Contiguous records of one length, dtype and shape that say so in the same bytes.

    Attributes:
        parts: the bytes before the data and from the directory on, cut where checksums stand, with their places.
        data_offset, data_nbytes: the tensor's bytes, from the start of the record.
        crc32_at: where their CRC-32 stands; 0 there is none.
    """

    parts: tuple[tuple[int, int, bytes], ...]
    data_offset: int
    data_nbytes: int
    crc32_at: int

    def crc32_of(self, memory: mmap.mmap, at: int) -> int | None:
        """The CRC-32 in the record that begins at ``at``; ``None`` if it is not of this form."""
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
        """The form and the CRC-32 (0: none) of the record of ``nbytes`` bytes at ``at``.

        Returns:
            ``None`` if it is not the usual record of a contiguous tensor of ``dtype`` and ``shape``: it has to be
            looked at as what it may be.
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
        """Where the data of a record of ``nbytes`` bytes will be, from its start, and its length.

        To be believed only once :meth:`find` has found the same. ``None`` if no such record is known.
        """
        form = self._forms.get((nbytes, dtype, shape))
        if form is not None:
            return form.data_offset, form.data_nbytes
        template = record_template(dtype, tuple(shape))
        if template is None or template.nbytes != nbytes:
            return None
        return template.header_nbytes, template.payload_nbytes


def form_of_raw(raw: StoredTensor, dtype: torch.dtype, shape: torch.Size) -> tuple[RecordForm, int] | None:
    """What :meth:`RecordForms.find` gives, of an item that the head of its file describes."""
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
