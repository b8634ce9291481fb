"""One call of Megatron-LM's ``save_checkpoint``: a rank that fails before it saves tells the others.

``save_checkpoint`` first makes the state dict (model, optimizer, RNG and rerun states), which each rank does by itself.
A rank that raises there never reaches the first exchange of the save, where the others wait for it. So all ranks meet
right before that exchange, and a rank that has failed comes to the same meeting with its error. Called by the
replacement of ``save_checkpoint``, and by everything of ours that a save can begin with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from robust_dcp.comm import Channel
from robust_dcp.errors import RobustCheckpointError
from robust_dcp.megatron.hooks.options import current_options

__all__ = ["call_save_checkpoint", "is_shared", "meet_before_saving"]

logger = logging.getLogger(__name__)

_PHASE = "save_checkpoint: state dicts are made"


class _Current(threading.local):
    """The call that is running in this thread.

    Attributes:
        is_running: whether there is one.
        is_saving: whether it has met the others for the last time; what fails from then on is told by the save itself.
    """

    is_running = False
    is_saving = False


_current = _Current()


def call_save_checkpoint(save_checkpoint: Callable[[], Any]) -> Any:
    """Call ``save_checkpoint`` of Megatron-LM where it saves through robust_dcp, on every rank.

    Raises:
        RobustCheckpointError: on all ranks, if any of them raised before it came to save.
    """
    if _current.is_running:
        return save_checkpoint()
    _current.is_running, _current.is_saving = True, False
    try:
        return save_checkpoint()
    except RobustCheckpointError:
        raise  # by an exchange, so that all ranks have it
    except (Exception, CheckpointException) as error:
        if _current.is_saving:
            raise
        logger.error(
            "save_checkpoint fails on this rank before it saves, and the other ranks are told: %s: %s",
            type(error).__name__,
            error,
        )
        _meet(error)
        raise
    finally:
        _current.is_running = False


def is_shared() -> bool:
    """Whether what this rank raises now will be told to the others by :func:`call_save_checkpoint`."""
    return _current.is_running and not _current.is_saving


def meet_before_saving(*, is_last: bool = True) -> None:
    """Within ``save_checkpoint``: wait until all ranks have made their state dicts, or one of them has failed.

    Elsewhere, and once the save itself has begun, nothing happens.

    Args:
        is_last: whether the save begins now. If not, it is met once more.

    Raises:
        RobustCheckpointError: a rank has failed, or does not come; the same on all ranks.
    """
    if not is_shared():
        return
    _meet(None)
    _current.is_saving = is_last


def _meet(error: BaseException | None) -> None:
    def tell() -> None:
        if error is not None:
            raise error

    channel = Channel.for_group(None, operation="save_checkpoint", timeout_seconds=current_options().exchange_timeout_seconds)
    channel.barrier(_PHASE, tell)
