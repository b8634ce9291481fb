"""Makes sure that a rank that fails early in Megatron-LM's ``save_checkpoint`` tells the other ranks.

``save_checkpoint`` first makes the state dict (model, optimizer, RNG and rerun states). Each rank does that by itself.
A rank that raises there never reaches the first exchange of the save, and the others would wait for it. So all ranks
meet in one more exchange right before that. A rank that has failed joins this exchange too, and brings its error.
Called by the replacement of ``save_checkpoint``, and by each of our functions that can be the first step of a save.
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
    """The call of ``save_checkpoint`` that is running in this thread.

    Attributes:
        is_running: whether there is such a call.
        is_saving: whether the call has met the other ranks for the last time. From then on the save itself tells the
            others what fails.
    """

    is_running = False
    is_saving = False


_current = _Current()


def call_save_checkpoint(save_checkpoint: Callable[[], Any]) -> Any:
    """Call Megatron-LM's ``save_checkpoint`` when it saves through robust_dcp. Every rank calls this.

    Raises:
        RobustCheckpointError: a rank raised before its save began. All ranks raise it.
    """
    if _current.is_running:
        return save_checkpoint()
    _current.is_running, _current.is_saving = True, False
    try:
        return save_checkpoint()
    except RobustCheckpointError:
        raise  # an exchange raised it, so all ranks have it already
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
    """Whether :func:`call_save_checkpoint` will tell the other ranks what this rank raises now."""
    return _current.is_running and not _current.is_saving


def meet_before_saving(*, is_last: bool = True) -> None:
    """Within ``save_checkpoint``, wait until all ranks have made their state dicts or one of them has failed.

    This does nothing outside of ``save_checkpoint``, or after the save itself has begun.

    Args:
        is_last: whether the save begins now. If not, the ranks will meet once more before it.

    Raises:
        RobustCheckpointError: a rank has failed or does not come. All ranks raise the same error.
    """
    if not is_shared():
        return
    _meet(None)
    _current.is_saving = is_last


def _meet(error: BaseException | None) -> None:
    def tell() -> None:
        if error is not None:
            raise error

    channel = Channel.for_group(
        None, operation="save_checkpoint", timeout_seconds=current_options().exchange_timeout_seconds
    )
    channel.barrier(_PHASE, tell)
