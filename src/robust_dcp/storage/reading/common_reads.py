"""What a rank reads that others may need as well: the items of a load plan as columns that ranks can compare.

Owns which items that may be, and what names them. Never talks to other ranks (``plan.sharing`` does).
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

from robust_dcp.storage.reading.placed_reads import reads_of
from robust_dcp.storage.reading.targets import is_flat, may_ask_early, target_of

__all__ = ["ON_DEVICE", "CommonReads", "common_reads", "places_in_files"]

ON_DEVICE = 1 << 63
"""Set in the box of what is passed on without leaving devices."""


class CommonReads(NamedTuple):
    """Items of a plan, ascending by (item, box).

    Attributes:
        places: int64 ``[n]``, of the items in the plan.
        targets: their tensors as uint8 ``[nbytes]``, one for each.
        items: int32 ``[n]``, the place of the stored item in the metadata's ``storage_data``.
        boxes: uint64 ``[n]``, 0 for all of it, a hash for a part of it; and ``ON_DEVICE``.
        nbytes: int64 ``[n]``.
    """

    places: npt.NDArray[np.int64]
    targets: Sequence[torch.Tensor]
    items: npt.NDArray[np.int32]
    boxes: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.int64]


def common_reads(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    metadata: Metadata,
    directory: str,
    stays_on: Callable[[torch.device], bool],
) -> CommonReads:
    """What of ``items`` may be read by another rank: tensors whose targets take the stored bytes as they are.

    Where a target is not contiguous, or of another dtype than was stored, each rank reads for itself; and all that a
    planner wants to hear of one by one.

    Args:
        stays_on: whether ranks can pass on what lies on a device without copying it to the host.
    """
    number_of: dict[Any, int] = {index: number for number, index in enumerate(metadata.storage_data or {})}
    rows: list[tuple[int, int, int, torch.Tensor]] = []
    if may_ask_early(planner):
        for place, read in enumerate(reads_of(items, metadata, directory)):
            if read.item.type == LoadItemType.BYTE_IO:
                continue
            target = target_of(planner, read.item, early=True)
            if target.dtype != read.dtype or not target.numel() or not is_flat(target):
                continue
            box = 0 if read.is_whole else _hash_of(read.item.storage_offsets, read.item.lengths)
            box |= ON_DEVICE if stays_on(target.device) else 0
            flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
            rows.append((number_of[read.item.storage_index], box, place, flat))
    rows.sort(key=lambda row: row[:3])
    return CommonReads(
        places=np.array([place for _, _, place, _ in rows], dtype=np.int64),
        targets=[flat for _, _, _, flat in rows],
        items=np.array([number for number, _, _, _ in rows], dtype=np.int32),
        boxes=np.array([box for _, box, _, _ in rows], dtype=np.uint64),
        nbytes=np.array([len(flat) for _, _, _, flat in rows], dtype=np.int64),
    )


def places_in_files(metadata: Metadata) -> npt.NDArray[np.int64]:
    """For each stored item its place among all of them, by file and by offset: int64 ``[n]``."""
    infos: list[Any] = list((metadata.storage_data or {}).values())
    order = sorted(range(len(infos)), key=lambda number: (infos[number].relative_path, infos[number].offset))
    places = np.empty(len(infos), dtype=np.int64)
    places[order] = np.arange(len(infos))
    return places


def _hash_of(offsets: Sequence[int], lengths: Sequence[int]) -> int:
    """Of a box, 63 bits and not 0. Boxes of one stored item are told apart by it."""
    encoded = struct.pack(f"<{2 * len(offsets)}q", *offsets, *lengths)
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") & (ON_DEVICE - 1) or 1
