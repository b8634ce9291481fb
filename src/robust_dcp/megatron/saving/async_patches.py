"""The replacements in Megatron's queue of asynchronous saves, and in the code of Megatron-LM that finalizes them.

``async_requests`` and ``failures`` do the work. They are imported when a replacement is called. The table of this
module is a part of the table of ``save_patches``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from robust_dcp.megatron.choice import is_chosen
from robust_dcp.switch.patching import Patch

__all__ = ["FORMATS", "PATCHES"]

Replaced = Callable[..., Any]

FORMATS = ("torch_dist", "torch_dcp", "fsdp_dtensor")
"""The values of ``--ckpt-format`` that robust_dcp takes over."""


def _schedule_async_request(original: Replaced) -> Replaced:
    """``AsyncCallsQueue.schedule_async_request``. It starts no process for our requests; others go to stock."""

    @functools.wraps(original)
    def schedule_async_request(self: Any, async_request: Any) -> Any:
        from robust_dcp.megatron.async_requests import schedule

        return schedule(original, self, async_request)

    return schedule_async_request


def _maybe_finalize_async_save(original: Replaced) -> Replaced:
    """Megatron-LM's ``maybe_finalize_async_save``, for ``--ckpt-save-failure warn``."""

    @functools.wraps(original)
    def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
        if not is_chosen():
            return original(*args, **kwargs)
        from robust_dcp.megatron.failures import finalize_with_policy

        return finalize_with_policy(lambda: original(*args, **kwargs))

    return maybe_finalize_async_save


def _init_persistent_async_worker(original: Replaced) -> Replaced:
    """Megatron-LM's ``init_persistent_async_worker``, which runs once at the start of a job (0.19).

    Without stock's asynchronous saves the worker would have nothing to do, but hold memory, also on the device. If a
    request needs the worker after all, stock starts it later.
    """

    @functools.wraps(original)
    def init_persistent_async_worker(*args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.hooks.options import megatron_arguments

        if not is_chosen() or _is_worker_of_use(megatron_arguments()):
            return original(*args, **kwargs)
        return None

    return init_persistent_async_worker


def _initialize_async_checkpoint_worker(original: Replaced) -> Replaced:
    """``GlobalState.initialize_async_checkpoint_worker`` of Megatron-Bridge, which makes the queue of a job and starts
    its worker. As in Megatron-LM the worker waits until a request needs it."""

    @functools.wraps(original)
    def initialize_async_checkpoint_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = getattr(self.cfg, "checkpoint", None)
        if not getattr(config, "use_persistent_ckpt_worker", False) or not is_chosen() or _is_worker_of_use(config):
            return original(self, *args, **kwargs)
        config.use_persistent_ckpt_worker = False
        try:
            result = original(self, *args, **kwargs)
        finally:
            config.use_persistent_ckpt_worker = True
        if self.async_calls_queue is not None:
            self.async_calls_queue.persistent = True
        return result

    return initialize_async_checkpoint_worker


def _is_worker_of_use(arguments: Any) -> bool:
    """Whether stock runs some asynchronous requests of this job.

    Args:
        arguments: Megatron-LM's, or the checkpoint configuration of Megatron-Bridge, whose fields have the same names.
    """
    return (
        getattr(arguments, "ckpt_format", None) not in FORMATS
        or getattr(arguments, "non_persistent_ckpt_type", None) == "local"
        or getattr(arguments, "logits_save_dir", None) is not None
    )


_SCHEDULE = "AsyncCallsQueue.schedule_async_request"
_FINALIZE = "maybe_finalize_async_save"
_WORKER = "init_persistent_async_worker"
_BRIDGE_WORKER = "GlobalState.initialize_async_checkpoint_worker"

PATCHES: tuple[Patch, ...] = (
    Patch("megatron.core.dist_checkpointing.strategies.async_utils", _SCHEDULE, _schedule_async_request),
    Patch("nvidia_resiliency_ext.checkpointing.async_ckpt.core", _SCHEDULE, _schedule_async_request),
    Patch("megatron.training.async_utils", _FINALIZE, _maybe_finalize_async_save, optional=True),
    Patch("megatron.training.training", _FINALIZE, _maybe_finalize_async_save, optional=True),
    Patch("megatron.training.async_utils", _WORKER, _init_persistent_async_worker, optional=True),
    Patch("megatron.training.initialize", _WORKER, _init_persistent_async_worker, optional=True),
    Patch("megatron.bridge.training.state", _BRIDGE_WORKER, _initialize_async_checkpoint_worker, optional=True),
)
"""Some versions or wheels lack some of these modules. Such a module is never imported, so it is never patched."""
