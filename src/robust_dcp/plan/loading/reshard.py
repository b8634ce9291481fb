"""What to read for a tensor that was saved in other chunks: read items for the overlaps that the index has found.

This module knows which boxes of a tensor this rank holds, and makes the read items. ``load_items`` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from robust_dcp.plan.describe import own_chunks
from robust_dcp.storage.index import StoredChunks

__all__ = ["FoundReads", "chunks_held", "read_overlap"]

_TENSOR = LoadItemType.TENSOR


def chunks_held(value: Any) -> Sequence[ChunkStorageMetadata] | None:
    """The chunks that this rank holds of a tensor, as stock's planner sees them; ``None`` if it is not a tensor."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return ()
    if isinstance(value, ShardedTensor):
        shards = [shard.metadata for shard in value.local_shards()]
        return [
            ChunkStorageMetadata(torch.Size(shard.shard_offsets), torch.Size(shard.shard_sizes)) for shard in shards
        ]
    chunks = own_chunks(value)
    if chunks is not None:
        return chunks
    if isinstance(value, torch.Tensor):
        return [ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())]
    return None


class FoundReads(NamedTuple):
    """The read items of one tensor, and whether they are known to fill everything that this rank holds of it."""

    items: list[ReadItem]
    fill: bool


def read_overlap(key: str, saved: StoredChunks, held: Sequence[ChunkStorageMetadata]) -> FoundReads | None:
    """Make the read items that stock's ``create_read_items_for_chunk_list`` would make.

    Returns:
        ``None`` if the index is damaged. Then the saved chunks have to be compared one by one.
    """
    items: list[ReadItem] = []
    missing_numel = 0
    for number, chunk in enumerate(held):
        found = saved.overlap(chunk.offsets, chunk.sizes)
        if found is None:
            return None
        missing_numel += math.prod(chunk.sizes) - found.numel
        wanted = MetadataIndex(key, chunk.offsets, number)
        columns = zip(found.chunks, found.offsets, found.in_chunk, found.in_box, found.lengths, strict=True)
        items += [
            ReadItem(_TENSOR, wanted, in_box, MetadataIndex(key, offsets, place), in_chunk, lengths)
            for place, offsets, in_chunk, in_box, lengths in columns
        ]
    return FoundReads(items, missing_numel == 0)
