"""The parts of Megatron-Core that differ between its versions or are private, as far as robust_dcp uses them.

Only this module imports such names. It checks which names exist and never looks at a version number. It supports 0.16
and newer.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from megatron.core.dist_checkpointing import core, serialization, state_dict_utils, validation
from megatron.core.dist_checkpointing import utils as dist_checkpointing_utils
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

from robust_dcp.decoding import from_json
from robust_dcp.megatron.options import current_options
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.small_files import read_small_file
from robust_dcp.storage.reading.metadata_source import MetadataSource

_MAX_CONFIG_NBYTES = 1 << 20

COMMON_STATE_KEY = "common_state"
"""The key of the ShardedObject that holds the common state, from 0.19 on."""


def async_request_class(async_strategy: str | None) -> Any:
    """The ``AsyncRequest`` of a queue.

    Args:
        async_strategy: ``"nvrx"`` or ``"mcore"`` (0.17 and newer): the package that owns the queue. ``None`` if
            Megatron has only one queue.
    """
    if async_strategy is None or not hasattr(megatron_torch, "get_async_strategy"):
        return AsyncRequest
    _, modules = megatron_torch.get_async_strategy(async_strategy)
    return modules["AsyncRequest"]


def no_rank_is_alive(schedule: Callable[..., Any], is_alive: bool) -> bool:
    """``AsyncCaller.sync_all_async_calls``: whether ``is_alive`` is false on all ranks. All ranks call it.

    Args:
        schedule: a method of the queue. Megatron and ``nvidia_resiliency_ext`` each have an ``AsyncCaller`` in the
            module of their queue.
        is_alive: whether the save still runs on this rank.
    """
    caller: Any = sys.modules[schedule.__module__].AsyncCaller
    return bool(caller.sync_all_async_calls(None, int(is_alive)))


def to_dcp_values(grouped: dict[str, list[ShardedBase]]) -> dict[str, Any]:
    """Megatron's own translation: it turns the shards of a key into one tensor for DCP, and objects into bytes.

    Raises:
        CheckpointingException: a shard has no data.
    """
    values: dict[str, Any] = megatron_torch.mcore_to_pyt_state_dict(grouped, is_loading=False)
    return values


def to_dcp_live(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make the state dict that DCP would save, with objects as they are."""
    grouped, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
    objects = {
        key: [each.data for each in shards] for key, shards in grouped.items() if isinstance(shards[0], ShardedObject)
    }
    tensors = {key: shards for key, shards in grouped.items() if key not in objects}
    return {**to_dcp_values(tensors), **objects}


