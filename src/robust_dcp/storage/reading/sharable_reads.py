"""The reads of a rank that other ranks may need as well, as columns that ranks can compare.

This module decides which items of a load plan these are, and gives them names that are equal on all ranks. It never
talks to other ranks: ``plan.shared_reads`` does.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.storage.reading.placed_reads import Read, reads_of
from robust_dcp.storage.reading.targets import is_plain, may_ask_early, target_of

__all__ = ["ON_DEVICE", "SharableReads", "places_in_files", "sharable_reads"]

ON_DEVICE = 1 << 63
"""This bit is set in the box of an item that ranks pass on from device to device."""


class SharableReads(NamedTuple):
    """Items of a plan, sorted by (item, box).

    Attributes:
        places: int64 ``[n]``, the place of each item in the plan.
        targets: the tensor that each is read into; ``None`` for an object.
        items: int32 ``[n]``, the place of the stored item in the metadata's ``storage_data``.
        boxes: uint64 ``[n]``, which part is read: 0 for all of it as it is stored, else a hash. ``ON_DEVICE`` may be
            added.
        nbytes: int64 ``[n]``, the size of the target, or of the stored object.
    """

    places: npt.NDArray[np.int64]
    targets: Sequence[torch.Tensor | None]
    items: npt.NDArray[np.int32]
    boxes: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.int64]


class _Row(NamedTuple):
    item: int
    box: int
    place: int
    target: torch.Tensor | None
    nbytes: int


def sharable_reads(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    metadata: Metadata,
    directory: str,
    stays_on: Callable[[torch.device], bool],
    *,
    trusted: bool,
) -> SharableReads:
    """Find the ``items`` that another rank may read for this one: plain tensors of any dtype and strides, and objects.

    A rank reads two kinds of items for itself: those where the planner has to be called for each item, and those that
    were stored through a transform.

    Args:
        stays_on: whether ranks can pass on a tensor on a device without a copy to the host.
        trusted: whether this rank takes objects that nobody has checked. It exchanges them only with ranks that do,
            too.
    """
    number_of: dict[Any, int] = {index: number for number, index in enumerate(metadata.storage_data or {})}
    rows: list[_Row] = []
    if may_ask_early(planner):
        for place, read in enumerate(reads_of(items, metadata, directory)):
            number = number_of[read.item.storage_index]
            if read.item.type == LoadItemType.BYTE_IO:
                if read.nbytes and not read.transforms:
                    rows.append(_Row(number, int(trusted), place, None, read.nbytes))
                continue
            target = target_of(planner, read.item, early=True)
            if target.numel() and is_plain(target):
                box = _box_of(read, target) | (ON_DEVICE if stays_on(target.device) else 0)
                rows.append(_Row(number, box, place, target, target.numel() * target.element_size()))
    rows.sort(key=lambda row: row[:3])
    return SharableReads(
        places=np.array([row.place for row in rows], dtype=np.int64),
        targets=[row.target for row in rows],
        items=np.array([row.item for row in rows], dtype=np.int32),
        boxes=np.array([row.box for row in rows], dtype=np.uint64),
        nbytes=np.array([row.nbytes for row in rows], dtype=np.int64),
    )


def places_in_files(metadata: Metadata) -> npt.NDArray[np.int64]:
    """The place of each stored item when all are sorted by file and offset: int64 ``[n]``."""
    infos: list[Any] = list((metadata.storage_data or {}).values())
    order = sorted(range(len(infos)), key=lambda number: (infos[number].relative_path, infos[number].offset))
    places = np.empty(len(infos), dtype=np.int64)
    places[order] = np.arange(len(infos))
    return places


def _box_of(read: Read, target: torch.Tensor) -> int:
    """A number of 63 bits for the part of a stored item that is read and for the target's dtype.

    It is 0 if the whole item is read in its stored dtype.
    """
    if read.is_whole and target.dtype == read.dtype:
        return 0
    offsets, lengths = read.item.storage_offsets, read.item.lengths
    encoded = struct.pack(f"<{2 * len(offsets)}q", *offsets, *lengths) + str(target.dtype).encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") & (ON_DEVICE - 1) or 1
