"""Failures as Megatron's callers know them: its own exception class beside ours, and saves that may fail.

Owns how an error of an exchange is shown to code that catches ``megatron.core``'s ``CheckpointingException``, and what
``--ckpt-save-failure warn`` does. Called by ``saving`` with its patches, and by ``loading``; exchanges
nothing.
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
    "finalize_or_warn",
    "or_warn",
    "told_by_who_failed",
]

logger = logging.getLogger(__name__)


class InvalidAccess(PlanConflict, CheckpointingException):
    """The sharded state dicts of all ranks do not access each shard exactly once; ``key`` and ``ranks`` say where.

    Raised on every rank. Stock Megatron-Core raises ``CheckpointingException`` for this, on rank 0 alone.
    """


class RefusedByMegatron(RobustCheckpointError, CheckpointingException):
    """Code of Megatron-Core raised ``CheckpointingException`` on some rank: the same exception on every rank."""


@contextmanager
def as_megatron_raises() -> Iterator[None]:
    """Within this block, an error that began as Megatron's ``CheckpointingException`` on any rank stays one."""
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
def told_by_who_failed(rank: int) -> Iterator[None]:
    """Around exchanges of a smaller group, within the work of an exchange of a larger one.

    All ranks of the smaller group raise the same error, whose failures name ranks of that group. To the larger one only
    those that failed by themselves tell it, as what it was at first; the others stop.

    Args:
        rank: of this process in the smaller group.
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
        cause = error.__cause__ or error.__context__  # the latter behind an entry point
        if cause is None:
            break
        error = cause
    return error


def or_warn(save_checkpoint: Callable[[], Any], module: str) -> Any:
    """Call Megatron-LM's ``save_checkpoint``; with ``--ckpt-save-failure warn`` log a failed save and return ``None``.

    Only errors of exchanges are survived: those are raised on all ranks, in step, so that all go on with training. What
    follows the save (the tracker file ``latest_checkpointed_iteration.txt``, the callbacks for a success) does not
    happen, and the previous checkpoint is the one to load.

    Args:
        save_checkpoint: the call.
        module: the name of the module that defines it.
    """
    try:
        return save_checkpoint()
    except RobustCheckpointError as error:
        if current_options().save_failure != "warn":
            raise
        _report(error)
        _end_checkpointing_section(sys.modules.get(module))
        return None


def finalize_or_warn(finalize: Callable[[], Any]) -> Any:
    """Call Megatron-LM's ``maybe_finalize_async_save``; with ``--ckpt-save-failure warn`` log saves that have failed.

    The queue drops a save before it finalizes it. What a failed one has left undone (the tracker file, the callbacks
    for a success) is not done any more, and the queue goes on with the next save. So do all ranks: they raise the same.

    Args:
        finalize: the call. It is made again after each save that has failed.
    """
    try:
        return finalize()
    except RobustCheckpointError as error:
        if current_options().save_failure != "warn":
            raise
        _report(error)
    return finalize_or_warn(finalize)


def _report(error: RobustCheckpointError) -> None:
    """On rank 0, and on every rank that failed by itself."""
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