def to_dcp_targets(
    sharded_state_dict: dict[str, Any],
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Make the state dict that DCP loads into.

    Returns:
        That state dict, and a function that converts it, once loaded, to the state dict that Megatron expects.
    """
    grouped, flat_mapping, renamed = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)

    def restore(loaded: dict[str, Any]) -> dict[str, Any]:
        lists = {key: megatron_torch._unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
        nested: dict[str, Any] = megatron_torch._replace_sharded_keys_with_state_dict_keys(lists, flat_mapping, renamed)
        megatron_torch._restore_dict_types(nested, sharded_state_dict)
        return nested

    return megatron_torch.mcore_to_pyt_state_dict(grouped, True), restore


def prepare_to_save(
    sharded_state_dict: dict[str, Any], content_metadata: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Do what ``dist_checkpointing.save`` does before its first exchange: apply factories, and split the state dict.

    Returns:
        The sharded part and the common state. The common state has ``content_metadata`` under Megatron's key.
    """
    if content_metadata is not None:
        # A process group cannot be saved. `_clean_metadata_for_serialization` of 0.16 removes it when validating.
        cleaned = {key: value for key, value in content_metadata.items() if key != "dp_cp_group"}
        sharded_state_dict[serialization._CONTENT_METADATA_KEY] = cleaned
    sharded, common = state_dict_utils.save_preprocess(sharded_state_dict, validate_access_integrity=False)
    return sharded, common


def prepare_to_load(
    sharded_state_dict: dict[str, Any], strategy: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Do what ``dist_checkpointing.load`` does with a state dict before it exchanges or reads anything.

    Returns:
        The sharded part, the part that is not persistent, and the factories that merge the loaded values.
    """
    if not getattr(strategy, "stream_ckpt_dequant", False):
        dist_checkpointing_utils.force_all_tensors_to_non_fp8(sharded_state_dict)
    sharded, not_persistent, factories = state_dict_utils.load_preprocess(sharded_state_dict)
    sharded, _ = dist_checkpointing_utils.extract_sharded_base(sharded)
    return sharded, not_persistent, factories


def strictness(strict: Any) -> tuple[Any, bool, bool, bool]:
    """Read the argument ``strict``.

    Returns:
        Megatron's enum, and whether this mode needs the checkpoint's keys, whether it needs the keys of all ranks, and
        whether it returns the mismatches.
    """
    handling = validation.StrictHandling
    parsed = validation.parse_strict_flag(strict)
    return (
        parsed,
        handling.requires_explicit_ckpt_mismatch_check(parsed),
        handling.requires_global_app_metadata(parsed),
        handling.requires_returning_mismatch_keys(parsed),
    )


class _Config(msgspec.Struct):
    """What counts in ``metadata.json``. Other fields come and go: 0.19 has lost ``common_backend``."""

    sharded_backend: str


def backend_of(checkpoint_dir: str) -> str:
    """Read the backend of a checkpoint, such as ``"torch_dist"``, from its ``metadata.json``. Asks no other rank.

    Raises:
        CheckpointingException: there is no such directory, or no ``metadata.json`` in it.
        CorruptCheckpoint, StorageError: ``metadata.json`` is damaged, of another save, or cannot be read.
    """
    if not os.path.isdir(checkpoint_dir):
        raise CheckpointingException(f"Checkpoint directory {checkpoint_dir} does not exist")
    path, what = os.path.join(checkpoint_dir, core.CONFIG_FNAME), "a JSON object with the field sharded_backend"
    decode = partial(from_json, kind=_Config)
    disk, trusted = Disk(), current_options().trusted
    read = partial(
        MetadataSource(disk, checkpoint_dir).read_beside, core.CONFIG_FNAME, _MAX_CONFIG_NBYTES, trusted=trusted
    )
    config = read_small_file(disk, path, decode, what=what, at_most=_MAX_CONFIG_NBYTES, read=read)
    if config is None:
        raise CheckpointingException(f"{checkpoint_dir} is not a distributed checkpoint")
    return config.sharded_backend[:100]


def checkpoint_config(strategy: Any) -> bytes:
    """The bytes of ``metadata.json`` for a checkpoint that ``strategy`` saves."""
    config = core.CheckpointingConfig(
        getattr(strategy, "backend", "torch_dist"), int(getattr(strategy, "version", 1) or 1)
    )
    return json.dumps(asdict(config)).encode()


def common_state_is_a_sharded_object() -> bool:
    """Whether this Megatron saves the common state as a ShardedObject (0.19), not as ``common.pt``."""
    return hasattr(serialization, "_legacy_common_state_exists")


def load_is_collective() -> bool:
    """Whether all ranks must call ``TorchDistLoadShardedStrategy.load`` together. From 0.18 on each may load alone."""
    try:
        return "no_dist=True" not in inspect.getsource(TorchDistLoadShardedStrategy)
    except OSError:  # installed without sources
        return not common_state_is_a_sharded_object()


def check_keys(
    sharded_state_dict: dict[str, Any], strict: Any, asked: Iterable[str] | None, saved: Iterable[str]
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Apply Megatron's strictness: log, raise or ignore keys that only the checkpoint or only the state dict has.

    Args:
        sharded_state_dict: the state dict of this rank.
        strict: a ``StrictHandling``.
        asked: the keys of all ranks; ``None`` if this mode does not need them.
        saved: the keys of the checkpoint.

    Returns:
        The state dict without unexpected keys, the missing keys, and the unexpected keys.

    Raises:
        CheckpointingException: there are such keys, and ``strict`` says to raise.
    """
    checked: tuple[dict[str, Any], set[str], set[str]] = validation.validate_integrity_and_strict_load(
        sharded_state_dict,
        strict,
        False,
        list(nested_values(sharded_state_dict)),
        None if asked is None else [[SimpleNamespace(key=key) for key in asked]],  # as if one rank held them all
        {key: SimpleNamespace(key=key) for key in saved if key != COMMON_STATE_KEY},
    )
    return checked


def reads_torch_dist(strategy: Any) -> bool:
    """Whether this is Megatron's own strategy that reads ``torch_dist``, or ours, which derives from it."""
    if strategy is None or isinstance(strategy, tuple):
        return True
    kind = type(strategy)
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return issubclass(kind, TorchDistLoadShardedStrategy) and (
        is_ours or kind.load is TorchDistLoadShardedStrategy.load
    )


def writes_torch_dist(strategy: Any) -> bool:
    """Whether this strategy writes ``torch_dist`` as Megatron's own does. A derived class may write otherwise."""
    kind, stock = type(strategy), TorchDistSaveShardedStrategy
    return issubclass(kind, stock) and kind.async_save is stock.async_save and kind.save is stock.save


def has_quantized_data(shard: ShardedTensor) -> bool:
    """Whether a shard holds a tensor of a special class, such as Transformer Engine's classes for FP8."""
    return shard.data is not None and type(shard.data) not in (torch.Tensor, torch.nn.Parameter)


def dequantized(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with FP8 tensors in their nominal dtype. ``FullyParallelLoadStrategyWrapper`` returns them so."""

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
