"""Takes items that were read together out of their block, and copies them into the planner's tensors.

Records of the usual form take a short way here, of a few microseconds each, and many small tensors of one kind a still
shorter one. All others go to ``stored_tensor``, which finds out what they are, or what is wrong with them.

The form of the records of one writer, dtype and shape is the first of them, once ``parsed_record`` has understood it.
A later record has the form only if all its bytes outside of data and checksums are equal.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.staging import Block, copy_bytes, copy_each
from robust_dcp.storage.index import ChunkKind
from robust_dcp.storage.layouts.footer import Footer
from robust_dcp.storage.layouts.read_head import FileHead, StoredTensor
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.reads import Read, WholeTensors, takes_bytes
from robust_dcp.storage.reading.stored_tensor import ItemInMemory, Verification, read_tensor
from robust_dcp.storage.records.checksum import crc32, crc32_of_each
from robust_dcp.storage.records.record import Record, parsed_record, raw_record

__all__ = [
    "BlockItems",
    "RecordForms",
    "SmallTensors",
    "Stretch",
    "form_of_raw",
]

_MOST_FORMS: Final = 1024
"""Each form takes 1 to 2 KiB. A load with more forms has few tensors of each, so learning forms gains little."""


class RecordForms:
    """The forms of one load."""

    def __init__(self) -> None:
        self._forms: dict[tuple[int, torch.dtype, torch.Size], Record | None] = {}

    def find(
        self, memory: mmap.mmap, at: int, nbytes: int, dtype: torch.dtype, shape: torch.Size
    ) -> tuple[Record, int] | None:
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
        crc32 = form.crc32_in(memory, at)
        return None if crc32 is None else (form, crc32)


def form_of_raw(raw: StoredTensor, dtype: torch.dtype, shape: torch.Size) -> tuple[Record, int] | None:
    """The result of :meth:`RecordForms.find` for an item that the head of its file describes."""
    return (raw_record(dtype, tuple(shape)), raw.crc32 or 0) if (raw.dtype, raw.shape) == (dtype, shape) else None


def _form_of(memory: mmap.mmap, at: int, nbytes: int, dtype: torch.dtype, shape: torch.Size) -> Record | None:
    record = parsed_record(lambda offset, count: memory[at + offset : at + offset + count], nbytes)
    if record is None or (record.dtype, record.shape) != (dtype, tuple(shape)):
        return None
    return record if record.is_contiguous and record.header else None


class Stretch(NamedTuple):
    """Bytes of a file in memory: ``nbytes`` bytes that begin at ``offset`` in the file and at ``start`` in ``block``.

    If the file holds raw bytes, ``head`` describes its items. ``footer`` is that of a file of records that we wrote;
    ``None`` if nothing is verified.
    """

    file: str
    offset: int
    block: Block
    start: int
    nbytes: int
    head: FileHead | None = None
    footer: Footer | None = None


class BlockItems:
    """Takes items out of what was read of a file.

    Args:
        forms: the record forms of this load.
        verification, trusted: as for :func:`~robust_dcp.storage.reading.stored_tensor.read_tensor`.
    """

    def __init__(self, forms: RecordForms, *, verification: Verification, trusted: bool) -> None:
        self._verification = verification
        self._trusted = trusted
        self._forms = forms

    def footer_of(self, file: DataFile) -> Footer | None:
        """The footer of a file, with which its records are compared."""
        return None if self._verification.verify is False else file.footer

    def tensor(self, stretch: Stretch, read: Read, target: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a tensor that ``read`` asks for.

        Args:
            target: a tensor of the same size, or ``None`` if it is not known yet.

        Returns:
            ``None`` if ``target`` has been filled; else a CPU tensor of the stored dtype, which owns its memory.

        Raises:
            CorruptCheckpoint, UnsafeCheckpoint: as ``read_tensor``.
        """
        takes = target is not None and takes_bytes(target)
        if takes and target is not None and self._is_copied(stretch, read, target):
            return None
        return read_tensor(
            self.stored(stretch, read),
            read.item.storage_offsets,
            read.item.lengths,
            into=target if takes else None,
            expected=read.expected,
            verification=self._verification,
            trusted=self._trusted,
        )

    def stored(self, stretch: Stretch, read: Read) -> ItemInMemory:
        """The bytes of the item. If the file ends inside the item, these are the bytes that exist."""
        first = read.offset - stretch.offset
        found = max(0, min(stretch.nbytes - first, read.nbytes))
        at = stretch.start + first
        view = stretch.block.view[at : at + found]
        raw = read.in_head(stretch.head, stretch.file)
        return ItemInMemory(
            stretch.file, read.name, view, nbytes=read.nbytes, offset=read.offset, raw=raw, footer=stretch.footer
        )

    def _is_copied(self, stretch: Stretch, read: Read, target: torch.Tensor) -> bool:
        """Copy a whole and sound record of the usual form into ``target``; ``False`` if the record is anything else."""
        found = self._form(stretch, read, target)
        if found is None:
            return False
        form, expected = found
        block = stretch.block
        data_at = stretch.start + read.offset - stretch.offset + form.data_offset
        nbytes = form.data_nbytes
        if self._verification.verify is False or not expected:
            self._verification.skip(nbytes, read.name, stretch.file)
        elif crc32(block.view[data_at : data_at + nbytes]) != expected:
            return False
        copy_bytes(target.data_ptr(), block.address + data_at, nbytes)
        return True

    def _form(self, stretch: Stretch, read: Read, target: torch.Tensor) -> tuple[Record, int] | None:
        """The form of a whole record and its CRC-32 (0 if it has none); ``None`` if it does not have the usual form."""
        dtype, shape = read.dtype, read.shape
        first = read.offset - stretch.offset
        if dtype is None or shape is None or not _is_whole(read, target) or first + read.nbytes > stretch.nbytes:
            return None
        raw = read.in_head(stretch.head, stretch.file)
        if raw is not None:
            return form_of_raw(raw, dtype, shape)
        found = self._forms.find(stretch.block.memory, stretch.start + first, read.nbytes, dtype, shape)
        if found is not None and stretch.footer is not None and stretch.footer.tail.n_items:
            # A sound record of another item has a right CRC-32 of its own.
            (crc32_there,) = stretch.footer.crc32s_at(np.array([read.offset]))
            if found[1] != crc32_there:
                return None
        return found


