"""What a load reads for each value of a state dict: the read items of stock's planner, without asking it each time.

Usually a tensor or shard of the state dict is one saved chunk. This module handles these cases itself; with an index
they stay in columns, and no read item is made. If the chunks differ, the index finds the overlaps. Without an index
such values go to stock's planner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from robust_dcp.plan.describe import has_own_chunks, own_chunks
from robust_dcp.storage.index.stored_index import ChunkKind, StoredChunks, index_of
from robust_dcp.storage.reading.reads import WholeTensors, whole_item

__all__ = ["PlannedReads", "plan_reads", "whole_tensors"]


class PlannedReads(NamedTuple):
    """The items of a load plan.

    Attributes:
        items: what is read.
        filled: the keys of tensors that these items are known to fill completely.
    """

    items: list[ReadItem]
    filled: set[str]


def plan_reads(state_dict: Mapping[str, Any], metadata: Metadata) -> PlannedReads:
    """The items that stock's ``create_default_local_load_plan`` makes of ``state_dict``, in another order.

    If saved chunks overlap and one of them is exactly the wanted one, only that one is read.

    Args:
        state_dict: FQN to value. Keys that ``metadata`` does not have are left out.
    """
    items: list[ReadItem] = []
    filled: set[str] = set()
    others: dict[str, Any] = {}
    chunks_of = _LocalChunks()
    with torch.no_grad():  # so that to_local() of a DTensor returns its local tensor, not a node of an autograd graph
        for key, value in state_dict.items():
            saved = metadata.state_dict_metadata.get(key)
            if saved is None:
                continue
            found = None
            if isinstance(saved, TensorStorageMetadata):
                local = chunks_of(value, value.to_local() if type(value) is DTensor else value)
                found = None if local is None else _found(key, local, saved)
                chunks: Any = saved.chunks
                if found is None and isinstance(chunks, StoredChunks):
                    held = _chunks_held(value) if local is None else [local]
                    if held is not None:
                        resharded = _read_overlap(key, chunks, held)
                        items += resharded.items
                        filled |= resharded.filled
                        continue
            if found is None:
                others[key] = value
                continue
            filled.add(key)
            if 0 not in found.lengths:
                items.append(found)
    if others:
        items += create_default_local_load_plan(others, metadata, strict=False).items
    return PlannedReads(items, filled)


def _found(key: str, local: ChunkStorageMetadata, saved: TensorStorageMetadata) -> ReadItem | None:
    """A read of one whole saved chunk, if that is exactly the wanted one."""
    offsets = local.offsets
    chunks: Any = saved.chunks
    if isinstance(chunks, StoredChunks):
        place = chunks.find(offsets)
        if place is None or chunks[place].sizes != local.sizes:
            return None
        return whole_item(key, offsets, local.sizes, place)
    for number, chunk in enumerate(saved.chunks):
        if chunk.offsets == offsets:
            if chunk.sizes != local.sizes:
                return None
            return whole_item(key, offsets, local.sizes, number)
    return None


def whole_tensors(state_dict: Mapping[str, Any], metadata: Metadata) -> WholeTensors:
    """The tensors for which the index has exactly the chunk, size and dtype that this rank holds.

    :func:`plan_reads` plans all other tensors, and all tensors if there is no index.
    """
    index = index_of(metadata)
    if index is None:
        return WholeTensors.none()
    names, targets, kind_of, kinds = _held(state_dict)
    return WholeTensors.found(names, targets, kinds, kind_of, index.find_whole(names, kinds, kind_of))


def _held(state_dict: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor], list[int], list[ChunkKind]]:
    """The tensors of which this rank holds exactly one chunk that is not empty.

    Returns:
        The names, the local tensors, for each tensor the number of its kind, and the kinds.
    """
    names: list[str] = []
    targets: list[torch.Tensor] = []
    kind_of: list[int] = []
    kinds: dict[ChunkKind, int] = {}
    plain: dict[tuple[torch.dtype, torch.Size], int] = {}
    chunks_of = _LocalChunks()
    with torch.no_grad():
        for name, value in state_dict.items():
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                number = plain.get((value.dtype, value.shape))
                local = value
            elif kind is DTensor:
                number, local = None, value.to_local()
            else:
                continue
            if number is None or has_own_chunks(value):
                chunk = chunks_of(value, local)
                if chunk is None or 0 in chunk.sizes or (local.dtype, local.shape) != (value.dtype, chunk.sizes):
                    continue
                described = ChunkKind(value.dtype, value.shape, chunk.offsets, chunk.sizes)
                number = kinds.setdefault(described, len(kinds))
                if kind is not DTensor:
                    plain[value.dtype, value.shape] = number
            names.append(name)
            targets.append(local)
            kind_of.append(number)
    return names, targets, kind_of, list(kinds)


class _LocalChunks:
    """Finds the one chunk that this rank holds of a value. It remembers results for the values of one state dict."""

    def __init__(self) -> None:
        self._whole: dict[torch.Size, ChunkStorageMetadata] = {}
        # The key has everything that torch computes a chunk from. The state dict's tensors keep the meshes alive.
        self._sharded: dict[tuple[Any, ...], ChunkStorageMetadata | None] = {}

    def __call__(self, value: Any, local: Any) -> ChunkStorageMetadata | None:
        """The chunk, or ``None`` if only stock's planner can tell what this rank holds.

        Args:
            local: the local tensor, if ``value`` is a DTensor.
        """
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return None if has_own_chunks(value) else self._of_whole(value.size())
        if kind is DTensor:
            return self._of_dtensor(value, local)
        return None

    def _of_whole(self, size: torch.Size) -> ChunkStorageMetadata:
        try:
            return self._whole[size]
        except KeyError:
            chunk = self._whole[size] = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            return chunk

    def _of_dtensor(self, value: DTensor, local: torch.Tensor) -> ChunkStorageMetadata | None:
        mesh, placements = value.device_mesh, value.placements
        # With Megatron-FSDP an attribute of the tensor tells the chunks. They do not follow from the placements then.
        own = "__create_chunk_list__" in vars(value) or hasattr(local, "__create_chunk_list__")
        if own or type(local) not in (torch.Tensor, torch.nn.Parameter):
            return None
        # Equal placements may have different classes (Shard and _StridedShard in torch 2.7), which place differently.
        key = (id(mesh), placements, tuple(map(type, placements)), value.shape)
        if key not in self._sharded:
            self._sharded[key] = _only_chunk(value)
        chunk = self._sharded[key]
        # Stock plans for a rank that is not in the mesh or holds nothing, and for a local tensor of another size.
        return chunk if chunk is not None and math.prod(chunk.sizes) == local.numel() > 0 else None


def _only_chunk(value: DTensor) -> ChunkStorageMetadata | None:
    # Leave two cases to stock. Placement classes from outside torch may depend on more than we know. And it refuses
    # pending reductions (Partial).
    known = all(type(p).__module__.partition(".")[0] == "torch" and not p.is_partial() for p in value.placements)
    create_chunk_list = getattr(value, "__create_chunk_list__", None)
    if not known or value.device_mesh.get_coordinate() is None or not callable(create_chunk_list):
        return None
    chunks: Sequence[ChunkStorageMetadata] = create_chunk_list()
    return chunks[0] if len(chunks) == 1 else None


def _chunks_held(value: Any) -> Sequence[ChunkStorageMetadata] | None:
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


def _read_overlap(key: str, saved: StoredChunks, held: Sequence[ChunkStorageMetadata]) -> PlannedReads:
    """Make the read items that stock's ``create_read_items_for_chunk_list`` would make."""
    items: list[ReadItem] = []
    missing_numel = 0
    for number, chunk in enumerate(held):
        found = saved.overlap(chunk.offsets, chunk.sizes)
        missing_numel += math.prod(chunk.sizes) - sum(math.prod(lengths) for *_, lengths in found)
        wanted = MetadataIndex(key, chunk.offsets, number)
        items += [
            ReadItem(LoadItemType.TENSOR, wanted, in_box, MetadataIndex(key, offsets, place), in_chunk, lengths)
            for place, offsets, in_chunk, in_box, lengths in found
        ]
    return PlannedReads(items, set() if missing_numel else {key})
