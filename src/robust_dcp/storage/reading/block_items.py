"""Takes items that were read together out of their block, and copies them into the planner's tensors.

Records of the usual form take a short way here, of a few microseconds each. All others go to ``stored_tensor``.
``plan_reader`` calls this module for small items, on the thread of the planner; ``reading_threads`` calls it for
others, on its own threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from robust_dcp.staging import Block, copy_bytes
from robust_dcp.storage.layouts.footer import Footer
from robust_dcp.storage.layouts.read_head import FileHead
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.item_bytes import ItemInMemory
from robust_dcp.storage.reading.placed_reads import Read, ReadGroup
from robust_dcp.storage.reading.record_forms import RecordForm, RecordForms, form_of_raw
from robust_dcp.storage.reading.scattered_read import Wanted
from robust_dcp.storage.reading.stored_tensor import read_tensor
from robust_dcp.storage.reading.targets import takes_bytes
from robust_dcp.storage.reading.verification import Verification
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.torch_zip import payload_view

__all__ = ["BlockItems", "Stretch"]


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

    def read_into(
        self, file: DataFile, group: ReadGroup, targets: Sequence[torch.Tensor], block: Block
    ) -> list[torch.Tensor | None]:
        """Read a group into ``targets``, straight from the file where that is possible, or else through ``block``.

        Args:
            targets: one tensor for each read. ``takes_bytes`` holds for each.
            block: large enough for the group, wherever it begins in the file. Its contents mean nothing afterwards.

        Returns:
            For each read, what :meth:`tensor` returns.

        Raises:
            CorruptCheckpoint, UnsafeCheckpoint, StorageError: as ``read_tensor``.
        """
        head = file.head.get()
        if self._is_read_straight(file, group, targets, block, head):
            return [None] * len(targets)
        # The records have another form, one is damaged, or the file ends early. Read all, and let ``tensor`` find out.
        at, found = file.read_block(block, group.start, group.end - group.start)
        stretch = Stretch(file.path, group.start, block, at, found, head, self.footer_of(file))
        return [self.tensor(stretch, read, target) for read, target in zip(group.reads, targets, strict=True)]

    def _is_read_straight(
        self, file: DataFile, group: ReadGroup, targets: Sequence[torch.Tensor], block: Block, head: FileHead | None
    ) -> bool:
        """Read whole and sound records of the usual form into their targets; ``False`` if one record is anything
        else.
        """
        wanted: list[Wanted] = []
        for read, target in zip(group.reads, targets, strict=True):
            place = self._wanted(read, target, head, file.path)
            if place is None:
                return False
            wanted.append(place)
        if any(first.end > second.offset for first, second in pairwise(wanted)):  # two reads want the same item
            return False
        nbytes = group.end - group.start
        scattered, found = file.read_scattered(block, group.start, nbytes, wanted)
        if found < nbytes:
            return False
        stretch = Stretch(file.path, group.start, block, scattered.at, found, head, self.footer_of(file))
        unverified: list[tuple[Read, int]] = []
        for number, (read, target) in enumerate(zip(group.reads, targets, strict=True)):
            form = self._form(stretch, read, target)
            if form is None or read.offset + form[0].data_offset != wanted[number].offset:
                return False
            checksum = self._verification.verify is not False and form[1] != 0
            if not checksum:
                unverified.append((read, form[0].data_nbytes))
            if scattered.finish(number, group.end, checksum=checksum) != (form[1] if checksum else 0):
                return False
        for read, nbytes_of_it in unverified:
            self._verification.skip(nbytes_of_it, read.name, file.path)
        return True

    def _wanted(self, read: Read, target: torch.Tensor, head: FileHead | None, file: str) -> Wanted | None:
        """Where the data of a whole record should lie; ``None`` if only reading the record can tell."""
        dtype, shape = read.dtype, read.shape
        if dtype is None or shape is None or not _is_whole(read, target):
            return None
        raw = read.in_head(head, file)
        place = (0, raw.nbytes) if raw is not None else self._forms.place_of_data(read.nbytes, dtype, shape)
        if place is None or place[1] != target.nbytes:
            return None
        return Wanted(read.offset + place[0], payload_view(target), target.data_ptr())

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

    def _form(self, stretch: Stretch, read: Read, target: torch.Tensor) -> tuple[RecordForm, int] | None:
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
