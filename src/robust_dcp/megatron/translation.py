"""Megatron-Core's own translation between its shards and the state dict that DCP saves or loads.

It differs between versions: up to 0.15 a shard may be a flattened range of a tensor, and a load may have to reshard
these. Like :mod:`~robust_dcp.megatron.versions`, this module checks which names exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch

__all__ = ["Resharding", "metadata_attributes_of", "to_dcp_targets", "to_dcp_values", "translates_flattened_ranges"]

GroupedShards = dict[str, list[ShardedBase]]

_group: Callable[..., tuple[GroupedShards, Any, Any]] = megatron_torch._replace_state_dict_keys_with_sharded_keys
_translate: Callable[..., dict[str, Any]] = megatron_torch.mcore_to_pyt_state_dict


def to_dcp_values(grouped: GroupedShards) -> dict[str, Any]:
    """Megatron's own translation: it turns the shards of a key into one tensor for DCP, and objects into bytes.

    Raises:
        CheckpointingException: a shard has no data.
    """
    return _translate(grouped, is_loading=False)


def translates_flattened_ranges() -> bool:
    """Whether shards may be flattened ranges of a tensor. Up to 0.15 the distributed optimizer can save such shards."""
    return hasattr(megatron_torch, "nd_flattened_tensor_reformulated_global_shape")


def metadata_attributes_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The attributes that ``MCoreSavePlanner`` (up to 0.15) adds to DCP's ``Metadata``.

    These are the shapes of tensors before their flattened ranges were translated. Later versions add nothing.

    Args:
        values: what :func:`to_dcp_values` returned.
    """
    told = {key: getattr(value, "mcore_metadata", None) for key, value in values.items()}
    return {"mcore_data": {key: facts for key, facts in told.items() if facts}}


class Resharding:
    """Converts tensors that 0.14 saved as flattened ranges into the requested layout. Later versions have no such ones.

    Args:
        sharded_state_dict: the shards to load.
        metadata: the metadata of the checkpoint.
    """

    def __init__(self, sharded_state_dict: dict[str, Any], metadata: Any) -> None:
        self.sharded_state_dict = sharded_state_dict
        self.has_legacy_tensors = False
        self._restore: Any = None
        if not hasattr(megatron_torch, "apply_nd_flattened_tensors_reformulation"):
            return
        formulations = _reformulations(sharded_state_dict, metadata)
        self.sharded_state_dict, self._restore = megatron_torch.apply_nd_flattened_tensors_reformulation(
            sharded_state_dict, formulations
        )
        self.has_legacy_tensors = any(
            megatron_torch.is_nd_flattened_tensor(shard) and shard.key not in formulations
            for shard in nested_values(self.sharded_state_dict)
        )

    def restored(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """Convert what was loaded for ``self.sharded_state_dict`` into the form that the caller asked for."""
        if self._restore is None:
            return loaded
        restored: dict[str, Any] = megatron_torch.restore_nd_flattened_tensors_formulation(loaded, self._restore)
        return restored


def _reformulations(sharded_state_dict: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """Like ``get_reformulation_metadata`` of 0.14, but without reading ``.metadata`` a second time."""
    saved = getattr(metadata, "mcore_data", None) or {}
    found = {}
    for shard in nested_values(sharded_state_dict):
        if not megatron_torch.is_nd_flattened_tensor(shard):
            continue
        shape = saved.get(shard.key, {}).get("nd_reformulated_orig_global_shape")
        if shape is not None:
            size = metadata.state_dict_metadata[shard.key].size
            found[shard.key] = megatron_torch.TensorReformulationMetadata(shape, size)
        elif len(shard.global_shape) != 1:
            raise CheckpointingException(
                f"Cannot find global shape metadata for N-D flattened tensor {shard} in checkpoint metadata"
            )
    return found


def to_dcp_targets(resharding: Resharding) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Make the state dict that DCP loads into.

    Returns:
        That state dict, and a function that converts it, once loaded, to the state dict that Megatron expects.
    """
    template = resharding.sharded_state_dict
    grouped, flat_mapping, renamed = _group(template)
    more = {"load_legacy_1d_flatten_tensors": True} if resharding.has_legacy_tensors else {}
    targets = _translate(grouped, True, **more)

    def restore(loaded: dict[str, Any]) -> dict[str, Any]:
        lists = {key: _values_of(value) for key, value in loaded.items()}
        nested = megatron_torch._replace_sharded_keys_with_state_dict_keys(lists, flat_mapping, renamed)
        megatron_torch._restore_dict_types(nested, template)
        return resharding.restored(nested)

    return targets, restore


def _values_of(value: Any) -> Any:
    """Megatron's ``_unwrap_pyt_sharded_tensor``, which in 0.14 takes only sharded tensors."""
    return megatron_torch._unwrap_pyt_sharded_tensor(value) if isinstance(value, torch.Tensor) else value
