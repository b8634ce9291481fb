"""Errors in the form that Megatron's callers expect, and saves that are allowed to fail.

Code that catches ``megatron.core``'s ``CheckpointingException`` also catches our errors where stock would raise that
class. This module also owns what ``--ckpt-save-failure warn`` does. Called by ``saving`` and its patches, and by
``loading``. It exchanges nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from robust_dcp.comm import Stopped
from robust_dcp.errors import ExchangeError, PlanConflict, RobustCheckpointError
from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.megatron.versions import CheckpointingException

__all__ = [
    "InvalidAccess",
    "RefusedByMegatron",
    "as_megatron_raises",
    "failure_sent_to_all",
    "finalize_with_policy",
    "save_with_policy",
]

logger = logging.getLogger(__name__)


class InvalidAccess(PlanConflict, CheckpointingException):
    """The sharded state dicts of the ranks do not access each shard exactly once. ``key`` and ``ranks`` say where.

    Every rank raises it. Stock Megatron-Core raises ``CheckpointingException`` for this on rank 0 only.
    """


class RefusedByMegatron(RobustCheckpointError, CheckpointingException):
    """Megatron-Core raised ``CheckpointingException`` on some rank. Every rank raises this exception for it."""


@contextmanager
def as_megatron_raises() -> Iterator[None]:
    """Within this block, an error that began as Megatron's ``CheckpointingException`` on any rank is raised as one."""
    try:
        yield
    except CheckpointingException:
        raise
    except RobustCheckpointError as error:
        name = CheckpointingException.__name__
        if type(error) is RobustCheckpointError and any(each.type_name == name for each in error.rank_failures):
            refused = RefusedByMegatron(error.message, failures=error.rank_failures)
            raise refused from error.__cause__ or error.__context__
        raise


@contextmanager
def failure_sent_to_all(rank: int) -> Iterator[None]:
    """Wrap exchanges of a smaller group that run inside an exchange of a larger group.

    All ranks of the smaller group raise the same error, and its failures name ranks of that smaller group. In the
    larger group only the ranks that failed themselves should report it. They raise their original error. The other
    ranks raise ``Stopped``.

    Args:
        rank: the rank of this process in the smaller group.
    """
    try:
        yield
    except ExchangeError:
        raise
    except RobustCheckpointError as error:
        if not error.rank_failures:
            raise
        if rank not in {failure.rank for failure in error.rank_failures}:
            raise Stopped(error.message) from error
        first = _first_cause(error)
        if first is error:
            raise
        raise first from None


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, RobustCheckpointError) and error.rank_failures:
        cause = error.__cause__ or error.__context__  # an entry point moves it to __context__
        if cause is None:
            break
        error = cause
    return error


def save_with_policy(save_checkpoint: Callable[[], Any], module: str) -> Any:
    """Call Megatron-LM's ``save_checkpoint``; with ``--ckpt-save-failure warn`` log a failed save and return ``None``.

    Only errors of exchanges are logged in this way: all ranks raise them at the same point, so all can go on with
    training. What follows a successful save (the tracker file ``latest_checkpointed_iteration.txt``, the callbacks)
    does not happen. The next load takes the previous checkpoint.

    Args:
        save_checkpoint: makes the call.
        module: the name of the module that defines ``save_checkpoint``.
    """
    try:
        return save_checkpoint()
    except RobustCheckpointError as error:
        if current_options().save_failure != "warn":
            raise
        _report(error)
        _end_checkpointing_section(sys.modules.get(module))
        return None


def finalize_with_policy(finalize: Callable[[], Any]) -> Any:
    """Call Megatron-LM's ``maybe_finalize_async_save``; with ``--ckpt-save-failure warn`` log saves that have failed.

    The queue drops a save before it finalizes it. So after a failed save the steps for a success (the tracker file, the
    callbacks) never happen, and the queue goes on with the next save. All ranks do the same, as all raise the same.

    Args:
        finalize: makes the call. It is called again after each failed save.
    """
    try:
        return finalize()
    except RobustCheckpointError as error:
        if current_options().save_failure != "warn":
            raise
        _report(error)
    return finalize_with_policy(finalize)


def _report(error: RobustCheckpointError) -> None:
    """Log the error on rank 0, and on every rank that failed itself."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0 or rank in {failure.rank for failure in error.rank_failures}:
        logger.error(
            "this checkpoint was not saved, and training goes on (--ckpt-save-failure warn); the previous checkpoint "
            "is as it was: %s: %s",
            type(error).__name__,
            error,
        )


def _end_checkpointing_section(module: Any) -> None:
    """Tell Megatron's fault tolerance that the save is over, as ``save_checkpoint`` does at its end."""
    integration = getattr(module, "ft_integration", None)
    ended = getattr(integration, "on_checkpointing_end", None)
    if callable(ended):
        ended(is_async_finalization=False)
