"""What is taken over of Megatron-Core's and Megatron-LM's saves of ``torch_dist``.

Owns the replacements; each does what Megatron does where robust_dcp is not the chosen planner. The work is in
``saving``, ``save_strategy`` and ``validation``, which import Megatron: so they are imported when one is called.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from robust_dcp.megatron.choice import is_chosen
from robust_dcp.megatron.hooks.patching import Patch

__all__ = ["PATCHES"]

Replaced = Callable[..., Any]


def _save(original: Replaced) -> Replaced:
    """``dist_checkpointing.save``: every step inside an exchange. Other backends are left to Megatron."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.hooks.options import current_options
        from robust_dcp.megatron.saving.saving import SaveCall, is_ours, save_torch_dist

        call = SaveCall.of(original, args, kwargs)
        if not is_ours(call, chosen=is_chosen()):
            return original(*args, **kwargs)
        return save_torch_dist(call, current_options())

    return save


def _async_save(original: Replaced) -> Replaced:
    """``TorchDistSaveShardedStrategy.async_save``, and ``save``, which calls it: for callers that hold on to Megatron's
    own ``dist_checkpointing.save``, or call the strategy themselves."""

    @functools.wraps(original)
    def async_save(
        self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_chosen():
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        from robust_dcp.megatron.hooks.options import current_options
        from robust_dcp.megatron.saving.save_strategy import write_sharded
        from robust_dcp.megatron.versions import finished_request

        request = finished_request(args[0] if args else kwargs.get("async_strategy"))
        self.last_report = write_sharded(sharded_state_dict, checkpoint_dir, current_options())
        return request

    return async_save


def _apply_saving_parallelization(original: Replaced) -> Replaced:
    """``FullyParallelSaveStrategyWrapper.apply_saving_parallelization``: the global plan spreads the work over all
    ranks that hold a shard, for what is there now. Replica ids stay as they are."""

    @functools.wraps(original)
    def apply_saving_parallelization(self: Any, sharded_state_dict: dict[str, Any]) -> None:
        if not is_chosen():
            original(self, sharded_state_dict)

    return apply_saving_parallelization


def _determine_global_metadata(original: Replaced) -> Replaced:
    """``determine_global_metadata``: columns to the coordinator; back come its verdict and the keys of all ranks."""

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
    """``validate_sharding_integrity``, of what the function above returned: the verdict, raised on all ranks."""

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
    """Megatron-LM's ``save_checkpoint``, for ``--ckpt-save-failure warn``. It makes directories before it saves, so a
    ``--save`` that is none is refused here."""

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if not is_chosen():
            return original(*args, **kwargs)
        from robust_dcp.megatron.failures import or_warn
        from robust_dcp.megatron.hooks.options import save_argument
        from robust_dcp.storage.files.paths import directory_path

        if isinstance(save := save_argument(), (str, os.PathLike)):
            directory_path(save)
        return or_warn(lambda: original(*args, **kwargs), original.__module__)

    return save_checkpoint


_DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"

# By way of the package, which is loaded after the modules in it: patched one by one while they are imported, some would
# already hold the replacements of others.
PATCHES: tuple[Patch, ...] = (
    Patch(_DIST_CHECKPOINTING, "save", _save),
    Patch(_DIST_CHECKPOINTING, "serialization.save", _save),
    Patch(_DIST_CHECKPOINTING, "validation.determine_global_metadata", _determine_global_metadata),
    Patch(_DIST_CHECKPOINTING, "state_dict_utils.determine_global_metadata", _determine_global_metadata),
    Patch(_DIST_CHECKPOINTING, "serialization.determine_global_metadata", _determine_global_metadata),
    Patch(_DIST_CHECKPOINTING, "validation.validate_sharding_integrity", _validate_sharding_integrity),
    Patch(_DIST_CHECKPOINTING, "state_dict_utils.validate_sharding_integrity", _validate_sharding_integrity),
    Patch(f"{_DIST_CHECKPOINTING}.strategies.torch", "TorchDistSaveShardedStrategy.async_save", _async_save),
    Patch(
        f"{_DIST_CHECKPOINTING}.strategies.fully_parallel",
        "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
        _apply_saving_parallelization,
    ),
    Patch("megatron.training.checkpointing", "save_checkpoint", _save_checkpoint, optional=True),
    Patch("megatron.training.training", "save_checkpoint", _save_checkpoint, optional=True),
)
"""Modules of which some versions or wheels have none are never imported, and so never patched."""
