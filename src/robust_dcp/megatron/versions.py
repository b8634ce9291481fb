"""What robust_dcp uses of Megatron-Core that is not the same in all its versions, or is private there.

The only module that imports such names: it looks at what is there, never at a version number. Holds from 0.14 to 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

__all__ = [
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "TorchDistSaveShardedStrategy",
    "finished_request",
    "group_by_sharded_key",
    "is_main_replica",
    "to_dcp_values",
]

GroupedShards = dict[str, list[ShardedBase]]

_group: Callable[..., tuple[GroupedShards, Any, Any]] = megatron_torch._replace_state_dict_keys_with_sharded_keys
_translate: Callable[..., dict[str, Any]] = megatron_torch.mcore_to_pyt_state_dict


def group_by_sharded_key(sharded_state_dict: dict[str, Any]) -> GroupedShards:
    """All shards and objects of this rank, replicas included, by the key that they have in a checkpoint."""
    grouped, _, _ = _group(sharded_state_dict, keep_only_main_replica=False)
    return grouped


def to_dcp_values(grouped: GroupedShards) -> dict[str, Any]:
    """Megatron's own translation: shards of one key to one tensor that DCP can save, objects to serialized bytes.

    Raises:
        CheckpointingException: for a shard without data.
    """
    return _translate(grouped, is_loading=False)


def finished_request(async_strategy: str | None) -> Any:
    """An ``AsyncRequest`` with nothing left to do but the finalizers that Megatron adds to it.

    Args:
        async_strategy: ``"nvrx"`` or ``"mcore"`` (0.17 and newer), whose queue the caller puts the request into;
            ``None`` where Megatron has but one.
    """
    request_class: Any = AsyncRequest
    if async_strategy is not None and hasattr(megatron_torch, "get_async_strategy"):
        _, modules = megatron_torch.get_async_strategy(async_strategy)
        request_class = modules["AsyncRequest"]
    return request_class(async_fn=None, async_fn_args=(), finalize_fns=[])
