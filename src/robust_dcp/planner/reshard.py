"""What is read for a box of a tensor that was saved in other chunks: read items, made from the columns of the index.

Owns the arithmetic of overlaps, for all chunks of a tensor at once; which chunks come into question is found by
bisection. Called by ``load_items``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from robust_dcp.storage.index import StoredChunks

__all__ = ["chunks_held", "read_overlap"]

_TENSOR = LoadItemType.TENSOR


def chunks_held(value: Any) -> Sequence[ChunkStorageMetadata] | None:
    """The chunks that this rank holds of a tensor, as stock's planner asks for them; ``None`` if it is none."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return ()
    if isinstance(value, ShardedTensor):
        shards = [shard.metadata for shard in value.local_shards()]
        return [
            ChunkStorageMetadata(torch.Size(shard.shard_offsets), torch.Size(shard.shard_sizes)) for shard in shards
        ]
    create_chunk_list = getattr(value, "__create_chunk_list__", None)
    if callable(create_chunk_list):
        chunks: Sequence[ChunkStorageMetadata] = create_chunk_list()
        return chunks
    if isinstance(value, torch.Tensor):
        return [ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())]
    return None


def read_overlap(key: str, saved: StoredChunks, held: Sequence[ChunkStorageMetadata]) -> list[ReadItem] | None:
    """What stock's ``create_read_items_for_chunk_list`` makes of the same.

    Returns:
        ``None`` if the index is damaged: the saved chunks have to be looked at one by one.
    """
    items = []
    for number, chunk in enumerate(held):
        found = saved.overlap(chunk.offsets, chunk.sizes)
        if found is None:
            return None
        wanted = MetadataIndex(key, chunk.offsets, number)
        columns = zip(
            found.chunks.tolist(),
            _sizes(found.offsets),
            _sizes(found.begins - found.offsets),
            _sizes(found.begins - np.array(chunk.offsets, dtype=np.int64)),
            _sizes(found.lengths),
            strict=True,
        )
        items += [
            ReadItem(_TENSOR, wanted, within, MetadataIndex(key, offset, place), begin, lengths)
            for place, offset, begin, within, lengths in columns
        ]
    return items


def _sizes(rows: npt.NDArray[np.int64]) -> Iterator[torch.Size]:
    """Each row; equal rows, as those of chunks of one shape, are one object."""
    if len(rows) and (rows == rows[0]).all():
        return iter([torch.Size(rows[0].tolist())] * len(rows))
    return map(torch.Size, rows.tolist())
