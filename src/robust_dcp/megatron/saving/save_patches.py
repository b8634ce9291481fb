"""The replacements of Megatron-Core's and Megatron-LM's functions that save ``torch_dist`` checkpoints.

Each replacement calls Megatron's own function if robust_dcp is not the chosen planner. ``saving``, ``save_strategy``
and ``validation`` do the work. They import Megatron, so they are imported only when a replacement is called.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from robust_dcp.megatron.choice import is_chosen
from robust_dcp.megatron.saving import async_patches
from robust_dcp.switch.patching import Patch
from robust_dcp.switch.stock_paths import log_left_to_stock

if TYPE_CHECKING:
    from robust_dcp.megatron.saving.save_strategy import ShardedSave

__all__ = ["PATCHES"]

Replaced = Callable[..., Any]


def _save(original: Replaced) -> Replaced:
    """``dist_checkpointing.save``, with every step inside an exchange. Megatron saves checkpoints of other backends."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.hooks.options import current_options
        from robust_dcp.megatron.saving.saving import SaveCall, is_ours, name_of_strategy, save_torch_dist

        call = SaveCall.of(original, args, kwargs)
        if not is_ours(call, chosen=is_chosen()):
            if is_chosen():
                why = "only torch_dist, saved in Megatron's own way, is taken over"
                log_left_to_stock(f"saves by {name_of_strategy(call.sharded_strategy)}", why)
            return original(*args, **kwargs)
        return save_torch_dist(call, current_options())

    return save


