"""Turns Megatron's sharded state dicts into plain global values. They are gathered at a save and compared at a load.

It knows ShardedTensor, ShardedObject and factories, and uses nothing of Megatron's checkpoint strategies. Used by the
Megatron jobs of the demo and by tests/megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Part:
    """The part of a whole tensor that a shard is.

    Attributes:
        shape: the shape of the whole tensor.
        offsets, sizes: the offsets and sizes of the chunk in the whole.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shard: ShardedTensor) -> _Part:
        sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        return cls(tuple(shard.global_shape), tuple(shard.global_offset), sizes)

    def chunk(self, whole: torch.Tensor) -> torch.Tensor:
        """The chunk, as a view of the whole."""
        return whole[tuple(slice(low, low + size) for low, size in zip(self.offsets, self.sizes, strict=True))]


Parts = list[tuple[_Part, torch.Tensor]]


def gather_truth(sharded_state_dict: dict[str, Any]) -> Truth | None:
    """Gather the whole values of all main replicas on rank 0. Returns ``None`` on other ranks.

    Raises:
        ValueError: the shards of a tensor do not add up to the whole tensor.
    """
    apply_factories(sharded_state_dict)
    local: dict[str, Any] = {"tensors": defaultdict(list), "objects": {}}
    for _, leaf in _leaves(sharded_state_dict):
        if isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            local["objects"][leaf.unique_key] = leaf.data
        elif isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            local["tensors"][leaf.key].append((_Part.of(leaf), leaf.data.detach().clone()))
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local, gathered)
    if gathered is None:
        return None
    parts: dict[str, Parts] = defaultdict(list)
    truth: Truth = {}
    for rank in gathered:
        truth.update(rank["objects"])
        for key, of_rank in rank["tensors"].items():
            parts[key].extend(of_rank)
    truth.update((key, _assemble(key, of_key)) for key, of_key in parts.items())
    return truth


def compare(template: dict[str, Any], loaded: dict[str, Any], truth: Truth) -> Comparison:
    """Compare what Megatron loaded on this rank with ``truth``.

    Args:
        template: a sharded state dict with the same structure as the one given to ``dist_checkpointing.load``. It says
            which part of which global value each leaf of ``loaded`` is.
        loaded: what ``dist_checkpointing.load`` returned. For a leaf that it lacks, the value in ``template`` counts.
    """
    comparison = Comparison()
    _fill(template, loaded)
    apply_factories(template)
    for _, leaf in _leaves(template):
        if isinstance(leaf, ShardedTensor):
            if leaf.key not in truth:
                comparison.missing(leaf.key)
                continue
            expected = _Part.of(leaf).chunk(truth[leaf.key])
            comparison.tensor(leaf.key, _with_prepended_axes(leaf), expected)
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
    """Put every loaded value into the leaf of ``template`` at the same place."""
    for path, leaf in list(_leaves(template)):
        if path[0] in loaded and isinstance(leaf, ShardedTensor | ShardedTensorFactory | ShardedObject):
            value = loaded
            for step in path:
                value = value[step]
            leaf.data = value


def _with_prepended_axes(shard: ShardedTensor) -> torch.Tensor:
    data: torch.Tensor = shard.data.detach()
    return data.reshape((1,) * shard.prepend_axis_num + tuple(data.shape))


def _assemble(key: str, parts: Parts) -> torch.Tensor:
    part, first = parts[0]
    whole = torch.empty(part.shape, dtype=first.dtype)
    if sum(data.numel() for _, data in parts) != whole.numel():
        raise ValueError(f"the shards of {key!r} do not add up to a tensor of shape {list(part.shape)}")
    for part, data in parts:
        part.chunk(whole)[...] = data
    return whole
