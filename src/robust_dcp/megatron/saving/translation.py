"""A Megatron sharded state dict as the state dict that DCP saves: which replicas take part, and which do not.

Decides on this rank alone; never exchanges anything. Called by ``planner``, so that all ranks hear of a failure here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from robust_dcp.errors import PlanConflict
from robust_dcp.megatron import versions
from robust_dcp.megatron.versions import ShardedBase, ShardedObject, ShardedTensor, is_main_replica

__all__ = ["to_dcp_state_dict"]

_Chunk = tuple[tuple[int, ...], tuple[int, int] | None]
"""Offset in the whole tensor, and the range of a flattened chunk."""


def to_dcp_state_dict(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate what ``megatron.core.dist_checkpointing.save`` hands to a strategy.

    Tensors: every replica takes part, and the global plan picks the rank that writes it. Replicas of a ShardedTensor
    hold the same bits by Megatron's contract, and ``FullyParallelSaveStrategyWrapper`` picks among them as freely. So
    a ``replica_id`` that a stale ``do_cache_distribution`` set to 1 on every rank loses nothing, and the work is
    balanced over all ranks that hold a shard, not over one data-parallel group.

    Objects: only the main replica takes part. Replicas of a ShardedObject need not be alike (RNG states of
    data-parallel ranks are not), and the main one is what stock Megatron saves.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, factories already applied.
            As with stock strategies, the shards in it are changed (detached, made contiguous).

    Returns:
        Key to a DCP-compatible tensor, or to ``io.BytesIO`` with a serialized object. Not nested.

    Raises:
        PlanConflict: one key stands for two things on this rank: a tensor and an object, or two tensors that both
            claim to be the main replica of one chunk.
        ValueError: for a shard that is a flattened range of a tensor, where Megatron-Core (0.16 and newer) knows none.
        CheckpointingException: for a main replica without data.
    """
    kept: dict[str, list[ShardedBase]] = {}
    for key, shards in versions.group_by_sharded_key(sharded_state_dict).items():
        _refuse_mixture(key, shards)
        chosen = _tensors(key, shards) if isinstance(shards[0], ShardedTensor) else _objects(key, shards)
        if chosen:
            kept[key] = chosen
    return versions.to_dcp_values(kept)


def _refuse_mixture(key: str, shards: Sequence[ShardedBase]) -> None:
    kinds = {isinstance(shard, ShardedTensor) for shard in shards}
    if len(kinds) > 1:
        raise PlanConflict(
            f"the sharded state dict of this rank has a ShardedTensor and a ShardedObject under the key {key!r}; give "
            "one of them another key",
            key=key,
            ranks=[_own_rank()],
        )


def _objects(key: str, shards: Sequence[ShardedObject]) -> list[ShardedBase]:
    main = [shard for shard in shards if is_main_replica(shard.replica_id)]
    if any(shard.data is not main[0].data for shard in main):
        raise PlanConflict(
            f"the sharded state dict of this rank has {len(main)} ShardedObjects under the key {key!r}, and all "
            "of them claim to be its main replica; give them different keys or replica ids",
            key=key,
            ranks=[_own_rank()],
        )
    return list(main)


def _tensors(key: str, shards: Sequence[ShardedTensor]) -> list[ShardedBase]:
    """One shard for each chunk: a rank may hold a chunk twice (tied weights), and then the main replica counts."""
    chunks: dict[_Chunk, ShardedTensor] = {}
    for shard in shards:
        is_main = is_main_replica(shard.replica_id)
        if shard.data is None and not is_main:
            continue  # a placeholder: this rank has nothing that could be saved in place of the main replica
        chunk = _chunk_of(key, shard)
        held = chunks.get(chunk)
        if held is not None and is_main and is_main_replica(held.replica_id) and not _is_same(held, shard):
            raise PlanConflict(
                f"the sharded state dict of this rank has two tensors that claim to be the main replica of {key!r} at "
                f"offset {list(shard.global_offset)}; give them different keys or replica ids",
                key=key,
                ranks=[_own_rank()],
            )
        if is_main or held is None:
            chunks[chunk] = shard
    return list(chunks.values())


def _chunk_of(key: str, shard: ShardedTensor) -> _Chunk:
    """What tells the chunks of one tensor apart: up to 0.15 those of the distributed optimizer may be cut once more."""
    flat = getattr(shard, "flattened_range", None)
    if flat is None:
        return tuple(shard.global_offset), None
    if not versions.translates_flattened_ranges():
        raise ValueError(
            f"{key!r} is a flattened range of a tensor, which this Megatron-Core does not save; set "
            "distrib_optim_sharding_type to 'fully_reshardable' or 'dp_reshardable' "
            "(--dist-ckpt-optim-fully-reshardable)"
        )
    return tuple(shard.global_offset), (flat.start, flat.stop)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_same(one: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether two shards are one tensor in memory."""
    if one.data is None or other.data is None:
        return one.data is other.data
    same_memory: bool = one.data.data_ptr() == other.data.data_ptr() and one.data.shape == other.data.shape
    return same_memory
