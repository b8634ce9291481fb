"""Removes the checkpoints below a root that no policy keeps. ``CheckpointManager`` and ``robust-dcp prune`` call it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from robust_dcp.drain.record import is_awaited
from robust_dcp.manager.checkpoints import Checkpoint, find_checkpoints
from robust_dcp.manager.latest import latest_of
from robust_dcp.manager.policies import KeepPolicy
from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk

__all__ = ["Pruned", "prune", "unkept"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pruned:
    """Paths of directories.

    Attributes:
        removed: checkpoints that are gone.
        in_use: checkpoints that stay for now, because they are being loaded or saved.
        swept: leftovers of crashed saves that are gone.
        failed: checkpoints that could not be removed. The log says why.
    """

    removed: tuple[str, ...]
    in_use: tuple[str, ...]
    swept: tuple[str, ...]
    failed: tuple[str, ...] = ()


def unkept(disk: Disk, root: str, policies: Sequence[KeepPolicy]) -> list[Checkpoint]:
    """The checkpoints that no policy keeps.

    If the latest checkpoint is not the one with the highest step, the job has gone back to an earlier step. Then each
    policy is asked twice: for all checkpoints, and for those up to the latest. So what was saved before the job went
    back takes no place from what it saves now, and is not removed for it.

    These stay whatever the policies say: the latest, the newest, one whose copy has not arrived yet (``drain_to``), and
    a symbolic link, because somebody has put that there.

    Raises:
        StorageError: the root cannot be looked at.
    """
    checkpoints = find_checkpoints(disk, root)
    latest = latest_of(disk, root, checkpoints)
    until_latest = [each for each in checkpoints if latest is not None and each.step <= latest.step]
    asked = [checkpoints] if until_latest == checkpoints else [checkpoints, until_latest]
    kept = {each.path for policy in policies for among in asked for each in policy.kept(among)}
    return [
        each
        for each in checkpoints[:-1]
        if each.path not in kept
        and each != latest
        and not os.path.islink(each.path)
        and not is_awaited(disk, each.path)
    ]


def prune(disk: Disk, root: str, policies: Sequence[KeepPolicy], *, only: Collection[str] | None = None) -> Pruned:
    """Remove what no policy keeps, and what crashed saves and removals that were cut off have left.

    What cannot be removed is logged, and all else is removed all the same.

    Args:
        only: paths of checkpoints; no others are removed. ``None`` for no such limit.

    Raises:
        StorageError: the root cannot be looked at.
    """
    from robust_dcp.manager.removal import finish_removals, remove_checkpoint, sweep_crashed_saves  # imports torch

    root = os.path.normpath(root)
    if not disk.exists(root):  # nothing was saved yet
        return Pruned((), (), ())
    finish_removals(disk, root)
    swept = sweep_crashed_saves(disk, root)
    doomed = unkept(disk, root, policies) if policies else []
    removed: list[str] = []
    in_use: list[str] = []
    failed: list[str] = []
    for path in (each.path for each in doomed if only is None or each.path in only):
        try:
            (removed if remove_checkpoint(disk, path) else in_use).append(path)
        except errors.StorageError as error:  # noqa: PERF203 the others are removed all the same
            logger.warning("%s is not removed: %s", path, error.message)
            failed.append(path)
    return Pruned(tuple(removed), tuple(in_use), tuple(swept), tuple(failed))