def _strategy_save(original: Replaced) -> Replaced:
    """``TorchDistSaveShardedStrategy.save``, for callers that still hold Megatron's own ``dist_checkpointing.save`` or
    call the strategy themselves. Stock's method would start an asynchronous save and wait for it."""

    @functools.wraps(original)
    def save(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> Any:
        if not is_chosen() or not _is_written_by_ours(self):
            return original(self, sharded_state_dict, checkpoint_dir)
        self.last_report = _shards(sharded_state_dict, checkpoint_dir).write()
        return None

    return save


def _strategy_async_save(original: Replaced) -> Replaced:
    """``TorchDistSaveShardedStrategy.async_save``, for the same callers."""

    @functools.wraps(original)
    def async_save(
        self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_chosen():
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        from robust_dcp.megatron.saving.save_strategy import request_for_shards

        return request_for_shards(_shards(sharded_state_dict, checkpoint_dir), self, _queue_of(args, kwargs))

    return async_save


def _parallel_save(original: Replaced) -> Replaced:
    """``FullyParallelSaveStrategyWrapper.save`` around a strategy that writes ``torch_dist``.

    The global plan spreads the writes over the ranks of the wrapper's group, anew for the shards of this save. The
    shards' replica ids are not changed.
    """

    @functools.wraps(original)
    def save(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> Any:
        strategy = self.base_strategy
        if not is_chosen() or not _is_written_by_ours(strategy):
            return original(self, sharded_state_dict, checkpoint_dir)
        strategy.last_report = _shards(sharded_state_dict, checkpoint_dir, self.parallelization_group).write()
        return None

    return save


def _parallel_async_save(original: Replaced) -> Replaced:
    """``FullyParallelSaveStrategyWrapper.async_save``, like :func:`_parallel_save`."""

    @functools.wraps(original)
    def async_save(
        self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **kwargs: Any
    ) -> Any:
        strategy = self.base_strategy
        if not is_chosen() or not _is_written_by_ours(strategy):
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        from robust_dcp.megatron.saving.save_strategy import request_for_shards

        shards = _shards(sharded_state_dict, checkpoint_dir, self.parallelization_group)
        return request_for_shards(shards, strategy, _queue_of(args, kwargs))

    return async_save


def _shards(sharded_state_dict: dict[str, Any], checkpoint_dir: Any, parallelization_group: Any = None) -> ShardedSave:
    from robust_dcp.megatron.hooks.options import current_options
    from robust_dcp.megatron.saving.save_strategy import ShardedSave

    return ShardedSave(
        sharded_state_dict, checkpoint_dir, current_options(), parallelization_group=parallelization_group
    )


def _queue_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The argument ``async_strategy`` of a strategy's call (from 0.17 on)."""
    return args[0] if args else kwargs.get("async_strategy")


def _is_written_by_ours(strategy: Any) -> bool:
    """Whether a strategy writes ``torch_dist`` in Megatron's own way. If not, log that it saves in its own way."""
    from robust_dcp.megatron.versions import writes_torch_dist

    if writes_torch_dist(strategy):
        return True
    log_left_to_stock(f"saves by {type(strategy).__name__}", "a strategy that saves in its own way is left to do so")
    return False


def _determine_global_metadata(original: Replaced) -> Replaced:
    """``determine_global_metadata``. Ranks send columns to the coordinator. It returns its verdict and all keys."""

    @functools.wraps(original)
    def determine_global_metadata(
        sharded_state_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], Sequence[Any]]:
        if not is_chosen():
            found: tuple[list[Any], Sequence[Any]] = original(sharded_state_dict, *args, **kwargs)
            return found
        from robust_dcp.megatron.checks.validation import exchange_metadata

        group = args[0] if args else kwargs.get("process_group")
        return exchange_metadata(sharded_state_dict, group)

    return determine_global_metadata


def _validate_sharding_integrity(original: Replaced) -> Replaced:
    """``validate_sharding_integrity``. All ranks raise the verdict that ``determine_global_metadata`` returned."""

    @functools.wraps(original)
    def validate_sharding_integrity(global_metadata: Any, common_state_dict: Any = None) -> None:
        from robust_dcp.megatron.checks.validation import GlobalMetadata, compare_common_state

        if not isinstance(global_metadata, GlobalMetadata):
            original(global_metadata, *([] if common_state_dict is None else [common_state_dict]))
            return
        if common_state_dict is not None:
            compare_common_state(common_state_dict)
        global_metadata.raise_if_wrong()

    return validate_sharding_integrity


def _save_checkpoint(original: Replaced) -> Replaced:
    """Megatron-LM's ``save_checkpoint``. If a rank fails before the save, all ranks hear of it.

    This is also where ``--ckpt-save-failure warn`` acts. Megatron makes directories before it saves, so a ``--save``
    that cannot be a directory is refused here.
    """

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if not is_chosen() or not _will_be_ours(original, args, kwargs):
            return original(*args, **kwargs)
        from robust_dcp.megatron.checkpoint_call import call_save_checkpoint
        from robust_dcp.megatron.failures import save_with_policy
        from robust_dcp.megatron.hooks.options import save_argument
        from robust_dcp.storage.files.paths import directory_path

        if isinstance(save := save_argument(), (str, os.PathLike)):
            directory_path(save)
        return save_with_policy(lambda: call_save_checkpoint(lambda: original(*args, **kwargs)), original.__module__)

    return save_checkpoint


def _will_be_ours(original: Replaced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of ``save_checkpoint`` ends in a save of ours, by Megatron's arguments. If not, log why."""
    from robust_dcp.megatron.hooks.options import megatron_arguments

    arguments = megatron_arguments()
    if arguments is None:
        return True
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given.get("non_persistent_ckpt") and getattr(arguments, "non_persistent_ckpt_type", None) == "local":
        log_left_to_stock(_LOCAL, _WHY_LOCAL)
        return False
    ckpt_format = getattr(arguments, "ckpt_format", "torch_dist")
    if not getattr(arguments, "use_dist_ckpt", True) or ckpt_format not in async_patches.FORMATS:
        log_left_to_stock(f"saves with --ckpt-format {ckpt_format}", f"ours are {', '.join(async_patches.FORMATS)}")
        return False
    return True


_LOCAL = "local non-persistent checkpoints (--non-persistent-ckpt-type local)"
_WHY_LOCAL = "nvidia_resiliency_ext keeps them on each node, in a format of its own"


def _local_checkpoint(original: Replaced) -> Replaced:
    """``MCoreTensorAwareStateDict.from_state_dict``. All frameworks make local checkpoints by it. It logs, then calls
    stock's function."""

    @functools.wraps(original)
    def from_state_dict(*args: Any, **kwargs: Any) -> Any:
        if is_chosen():
            log_left_to_stock(_LOCAL, _WHY_LOCAL)
        return original(*args, **kwargs)

    return from_state_dict


_DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"
_FULLY_PARALLEL = f"{_DIST_CHECKPOINTING}.strategies.fully_parallel"

# This patches the package, not its modules. The modules import each other's functions by name. If each were patched as
# it is imported, a later one would bind a replacement, and `uninstall` could not undo that.
PATCHES: tuple[Patch, ...] = (
    Patch(_DIST_CHECKPOINTING, "save", _save),
    Patch(_DIST_CHECKPOINTING, "serialization.save", _save),
    Patch(_DIST_CHECKPOINTING, "validation.determine_global_metadata", _determine_global_metadata),
    Patch(_DIST_CHECKPOINTING, "state_dict_utils.determine_global_metadata", _determine_global_metadata),
    Patch(_DIST_CHECKPOINTING, "serialization.determine_global_metadata", _determine_global_metadata),
    Patch(_DIST_CHECKPOINTING, "validation.validate_sharding_integrity", _validate_sharding_integrity),
    Patch(_DIST_CHECKPOINTING, "state_dict_utils.validate_sharding_integrity", _validate_sharding_integrity),
    Patch(f"{_DIST_CHECKPOINTING}.strategies.torch", "TorchDistSaveShardedStrategy.save", _strategy_save),
    Patch(f"{_DIST_CHECKPOINTING}.strategies.torch", "TorchDistSaveShardedStrategy.async_save", _strategy_async_save),
    Patch(f"{_DIST_CHECKPOINTING}.strategies.torch", "is_torch_min_version", functools.cache, optional=True),
    Patch(
        f"{_DIST_CHECKPOINTING}.tensor_aware_state_dict",
        "MCoreTensorAwareStateDict.from_state_dict",
        _local_checkpoint,
        optional=True,
    ),
    Patch(_FULLY_PARALLEL, "FullyParallelSaveStrategyWrapper.save", _parallel_save),
    Patch(_FULLY_PARALLEL, "FullyParallelSaveStrategyWrapper.async_save", _parallel_async_save),
    Patch("megatron.training.checkpointing", "save_checkpoint", _save_checkpoint, optional=True),
    Patch("megatron.training.training", "save_checkpoint", _save_checkpoint, optional=True),
    *async_patches.PATCHES,
)
"""Some versions or wheels lack some of these modules. Such a module is never imported, so it is never patched."""
