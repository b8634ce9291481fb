"""What ranks do together after a save failed in step: remove its files, and tell each other what could not be removed.

This module owns the order. First every rank removes its files, then the announcement and the directories are removed.
So at every instant an announcement accounts for whatever is left. It knows only the names of files.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from robust_dcp.storage.committing.save import Save
from robust_dcp.storage.committing.saving_file import name_left_over

logger = logging.getLogger(__name__)

_INTERRUPTS: Final = frozenset({"KeyboardInterrupt", "SystemExit", "GeneratorExit"})


class _NotRemoved(msgspec.Struct, frozen=True):
    """The paths that are still there."""

    paths: tuple[str, ...] = ()


def failed_in_step(error: BaseException) -> bool:
    """Whether all ranks raise ``error``, and none of them can be committing."""
    return isinstance(error, RobustCheckpointError) and not isinstance(error, ExchangeError)


def nothing_is_committed(channel: Channel, phase: str, directory: Save, error: BaseException) -> bool:
    """Whether the coordinator knows that its commit, which failed in step, committed nothing. All ranks get the
    same."""
    if _was_interrupted(error):
        return False
    try:
        _, state = channel.agree(
            f"{phase}: is it committed",
            lambda: Offer(flags=int(channel.is_coordinator and directory.may_be_committed)),
        )
        return not state.count(1)
    except RobustCheckpointError as lost:
        logger.warning("%s: the ranks could not find out whether the checkpoint is committed: %s", phase, lost.message)
        return False


def clean_up(channel: Channel, phase: str, directory: Save, error: BaseException) -> None:
    """Remove what all ranks made in a save that failed in step. ``error`` then names on all ranks what is left.

    This never raises, because the caller has to report that the save failed.

    Args:
        phase: the phase of the save, for the names of exchanges.
        error: the error that all ranks are about to raise.
    """
    left = directory.remove_files()

    def remove_directories() -> _NotRemoved:
        paths = [path for message in gathered or () if message is not None for path in message.paths]
        return _NotRemoved(tuple(paths or directory.give_up()))

    if not _was_interrupted(error):
        try:
            _, gathered = channel.gather(
                f"{phase}: remove files", lambda: _NotRemoved(tuple(left)) if left else None, _NotRemoved
            )
            left = list(channel.broadcast(f"{phase}: remove directories", remove_directories, _NotRemoved).paths)
        except RobustCheckpointError as lost:
            logger.warning("%s: the ranks could not remove the files of this save together: %s", phase, lost.message)
            directory.release()
            name_left_over(error, left)
            return
    if left:
        directory.release()
    else:
        left = directory.give_up()
    name_left_over(error, left)


def _was_interrupted(error: BaseException) -> bool:
    """Whether a rank was interrupted. It raises something else, and joins no more exchanges of this save."""
    failures = error.rank_failures if isinstance(error, RobustCheckpointError) else ()
    return any(failure.type_name in _INTERRUPTS for failure in failures)
