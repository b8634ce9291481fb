"""Items that have been read as they lie in their file, and their way from there to the planner's tensors.

Owns the short way for the usual record, a few microseconds each, and leaves every other to ``stored_item``. Called by
``read_items``, for small items on the thread of the planner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from robust_dcp.staging import Block, copy_bytes
from robust_dcp.storage.layouts.read_head import FileHead
from robust_dcp.storage.reading.read_order import Read
from robust_dcp.storage.reading.record_forms import RecordForms, form_of_raw
from robust_dcp.storage.reading.stored_item import ItemInMemory, read_tensor, takes_bytes
from robust_dcp.storage.records.checksum import crc32

__all__ = ["BlockItems", "Stretch"]


class Stretch(NamedTuple):
    """Bytes of a file in memory: ``nbytes`` of them, from ``offset`` in the file on, at ``start`` in ``block``.

    ``head`` describes the items of a file of raw bytes."""

    file: str
    offset: int
    block: Block
    start: int
    nbytes: int
    head: FileHead | None = None


class BlockItems:
    """Takes items out of what was read of a file.

    Args:
        verify_checksum, trusted: as for :func:`~robust_dcp.storage.reading.stored_item.read_tensor`.
    """

    def __init__(self, *, verify_checksum: bool, trusted: bool) -> None:
        self._verify_checksum = verify_checksum
        self._trusted = trusted
        self._forms = RecordForms()

    def tensor(self, stretch: Stretch, read: Read, target: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a tensor that ``read`` asks for.

        Args:
            target: a tensor of its size, or ``None`` if that is not known yet.

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
            verify_checksum=self._verify_checksum,
            trusted=self._trusted,
        )

    def stored(self, stretch: Stretch, read: Read) -> ItemInMemory:
        """The bytes of the item; as many as there are, if the file ends before it does."""
        first = read.offset - stretch.offset
        found = max(0, min(stretch.nbytes - first, read.nbytes))
        at = stretch.start + first
        view = stretch.block.view[at : at + found]
        raw = read.in_head(stretch.head, stretch.file)
        return ItemInMemory(stretch.file, read.name, view, nbytes=read.nbytes, offset=read.offset, raw=raw)

    def _is_copied(self, stretch: Stretch, read: Read, target: torch.Tensor) -> bool:
        """Copy a whole and sound record of the usual form; ``False`` if it is anything else."""
        dtype, shape, item = read.dtype, read.shape, read.item
        if dtype is None or shape is None or target.dtype != dtype:
            return False
        if item.lengths != shape or any(item.storage_offsets) or target.shape != shape:
            return False
        first = read.offset - stretch.offset
        if first + read.nbytes > stretch.nbytes:
            return False
        at = stretch.start + first
        block = stretch.block
        raw = read.in_head(stretch.head, stretch.file)
        if raw is None:
            found = self._forms.find(block.memory, at, read.nbytes, dtype, shape)
        else:
            found = form_of_raw(raw, dtype, shape)
        if found is None:
            return False
        form, expected = found
        data_at = at + form.data_offset
        nbytes = form.data_nbytes
        if self._verify_checksum and expected and crc32(block.view[data_at : data_at + nbytes]) != expected:
            return False
        copy_bytes(target.data_ptr(), block.address + data_at, nbytes)
        return True
