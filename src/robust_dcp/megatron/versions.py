"""What robust_dcp uses of Megatron-Core that is not the same in all its versions, or is private there.

The only module that imports such names: it looks at what is there, never at a version number. Holds from 0.14 to 0.19.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.dist_checkpointing import core, mapping, serialization, state_dict_utils, validation
from megatron.core.dist_checkpointing import utils as dist_checkpointing_utils
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.disk import PosixDisk
from robust_dcp.storage.files.whole_file import read_whole_file

__all__ = [
    "COMMON_STATE_KEY",
    "CheckpointingException",
    "KeyOnly",
    "MCoreLoadPlanner",
    "Resharding",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "async_request_class",
    "backend_of",
    "check_keys",
    "checkpoint_config",
    "common_state_is_a_sharded_object",
    "dequantized",
    "has_quantized_data",
    "is_main_replica",
    "is_parallel_load_wrapper",
    "load_is_collective",
    "merge",
    "merge_factories",
    "metadata_attributes_of",
    "nested_values",
    "no_rank_is_alive",
    "prepare_to_load",
    "prepare_to_save",
    "reads_torch_dist",
    "saved_shapes",
    "strictness",
    "to_dcp_targets",
    "to_dcp_values",
    "translates_flattened_ranges",
    "uses_multi_storage_client",
    "writes_torch_dist",
]

_MAX_CONFIG_NBYTES = 1 << 20

GroupedShards = dict[str, list[ShardedBase]]

COMMON_STATE_KEY = "common_state"
"""The ShardedObject that holds what is not sharded, from 0.19 on."""

_group: Callable[..., tuple[GroupedShards, Any, Any]] = megatron_torch._replace_state_dict_keys_with_sharded_keys
_translate: Callable[..., dict[str, Any]] = megatron_torch.mcore_to_pyt_state_dict


def to_dcp_values(grouped: GroupedShards) -> dict[str, Any]:
    """Megatron's own translation: shards of one key to one tensor that DCP can save, objects to serialized bytes.

    Raises:
        CheckpointingException: for a shard without data.
    """
    return _translate(grouped, is_loading=False)


def translates_flattened_ranges() -> bool:
    """Whether shards may be flattened ranges of a tensor: up to 0.15 the distributed optimizer can be saved as such."""
    return hasattr(megatron_torch, "nd_flattened_tensor_reformulated_global_shape")


def metadata_attributes_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What ``MCoreSavePlanner`` adds up to 0.15 to DCP's ``Metadata`` for what :func:`to_dcp_values` returned.

    The shapes that tensors had before their flattened ranges were translated; later versions have nothing to add.
    """
    told = {key: getattr(value, "mcore_metadata", None) for key, value in values.items()}
    return {"mcore_data": {key: facts for key, facts in told.items() if facts}}


def async_request_class(async_strategy: str | None) -> Any:
    """The ``AsyncRequest`` of a queue.

    Args:
        async_strategy: ``"nvrx"`` or ``"mcore"`` (0.17 and newer), whose queue the caller puts the request into;
            ``None`` where Megatron has but one.
    """
    if async_strategy is None or not hasattr(megatron_torch, "get_async_strategy"):
        return AsyncRequest
    _, modules = megatron_torch.get_async_strategy(async_strategy)
    return modules["AsyncRequest"]


def no_rank_is_alive(schedule: Callable[..., Any], is_alive: bool) -> bool:
    """``AsyncCaller.sync_all_async_calls``: whether ``is_alive`` is true on no rank. All ranks call it.

    Args:
        schedule: the method of a queue. Megatron and ``nvidia_resiliency_ext`` have such classes in one module each.
        is_alive: whether this rank is not done.
    """
    caller: Any = sys.modules[schedule.__module__].AsyncCaller
    return bool(caller.sync_all_async_calls(None, int(is_alive)))


