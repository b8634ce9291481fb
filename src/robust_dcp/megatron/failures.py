"""How a failure reaches all ranks and Megatron: ``save_checkpoint``, and errors in the form that Megatron expects.

Megatron-LM's ``save_checkpoint`` first makes the state dict (model, optimizer, RNG and rerun states). Each rank does
that by itself. A rank that raises there never reaches the first exchange of the save, and the others would wait for it.
So all ranks meet in one more exchange right before that. A rank that has failed joins it too, and brings its error. It
does not wait there for long: others may wait for it in a collective of Megatron's own, until its process ends.

This module also owns what ``--ckpt-save-failure warn`` does. Code that catches ``megatron.core``'s
``CheckpointingException`` also catches our errors where stock would raise that class.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from robust_dcp.comm import Channel, Stopped
from robust_dcp.errors import ExchangeError, PlanConflict, RobustCheckpointError
from robust_dcp.megatron.options import FORMATS, current_options, megatron_arguments
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.switch.patching import log_left_to_stock

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
        first: BaseException = error
        while isinstance(first, RobustCheckpointError) and first.rank_failures:
            cause = first.__cause__ or first.__context__  # an entry point moves it to __context__
            if cause is None:
                break
            first = cause
        if first is error:
            raise
        raise first from None


class _Current(threading.local):
    """Whether this thread is in ``save_checkpoint``, and may still fail there without the other ranks hearing of it.

    The calls of :func:`meet_before_saving` end that: from the last one on, the save itself tells the others what fails.
    """

    is_unheard = False


_current = _Current()


def is_shared() -> bool:
    """Whether :func:`save_checkpoint` will tell the other ranks what this rank raises now."""
    return _current.is_unheard


def meet_before_saving(*, is_last: bool = True) -> None:
    """Within ``save_checkpoint``, wait until all ranks have made their state dicts or one of them has failed.

    This does nothing outside of ``save_checkpoint``, or after the save itself has begun.

    Args:
        is_last: whether the save begins now. If not, the ranks will meet once more before it.

    Raises:
        RobustCheckpointError: a rank has failed or does not come. All ranks raise the same error.
    """
    if _current.is_unheard:
        _meet()
        _current.is_unheard = not is_last


_FAILED_RANK_WAITS_SECONDS = 6.0
"""For so long a rank that has failed waits for the others. They come at once if only their state dicts are not made
yet. If they are in a collective of Megatron's, they come no more. To find that out takes some seconds more, and all of
it stays within 10."""


def _meet(error: BaseException | None = None) -> None:
    def tell() -> None:
        if error is not None:
            raise error

    timeout_seconds = current_options().exchange_timeout_seconds
    deadline_seconds = None if error is None else min(timeout_seconds, _FAILED_RANK_WAITS_SECONDS)
    channel = Channel.for_group(
        None,
        operation="save_checkpoint",
        timeout_seconds=timeout_seconds,
        deadline_seconds=deadline_seconds,
    )
    try:
        channel.barrier("save_checkpoint: state dicts are made", tell)
    except ExchangeError:
        if error is None:
            raise
        logger.error(
            "save_checkpoint: the other ranks were waited for for up to %g seconds and did not all come to hear of "
            "that: they may be in a collective of Megatron's own, or save nothing. This rank raises its error alone",
            deadline_seconds,
        )


def save_checkpoint(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron-LM's ``save_checkpoint``. If a rank fails before the save, all ranks hear of it.

    With ``--ckpt-save-failure warn`` a failed save is logged, and this returns ``None``. Only errors of exchanges are
    logged in this way: all ranks raise them at the same point, so all can go on with training. What follows a
    successful save (the tracker file ``latest_checkpointed_iteration.txt``, the callbacks) does not happen. The next
    load takes the previous checkpoint. Megatron makes directories before it saves, so a ``--save`` that cannot be a
    directory is refused here.

    Raises:
        RobustCheckpointError: a rank raised before its save began. All ranks raise it if they come to hear of it. If
            not all come within some seconds, that rank raises its own error.
    """
    if not _is_ours(stock, args, kwargs):
        return stock(*args, **kwargs)
    directory = getattr(megatron_arguments(), "save", None)
    if isinstance(directory, (str, os.PathLike)):
        directory_path(directory)
    _current.is_unheard = True
    try:
        return _told_if_it_fails(lambda: stock(*args, **kwargs))
    except RobustCheckpointError as error:
        if current_options().save_failure != "warn":
            raise
        _report(error)
        # Megatron's fault tolerance expects to hear that the save is over, as at the end of `save_checkpoint`.
        integration = getattr(sys.modules.get(stock.__module__), "ft_integration", None)
        ended = getattr(integration, "on_checkpointing_end", None)
        if callable(ended):
            ended(is_async_finalization=False)
        return None
    finally:
        _current.is_unheard = False


def _told_if_it_fails(save: Callable[[], Any]) -> Any:
    try:
        return save()
    except RobustCheckpointError:
        raise  # an exchange raised it, so all ranks have it already
    except (Exception, CheckpointException) as error:
        if _current.is_unheard:
            logger.error(
                "save_checkpoint fails on this rank before it saves, and the other ranks are told: %s: %s",
                type(error).__name__,
                error,
            )
            _meet(error)
        raise


def _is_ours(save: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of ``save_checkpoint`` ends in a save of ours, by Megatron's arguments. If not, log why."""
    arguments = megatron_arguments()
    if arguments is None:
        return True
    given = inspect.signature(save).bind(*args, **kwargs).arguments
    if given.get("non_persistent_ckpt") and getattr(arguments, "non_persistent_ckpt_type", None) == "local":
        log_left_to_stock(
            "local non-persistent checkpoints (--non-persistent-ckpt-type local)",
            "nvidia_resiliency_ext keeps them on each node, in a format of its own",
        )
        return False
    ckpt_format = getattr(arguments, "ckpt_format", "torch_dist")
    if not getattr(arguments, "use_dist_ckpt", True) or ckpt_format not in FORMATS:
        log_left_to_stock(f"saves with --ckpt-format {ckpt_format}", f"ours are {', '.join(FORMATS)}")
        return False
    return True


def maybe_finalize_async_save(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron-LM's ``maybe_finalize_async_save``; with ``--ckpt-save-failure warn`` log saves that have failed.

    The queue drops a save before it finalizes it. So after a failed save the steps for a success (the tracker file, the
    callbacks) never happen, and the queue goes on with the next save. All ranks do the same, as all raise the same.
    """
    while True:
        try:
            return stock(*args, **kwargs)
        except RobustCheckpointError as error:  # noqa: PERF203
            if current_options().save_failure != "warn":
                raise
            _report(error)


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
