"""What a rank reads that others may need as well: the items of a load plan as columns that ranks can compare.

Owns which items that may be, and what names them. Never talks to other ranks (``plan.loading.sharing`` does).
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
"""Set in the box of what is passed on without leaving devices."""


class SharableReads(NamedTuple):
    """Items of a plan, ascending by (item, box).

    Attributes:
        places: int64 ``[n]``, of the items in the plan.
        targets: the tensors that they are read into, one for each; ``None`` for an object.
        items: int32 ``[n]``, the place of the stored item in the metadata's ``storage_data``.
        boxes: uint64 ``[n]``, 0 for all of it as it is stored, else a hash; and ``ON_DEVICE``.
        nbytes: int64 ``[n]``, of the target, or of the stored object.
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
    """What of ``items`` may be read by another rank: plain tensors of any dtype and strides, and objects.

    Each rank reads for itself what a planner wants to hear of item by item, and what was stored through a transform.

    Args:
        stays_on: whether ranks can pass on what lies on a device without copying it to the host.
        trusted: this rank takes objects that nobody has checked. It exchanges them only with ranks that do too.
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
    """For each stored item its place among all of them, by file and by offset: int64 ``[n]``."""
    infos: list[Any] = list((metadata.storage_data or {}).values())
    order = sorted(range(len(infos)), key=lambda number: (infos[number].relative_path, infos[number].offset))
    places = np.empty(len(infos), dtype=np.int64)
    places[order] = np.arange(len(infos))
    return places


def _box_of(read: Read, target: torch.Tensor) -> int:
    """Which part of a stored item is read, and into what: 63 bits; 0 for all of it, into the dtype that it has."""
    if read.is_whole and target.dtype == read.dtype:
        return 0
    offsets, lengths = read.item.storage_offsets, read.item.lengths
    encoded = struct.pack(f"<{2 * len(offsets)}q", *offsets, *lengths) + str(target.dtype).encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") & (ON_DEVICE - 1) or 1
