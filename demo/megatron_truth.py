"""Turns Megatron's sharded state dicts into plain global values. They are gathered at a save and compared at a load.

It knows ShardedTensor, ShardedObject and factories, and uses nothing of Megatron's checkpoint strategies. Used by the
Megatron jobs of the demo, by tests/megatron and by tests/gpu.
"""

from __future__ import annotations

from collections import Counter
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
from torch.utils import _pytree

from demo.truth import Comparison, Truth

__all__ = ["compare", "gather_truth"]


def gather_truth(sharded_state_dict: dict[str, Any]) -> Truth | None:
    """Gather the whole values of all main replicas on rank 0. Returns ``None`` on other ranks.

    Raises:
        ValueError: the shards of a tensor do not add up to the whole tensor.
    """
    apply_factories(sharded_state_dict)
    objects, chunks = {}, []
    for leaf in _pytree.tree_leaves(sharded_state_dict):
        if isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            objects[leaf.unique_key] = leaf.data
        elif isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            chunks.append((leaf.key, tuple(leaf.global_shape), _place_of(leaf), leaf.data.detach().clone()))
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((objects, chunks), gathered)
    if gathered is None:
        return None
    truth: Truth = {}
    gathered_numel: Counter[str] = Counter()
    for objects, chunks in gathered:
        truth.update(objects)
        for key, shape, place, data in chunks:
            truth.setdefault(key, torch.empty(shape, dtype=data.dtype))[place] = data
            gathered_numel[key] += data.numel()
    for key, numel in gathered_numel.items():
        if numel != truth[key].numel():
            raise ValueError(f"the shards of {key!r} do not add up to a tensor of shape {list(truth[key].shape)}")
    return truth


def compare(template: dict[str, Any], loaded: dict[str, Any], truth: Truth) -> Comparison:
    """Compare what Megatron loaded on this rank with ``truth``.

    Args:
        template: a sharded state dict with the same structure as the one given to ``dist_checkpointing.load``. It says
            which part of which global value each leaf of ``loaded`` is.
        loaded: what ``dist_checkpointing.load`` returned. For a leaf that it lacks, the value in ``template`` counts.
    """
    for path, leaf in _pytree.tree_flatten_with_path(template)[0]:
        value = _pytree.key_get({**template, **loaded}, path)
        if value is not leaf and isinstance(leaf, ShardedTensor | ShardedTensorFactory | ShardedObject):
            leaf.data = value
    apply_factories(template)
    comparison = Comparison(truth)
    for leaf in _pytree.tree_leaves(template):
        if isinstance(leaf, ShardedTensor):
            comparison.compare(leaf.key, leaf.data, _place_of(leaf))
        elif isinstance(leaf, ShardedObject):
            comparison.compare(leaf.unique_key, leaf.data)
    return comparison


def _place_of(shard: ShardedTensor) -> tuple[int | slice, ...]:
    """Where a shard lies in its tensor. Megatron-Core had a method for it until 0.19."""
    new_axes, axes = shard.global_offset[: shard.prepend_axis_num], shard.global_offset[shard.prepend_axis_num :]
    lengths = zip(axes, shard.local_shape, strict=True)
    return (*new_axes, *(slice(offset, offset + length) for offset, length in lengths))
