"""The replacements of Megatron-Core's functions that load ``torch_dist`` checkpoints.

Each replacement calls Megatron's own function if robust_dcp is not the chosen planner. ``loading`` and
``load_strategy`` do the work. They import Megatron, so they are imported only when a replacement is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from robust_dcp.megatron.choice import is_chosen
from robust_dcp.switch.patching import Patch
from robust_dcp.switch.stock_paths import log_left_to_stock

__all__ = ["PATCHES"]

Replaced = Callable[..., Any]


def _load(original: Replaced) -> Replaced:
    """``dist_checkpointing.load``, with every step inside an exchange. Megatron loads checkpoints of other backends."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.hooks.options import current_options

        if not is_chosen():
            return original(*args, **kwargs)
        from robust_dcp.megatron.loading.loading import LoadCall, load_torch_dist

        call = LoadCall.of(original, args, kwargs)
        return load_torch_dist(call, current_options(), lambda: original(*args, **kwargs))

    return load


def _load_common_state_dict(original: Replaced) -> Replaced:
    """``load_common_state_dict``, which ``load_content_metadata`` calls too. Nothing in the file is executed."""

    @functools.wraps(original)
    def load_common_state_dict(checkpoint_dir: Any) -> Any:
        if not is_chosen():
            return original(checkpoint_dir)
        from robust_dcp.megatron.loading.loading import load_common_state

        return load_common_state(checkpoint_dir)

    return load_common_state_dict


def _strategy_load(original: Replaced) -> Replaced:
    """``TorchDistLoadShardedStrategy.load``, for callers that still hold Megatron's own ``dist_checkpointing.load`` or
    call the strategy themselves."""

    @functools.wraps(original)
    def load(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chosen():
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        from robust_dcp.megatron.loading.load_strategy import read_for_strategy

        return read_for_strategy(self, sharded_state_dict, checkpoint_dir)

    return load


def _load_tensors_metadata(original: Replaced) -> Replaced:
    """``TorchDistLoadShardedStrategy.load_tensors_metadata``."""

    @functools.wraps(original)
    def load_tensors_metadata(self: Any, checkpoint_dir: Any, metadata: Any = None) -> Any:
        if metadata is None and is_chosen():
            from robust_dcp.megatron.loading.load_strategy import checkpoint_reader

            metadata = checkpoint_reader(checkpoint_dir).read_metadata()
        return original(self, checkpoint_dir, metadata)

    return load_tensors_metadata


def _of_our_strategy(original: Replaced) -> Replaced:
    """A method of ``TorchDistLoadShardedStrategy``, replaced by the same method of :class:`RobustLoadStrategy`."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_chosen():
            return original(self, *args, **kwargs)
        from robust_dcp.megatron.loading.load_strategy import RobustLoadStrategy

        return getattr(RobustLoadStrategy, original.__name__)(self, *args, **kwargs)

    return method


def _parallel_load(original: Replaced) -> Replaced:
    """``FullyParallelLoadStrategyWrapper.load``, around a strategy that reads ``torch_dist``."""

    @functools.wraps(original)
    def load(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.hooks.options import current_options

        if is_chosen():
            from robust_dcp.megatron.loading.load_strategy import load_in_parallel
            from robust_dcp.megatron.versions import is_parallel_load_wrapper

            if is_parallel_load_wrapper(self):
                timeout_seconds = current_options().exchange_timeout_seconds
                return load_in_parallel(self, sharded_state_dict, checkpoint_dir, timeout_seconds)
            log_left_to_stock(
                f"loads by {type(self.base_strategy).__name__}", "a strategy that loads in its own way is left to do so"
            )
        return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load


_DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"
_TORCH = f"{_DIST_CHECKPOINTING}.strategies.torch"

PATCHES: tuple[Patch, ...] = (
    Patch(_DIST_CHECKPOINTING, "load", _load),
    Patch(_DIST_CHECKPOINTING, "serialization.load", _load),
    Patch(_DIST_CHECKPOINTING, "load_common_state_dict", _load_common_state_dict),
    Patch(_DIST_CHECKPOINTING, "serialization.load_common_state_dict", _load_common_state_dict),
    Patch(_TORCH, "TorchDistLoadShardedStrategy.load", _strategy_load),
    Patch(_TORCH, "TorchDistLoadShardedStrategy.load_tensors_metadata", _load_tensors_metadata),
    Patch(_TORCH, "TorchDistLoadShardedStrategy.load_sharded_metadata", _of_our_strategy),
    Patch(_TORCH, "TorchDistLoadShardedStrategy.remove_sharded_tensors", _of_our_strategy),
    Patch(f"{_DIST_CHECKPOINTING}.strategies.fully_parallel", "FullyParallelLoadStrategyWrapper.load", _parallel_load),
)
