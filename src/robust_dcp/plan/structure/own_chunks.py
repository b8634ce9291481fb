"""Tensors that say themselves which chunks of a larger tensor they hold, for example those of Megatron-FSDP.

Up to torch 2.14 such a tensor has methods like ``__create_chunk_list__``. Since 2.15 four attributes suffice, those of
``torch.distributed.checkpoint.CheckpointableTensor``; older versions do not look at them. Called by whatever
describes a tensor of a state dict. It must not take such a tensor for a whole one, and lets stock describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

__all__ = ["global_size", "has_own_chunks", "own_chunks"]


_PROTOCOL: Any = getattr(dcp, "CheckpointableTensor", None)
"""``None`` before torch 2.15."""


def has_own_chunks(value: Any) -> bool:
    """Whether a tensor says itself which chunks it holds."""
    return (
        hasattr(value, "__create_chunk_list__")
        or hasattr(value, "__create_write_items__")
        or hasattr(value, "__get_tensor_shard__")
        or _is_checkpointable(value)
    )


def own_chunks(value: Any) -> Sequence[ChunkStorageMetadata] | None:
    """The chunks that a tensor says it holds; ``None`` if it says nothing."""
    create_chunk_list = getattr(value, "__create_chunk_list__", None)
    if callable(create_chunk_list):
        chunks: Sequence[ChunkStorageMetadata] = create_chunk_list()
        return chunks
    if _is_checkpointable(value):
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in zip(value.global_offsets, value.local_sizes, strict=True)
        ]
    return None


def global_size(value: Any) -> torch.Size | None:
    """The size of the whole tensor of which ``value`` is a part; ``None`` if ``value`` has no size."""
    if _is_checkpointable(value):
        return torch.Size(value.global_shape)
    size = getattr(value, "size", None)
    return torch.Size(size()) if callable(size) else None


def _is_checkpointable(value: Any) -> bool:
    # The first test alone rules out almost every tensor. The other one looks at all attributes of the protocol.
    return (
        _PROTOCOL is not None
        and hasattr(value, "global_offsets")
        and isinstance(value, torch.Tensor)
        and isinstance(value, _PROTOCOL)
    )
