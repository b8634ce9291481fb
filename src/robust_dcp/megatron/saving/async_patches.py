"""What is taken over of Megatron's queue of asynchronous saves, and of what Megatron-LM does when it finalizes them.

Owns the replacements; the work is in ``async_requests`` and ``failures``, which are imported when one is called. The
table is a part of that of ``save_patches``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from robust_dcp.megatron.choice import is_chosen
from robust_dcp.megatron.hooks.patching import Patch

__all__ = ["PATCHES"]

Replaced = Callable[..., Any]


def _schedule_async_request(original: Replaced) -> Replaced:
    """``AsyncCallsQueue.schedule_async_request``: no process is started for a request of ours. Others are stock's."""

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
        from robust_dcp.megatron.failures import finalize_or_warn

        return finalize_or_warn(lambda: original(*args, **kwargs))

    return maybe_finalize_async_save


_SCHEDULE = "AsyncCallsQueue.schedule_async_request"
_FINALIZE = "maybe_finalize_async_save"

PATCHES: tuple[Patch, ...] = (
    Patch("megatron.core.dist_checkpointing.strategies.async_utils", _SCHEDULE, _schedule_async_request),
    Patch("nvidia_resiliency_ext.checkpointing.async_ckpt.core", _SCHEDULE, _schedule_async_request),
    Patch("megatron.training.async_utils", _FINALIZE, _maybe_finalize_async_save, optional=True),
    Patch("megatron.training.training", _FINALIZE, _maybe_finalize_async_save, optional=True),
)
"""Modules of which some versions or wheels have none are never imported, and so never patched."""
