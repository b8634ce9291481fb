"""What a load reads for each value of a state dict: stock's read items, without asking stock about each of them.

Owns the usual cases, in which a tensor or a shard is one saved chunk. Others are found in the index (``reshard``);
where there is none, they go to stock's planning. Called by ``load`` for each load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from robust_dcp.planner.reshard import chunks_held, read_overlap
from robust_dcp.storage.index import StoredChunks

__all__ = ["PlannedReads", "plan_reads"]


class PlannedReads(NamedTuple):
    """The items of a load plan.

    Attributes:
        items: what is read.
        filled: the keys whose tensors these items are known to fill.
    """

    items: list[ReadItem]
    filled: set[str]


def plan_reads(state_dict: Mapping[str, Any], metadata: Metadata) -> PlannedReads:
    """The items that stock's ``create_default_local_load_plan`` makes of ``state_dict``, not in its order.

    Where saved chunks overlap, and one of them is just what is asked for, only that one is read.

    Args:
        state_dict: FQN to value; what ``metadata`` does not have is left out.
    """
    items: list[ReadItem] = []
    filled: set[str] = set()
    others: dict[str, Any] = {}
    chunks_of = _LocalChunks()
    with torch.no_grad():  # to_local() of a DTensor is then its local tensor, and no node of an autograd graph
        for key, value in state_dict.items():
            saved = metadata.state_dict_metadata.get(key)
            if saved is None:
                continue
            found = None
            if isinstance(saved, TensorStorageMetadata):
                local = chunks_of(value)
                found = None if local is None else _found(key, local, saved)
                chunks: Any = saved.chunks
                if found is None and isinstance(chunks, StoredChunks):
                    held = chunks_held(value) if local is None else [local]
                    resharded = None if held is None else read_overlap(key, chunks, held)
                    if resharded is not None:
                        items += resharded.items
                        if resharded.fill:
                            filled.add(key)
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
    """One saved chunk as a whole, if that is just what is asked for."""
    offsets = local.offsets
    chunks: Any = saved.chunks
    if isinstance(chunks, StoredChunks):
        place = chunks.find(offsets)
        return None if place is None or chunks[place].sizes != local.sizes else _whole(key, local, place)
    for number, chunk in enumerate(saved.chunks):
        if chunk.offsets == offsets:
            if chunk.sizes != local.sizes:
                return None
            return _whole(key, local, number)
    return None


def _whole(key: str, local: ChunkStorageMetadata, number: int) -> ReadItem:
    """All of the saved chunk ``number``, which is ``local``."""
    zeros = _zeros(len(local.offsets))
    stored = MetadataIndex(key, local.offsets, number)
    wanted = stored if number == 0 else MetadataIndex(key, local.offsets, 0)
    return ReadItem(LoadItemType.TENSOR, wanted, zeros, stored, zeros, local.sizes)


class _LocalChunks:
    """The one chunk that this rank holds of a value, of those of one state dict."""

    def __init__(self) -> None:
        self._whole: dict[torch.Size, ChunkStorageMetadata] = {}
        # By all that torch computes a chunk from. The meshes live as long as the tensors of the state dict.
        self._sharded: dict[tuple[Any, ...], ChunkStorageMetadata | None] = {}

    def __call__(self, value: Any) -> ChunkStorageMetadata | None:
        """``None`` where stock has to say what is held."""
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return None if hasattr(value, "__create_chunk_list__") else self._of_whole(value.size())
        if kind is DTensor:
            return self._of_dtensor(value)
        return None

    def _of_whole(self, size: torch.Size) -> ChunkStorageMetadata:
        try:
            return self._whole[size]
        except KeyError:
            chunk = self._whole[size] = ChunkStorageMetadata(_zeros(len(size)), size)
            return chunk

    def _of_dtensor(self, value: DTensor) -> ChunkStorageMetadata | None:
        mesh, placements = value.device_mesh, value.placements
        local = value.to_local()
        # Chunks that do not follow from the placements are told by an attribute of the tensor, as with Megatron-FSDP.
        own = "__create_chunk_list__" in vars(value) or hasattr(local, "__create_chunk_list__")
        if own or type(local) not in (torch.Tensor, torch.nn.Parameter):
            return None
        # Equal placements may be of two classes (Shard and _StridedShard of torch 2.7), which place differently.
        key = (id(mesh), placements, tuple(map(type, placements)), value.shape)
        if key not in self._sharded:
            self._sharded[key] = _only_chunk(value)
        chunk = self._sharded[key]
        # A rank that is not in the mesh, or holds nothing, is for stock to plan; and so is a shard of another size.
        return chunk if chunk is not None and math.prod(chunk.sizes) == local.numel() > 0 else None


def _only_chunk(value: DTensor) -> ChunkStorageMetadata | None:
    # What else a placement class of somebody else's depends on is not for us to say, and a reduction is refused.
    known = all(type(p).__module__.partition(".")[0] == "torch" and not p.is_partial() for p in value.placements)
    create_chunk_list = getattr(value, "__create_chunk_list__", None)
    if not known or value.device_mesh.get_coordinate() is None or not callable(create_chunk_list):
        return None
    chunks: Sequence[ChunkStorageMetadata] = create_chunk_list()
    return chunks[0] if len(chunks) == 1 else None


@cache
def _zeros(n_dimensions: int) -> torch.Size:
    return torch.Size([0] * n_dimensions)
