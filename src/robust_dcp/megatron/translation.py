"""A Megatron sharded state dict as the state dict that DCP saves: which replicas take part, and which do not.

Decides on this rank alone; never exchanges anything. Called by ``planner``, so that all ranks hear of a failure here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from robust_dcp.megatron import versions
from robust_dcp.megatron.versions import ShardedBase, ShardedObject, ShardedTensor, is_main_replica

__all__ = ["to_dcp_state_dict"]


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
        ValueError: for a shard that is a flattened range of a tensor; such checkpoints need metadata of Megatron's own.
        CheckpointingException: for a main replica without data.
    """
    kept: dict[str, list[ShardedBase]] = {}
    for key, shards in versions.group_by_sharded_key(sharded_state_dict).items():
        chosen = _tensors(key, shards) if isinstance(shards[0], ShardedTensor) else _objects(shards)
        if chosen:
            kept[key] = chosen
    return versions.to_dcp_values(kept)


def _objects(shards: Sequence[ShardedObject]) -> list[ShardedBase]:
    return [shard for shard in shards if is_main_replica(shard.replica_id)]


def _tensors(key: str, shards: Sequence[ShardedTensor]) -> list[ShardedBase]:
    """One shard for each chunk: a rank may hold a chunk twice (tied weights), and then the main replica counts."""
    chunks: dict[tuple[int, ...], ShardedTensor] = {}
    for shard in shards:
        if getattr(shard, "flattened_range", None) is not None:
            raise ValueError(
                f"{key!r} is a flattened range of a tensor, which robust_dcp does not save; set "
                "distrib_optim_sharding_type to 'fully_reshardable' or 'dp_reshardable' "
                "(--dist-ckpt-optim-fully-reshardable)"
            )
        is_main = is_main_replica(shard.replica_id)
        if shard.data is None and not is_main:
            continue  # a placeholder: this rank has nothing that could be saved in place of the main replica
        if is_main or shard.global_offset not in chunks:
            chunks[shard.global_offset] = shard
    return list(chunks.values())