def prepare_to_save(
    sharded_state_dict: dict[str, Any], content_metadata: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``dist_checkpointing.save`` does before the first exchange: factories applied, what is not sharded apart.

    Returns:
        The sharded part, and the common state; ``content_metadata`` stands in the latter under Megatron's key.
    """
    if content_metadata is not None:
        # As `_clean_metadata_for_serialization` of 0.16 does, if it is asked to validate: a group cannot be saved.
        cleaned = {key: value for key, value in content_metadata.items() if key != "dp_cp_group"}
        sharded_state_dict[serialization._CONTENT_METADATA_KEY] = cleaned
    sharded, common = state_dict_utils.save_preprocess(sharded_state_dict, validate_access_integrity=False)
    return sharded, common


def prepare_to_load(
    sharded_state_dict: dict[str, Any], strategy: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What ``dist_checkpointing.load`` does with a state dict before it exchanges or reads anything.

    Returns:
        The sharded part; what is not persistent; the factories that merge what was loaded.
    """
    if not getattr(strategy, "stream_ckpt_dequant", False):
        dist_checkpointing_utils.force_all_tensors_to_non_fp8(sharded_state_dict)
    sharded, not_persistent, factories = state_dict_utils.load_preprocess(sharded_state_dict)
    sharded, _ = dist_checkpointing_utils.extract_sharded_base(sharded)
    return sharded, not_persistent, factories


def merge_factories(loaded: dict[str, Any], factories: dict[str, Any]) -> dict[str, Any]:
    """Let every factory make its tensor out of what was loaded for it."""
    merged: dict[str, Any] = mapping.apply_factory_merges(loaded, factories)
    return merged


def strictness(strict: Any) -> tuple[Any, bool, bool, bool]:
    """``strict`` as Megatron's enum; whether it asks for the checkpoint's keys, for those of all ranks, and to
    return the mismatches."""
    handling = validation.StrictHandling
    parsed = validation.parse_strict_flag(strict)
    return (
        parsed,
        handling.requires_explicit_ckpt_mismatch_check(parsed),
        handling.requires_global_app_metadata(parsed),
        handling.requires_returning_mismatch_keys(parsed),
    )


def backend_of(checkpoint_dir: str) -> str:
    """The backend of a checkpoint (``"torch_dist"``), by its ``metadata.json``. Local to this rank.

    Raises:
        CheckpointingException: there is no such directory, or no ``metadata.json`` in it.
        CorruptCheckpoint, StorageError: it is no such file.
    """
    if not os.path.isdir(checkpoint_dir):
        raise CheckpointingException(f"Checkpoint directory {checkpoint_dir} does not exist")
    path = os.path.join(checkpoint_dir, core.CONFIG_FNAME)
    data = read_whole_file(PosixDisk(), path, _MAX_CONFIG_NBYTES)
    if data is None:
        raise CheckpointingException(f"{checkpoint_dir} is not a distributed checkpoint")
    try:
        return str(core.CheckpointingConfig(**json.loads(data)).sharded_backend)[:100]
    except Exception as error:  # no JSON, or nested too deeply, or of other fields
        found = f"{type(error).__name__}: {error!s:.200}"
        raise CorruptCheckpoint(
            f"{path} cannot be used: expected Megatron's checkpointing config in JSON, found {found}; take another "
            "checkpoint, or restore the file",
            file=path,
            expected="a checkpointing config",
            found=found,
        ) from error


def checkpoint_config(strategy: Any) -> bytes:
    """The bytes of ``metadata.json`` for a checkpoint by ``strategy``."""
    config = core.CheckpointingConfig(
        getattr(strategy, "backend", "torch_dist"), int(getattr(strategy, "version", 1) or 1)
    )
    return json.dumps(asdict(config)).encode()


def common_state_is_a_sharded_object() -> bool:
    """Whether this Megatron saves the common state as a ShardedObject (0.19), not as ``common.pt``."""
    return hasattr(serialization, "_legacy_common_state_exists")


def load_is_collective() -> bool:
    """Whether all ranks call ``TorchDistLoadShardedStrategy.load`` together: from 0.18 on each may load alone."""
    try:
        return "no_dist=True" not in inspect.getsource(TorchDistLoadShardedStrategy)
    except OSError:  # installed without sources
        return not common_state_is_a_sharded_object()


def uses_multi_storage_client() -> bool:
    """Whether Megatron reads and writes by NVIDIA's Multi-Storage Client (``--enable-msc``)."""
    from megatron.core.msc_utils import MultiStorageClientFeature

    return bool(MultiStorageClientFeature.is_enabled())


class Resharding:
    """Tensors that 0.14 saved as flattened ranges, brought into the layout that is asked for; later ones have none.

    Args:
        sharded_state_dict: what is to be loaded.
        metadata: of the checkpoint.
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
        """What was loaded for ``self.sharded_state_dict``, as the caller asked for it."""
        if self._restore is None:
            return loaded
        restored: dict[str, Any] = megatron_torch.restore_nd_flattened_tensors_formulation(loaded, self._restore)
        return restored


def _reformulations(sharded_state_dict: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """As ``get_reformulation_metadata`` of 0.14, which would read ``.metadata`` once more."""
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
    """What DCP loads into, for a sharded state dict, and what turns it into the state dict that Megatron expects."""
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
    """Megatron's ``_unwrap_pyt_sharded_tensor``; that of 0.14 takes sharded tensors only."""
    return megatron_torch._unwrap_pyt_sharded_tensor(value) if isinstance(value, torch.Tensor) else value


class KeyOnly:
    """Stands for a ShardedTensor or ShardedObject of which only the key is known here."""

    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key


def check_keys(
    sharded_state_dict: dict[str, Any], strict: Any, global_metadata: Any, saved: Iterable[str]
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Megatron's strictness: log, raise or ignore what checkpoint and state dict do not both have.

    Args:
        sharded_state_dict: of this rank.
        strict: a ``StrictHandling``.
        global_metadata: the keys of all ranks, in lists of objects with a ``key``; ``None`` if not asked for.
        saved: the keys that the checkpoint holds.

    Returns:
        The state dict without unexpected keys; the missing and the unexpected keys.

    Raises:
        CheckpointingException: there are such keys, and ``strict`` says to raise.
    """
    checked: tuple[dict[str, Any], set[str], set[str]] = validation.validate_integrity_and_strict_load(
        sharded_state_dict,
        strict,
        False,
        list(nested_values(sharded_state_dict)),
        global_metadata,
        {key: KeyOnly(key) for key in saved if key != COMMON_STATE_KEY},
    )
    return checked


def is_parallel_load_wrapper(strategy: Any) -> bool:
    """Whether this is ``FullyParallelLoadStrategyWrapper`` around a strategy that reads ``torch_dist``."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    return isinstance(strategy, FullyParallelLoadStrategyWrapper) and reads_torch_dist(strategy.base_strategy)


def reads_torch_dist(strategy: Any) -> bool:
    """Whether this strategy reads as Megatron's own for ``torch_dist``, or as ours, which derives from it."""
    if strategy is None or isinstance(strategy, tuple):
        return True
    kind = type(strategy)
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return issubclass(kind, TorchDistLoadShardedStrategy) and (
        is_ours or kind.load is TorchDistLoadShardedStrategy.load
    )


def writes_torch_dist(strategy: Any) -> bool:
    """Whether this strategy writes as Megatron's own for ``torch_dist``: a class derived from it may do otherwise."""
    kind, stock = type(strategy), TorchDistSaveShardedStrategy
    return issubclass(kind, stock) and kind.async_save is stock.async_save and kind.save is stock.save


def saved_shapes(metadata: Any) -> dict[str, ShardedTensor]:
    """``TorchDistLoadShardedStrategy.load_tensors_metadata``, of metadata that has been read already."""
    return dict(TorchDistLoadShardedStrategy.load_tensors_metadata(None, None, metadata))


def has_quantized_data(shard: ShardedTensor) -> bool:
    """Whether a shard holds a tensor of some class of its own, such as Transformer Engine's for FP8."""
    return shard.data is not None and type(shard.data) not in (torch.Tensor, torch.nn.Parameter)


def dequantized(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same with FP8 tensors in their nominal dtype, as ``FullyParallelLoadStrategyWrapper`` returns them."""

    def in_nominal_dtype(value: Any) -> Any:
        if not isinstance(value, ShardedTensor) or not has_quantized_data(value):
            return value
        from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

        if not is_float8tensor(value.data):
            return value
        found = copy.copy(value)
        found.data = dequantize_fp8_tensor(value.data.detach())
        return found

    found: dict[str, Any] = dict_list_map_outplace(in_nominal_dtype, sharded_state_dict)
    return found