def _is_whole(read: Read, target: torch.Tensor) -> bool:
    """Whether all of the stored tensor is wanted, in its stored dtype."""
    item = read.item
    is_all = item.lengths == read.shape == target.shape and not any(item.storage_offsets)
    return is_all and target.dtype == read.dtype


Int64 = npt.NDArray[np.int64]

_FEW: Final = 4
"""Up to this many tensors of one kind are handled one by one."""


class SmallTensors:
    """Takes whole tensors out of what was read of a file.

    Args:
        whole: all such tensors of the load.
        forms, verification: those of the load.
    """

    def __init__(self, whole: WholeTensors, forms: RecordForms, verification: Verification) -> None:
        self._whole = whole
        self._forms = forms
        self._verification = verification

    def copy(self, stretch: Stretch, numbers: Int64) -> npt.NDArray[np.bool_]:
        """Fill targets from a block.

        Args:
            numbers: the numbers of the items of a group. Items that are not whole tensors (they have higher numbers)
                are left alone.

        Returns:
            For each of ``numbers`` whether its target has been filled.
        """
        done = np.zeros(len(numbers), dtype=np.bool_)
        places = np.flatnonzero(numbers < len(self._whole))
        if len(places) < _FEW:
            return done
        kinds = self._whole.kind_of[numbers[places]]
        order = np.argsort(kinds, kind="stable")
        for alike in np.split(places[order], np.flatnonzero(np.diff(kinds[order])) + 1):
            if len(alike) >= _FEW:
                done[alike] = self._copy_alike(stretch, numbers[alike])
        return done

    def _copy_alike(self, stretch: Stretch, numbers: Int64) -> Sequence[bool]:
        """:meth:`copy` for tensors of one dtype and size."""
        whole = self._whole
        kind = whole.kinds[int(whole.kind_of[numbers[0]])]
        first, nbytes = whole.start[numbers] - stretch.offset, whole.nbytes[numbers]
        if (nbytes != nbytes[0]).any() or int(first.max() + nbytes[0]) > stretch.nbytes:
            return [False] * len(numbers)
        at = (first + stretch.start).tolist()
        targets = [whole.targets[number] for number in numbers.tolist()]
        if stretch.head is None:
            data, expected = self._find_in_records(stretch, at, int(nbytes[0]), kind)
            if stretch.footer is not None and stretch.footer.tail.n_items:
                # A sound record of another item has a right CRC-32 of its own.
                there = stretch.footer.crc32s_at(whole.start[numbers])
                expected = [crc if crc == of_it else None for crc, of_it in zip(expected, there, strict=True)]
        else:
            data, expected = at, self._find_in_head(stretch.head, numbers, kind)
        sound = _take_bytes(targets)
        if self._verification.verify is not False:
            found = crc32_of_each(stretch.block.view, data, kind.nbytes)
            # Tensors without a checksum (0) are counted, or refused, one by one.
            sound = [ok and crc == of_it != 0 for ok, crc, of_it in zip(sound, found, expected, strict=True)]
        else:
            sound = [ok and of_it is not None for ok, of_it in zip(sound, expected, strict=True)]
            self._verification.skip(sound.count(True) * kind.nbytes, "", stretch.file)
        into = [target.data_ptr() for target in compress(targets, sound)]
        copy_each(into, [stretch.block.address + start for start in compress(data, sound)], repeat(kind.nbytes))
        return sound

    def _find_in_records(
        self, stretch: Stretch, at: list[int], nbytes: int, kind: ChunkKind
    ) -> tuple[list[int], list[int | None]]:
        """For each record at ``at``: where its data begins in the block, and its CRC-32.

        The CRC-32 is 0 if the record has none, and ``None`` if the record does not have the usual form.
        """
        memory = stretch.block.memory
        found = self._forms.find(memory, at[0], nbytes, kind.dtype, kind.lengths)
        if found is None or found[0].data_nbytes != kind.nbytes:
            return at, [None] * len(at)
        form = found[0]
        return [start + form.data_offset for start in at], form.crc32s_in(memory, at)

    def _find_in_head(self, head: FileHead, numbers: Int64, kind: ChunkKind) -> list[int | None]:
        """The CRC-32 of tensors that the head of their file describes, with 0 and ``None`` as for records."""
        whole, tensors = self._whole, head.tensors
        found = [tensors.get(whole.names[number]) for number in numbers.tolist()]
        places = zip(found, whole.start[numbers].tolist(), whole.nbytes[numbers].tolist(), strict=True)
        wanted = (kind.dtype, kind.lengths, kind.nbytes, tuple(kind.offsets))
        return [
            raw.crc32 or 0
            if raw is not None
            and (raw.dtype, raw.shape, raw.nbytes, raw.chunk_offset) == wanted
            and (raw.offset, raw.nbytes) == (start, nbytes)
            else None
            for raw, start, nbytes in places
        ]


def _take_bytes(targets: list[torch.Tensor]) -> list[bool]:
    """For each target, whether ``targets.takes_bytes`` holds. All are neither complex nor quantized."""
    if targets and (targets[0].is_complex() or targets[0].is_quantized):
        return [False] * len(targets)
    strided = torch.strided
    return [
        target.is_cpu and target.layout is strided and not target.is_neg() and target.is_contiguous()
        for target in targets
    ]
