"""Megatron's sharded state dicts as plain global values: gathered when saved, compared when loaded.

Knows ShardedTensor, ShardedObject and factories; uses nothing of Megatron's checkpoint strategies. Used by the
Megatron jobs of the demo and by tests/megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)

from demo.truth import Comparison, Truth

__all__ = ["compare", "gather_truth"]

Chunks = list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]


def gather_truth(sharded_state_dict: dict[str, Any]) -> Truth | None:
    """The whole value of everything that the main replicas hold, on rank 0; ``None`` elsewhere.

    Raises:
        ValueError: if the shards of a tensor do not add up to it.
    """
    apply_factories(sharded_state_dict)
    local: dict[str, Any] = {"tensors": defaultdict(list), "objects": {}}
    for _, leaf in _leaves(sharded_state_dict):
        if isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            local["objects"][leaf.unique_key] = leaf.data
        elif isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            chunk = (tuple(leaf.global_shape), tuple(leaf.global_offset), _with_prepended_axes(leaf).clone())
            local["tensors"][leaf.key].append(chunk)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local, gathered)
    if gathered is None:
        return None
    chunks: dict[str, Chunks] = defaultdict(list)
    truth: Truth = {}
    for rank in gathered:
        truth.update(rank["objects"])
        for key, parts in rank["tensors"].items():
            chunks[key].extend(parts)
    truth.update((key, _assemble(key, parts)) for key, parts in chunks.items())
    return truth


def compare(template: dict[str, Any], loaded: dict[str, Any], truth: Truth) -> Comparison:
    """Compare what Megatron loaded on this rank with ``truth``.

    Args:
        template: a sharded state dict of the same structure as the one given to ``dist_checkpointing.load``; it says
            which part of which global value each leaf of ``loaded`` is.
        loaded: what ``dist_checkpointing.load`` returned. A leaf that is not in it is compared as ``template`` has it.
    """
    comparison = Comparison()
    _fill(template, loaded)
    apply_factories(template)
    for _, leaf in _leaves(template):
        if isinstance(leaf, ShardedTensor):
            if leaf.key not in truth:
                comparison.missing(leaf.key)
                continue
            data = _with_prepended_axes(leaf)
            where = tuple(slice(low, low + size) for low, size in zip(leaf.global_offset, data.shape, strict=True))
            comparison.tensor(leaf.key, data, truth[leaf.key][where])
        elif isinstance(leaf, ShardedObject):
            if leaf.unique_key not in truth:
                comparison.missing(leaf.unique_key)
                continue
            comparison.object(leaf.unique_key, leaf.data, truth[leaf.unique_key])
    return comparison


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from _leaves(value, (*path, place))
    else:
        yield path, tree


def _fill(template: Any, loaded: Any) -> None:
    """Put every loaded value into the leaf of ``template`` that stands at the same place."""
    for path, leaf in list(_leaves(template)):
        if path[0] in loaded and isinstance(leaf, ShardedTensor | ShardedTensorFactory | ShardedObject):
            value = loaded
            for step in path:
                value = value[step]
            leaf.data = value


def _with_prepended_axes(shard: ShardedTensor) -> torch.Tensor:
    data: torch.Tensor = shard.data.detach()
    return data.reshape((1,) * shard.prepend_axis_num + tuple(data.shape))


def _assemble(key: str, chunks: Chunks) -> torch.Tensor:
    shape, _, first = chunks[0]
    whole = torch.empty(shape, dtype=first.dtype)
    if sum(data.numel() for _, _, data in chunks) != whole.numel():
        raise ValueError(f"the shards of {key!r} do not add up to a tensor of shape {list(shape)}")
    for _, offsets, data in chunks:
        whole[tuple(slice(low, low + size) for low, size in zip(offsets, data.shape, strict=True))] = data
    return whole
