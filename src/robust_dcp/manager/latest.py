"""``latest``, which names the checkpoint that a job goes on from.

It is a file with the name. Where another tool has made it a symbolic link to the checkpoint, it stays one. It is
replaced in one step after each commit. Where there is no ``latest``, Megatron's tracker file
``latest_checkpointed_iteration.txt`` is read instead. Where that file exists, it is updated too.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Final

from robust_dcp.manager.checkpoints import Checkpoint, step_of
from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.commit import commit_metadata
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.what_is_there import TRACKER_NAME
from robust_dcp.storage.files.whole_file import read_whole_file

__all__ = ["LATEST_NAME", "latest_of", "move_latest"]

LATEST_NAME: Final = "latest"

_MAX_NBYTES: Final = 4096


def latest_of(disk: Disk, root: str, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint that is named as the latest; the one with the highest step if none is named, or it is gone."""
    link = os.path.join(root, LATEST_NAME)
    if os.path.isdir(link):
        target = os.path.realpath(link)
        for checkpoint in checkpoints:
            if os.path.realpath(checkpoint.path) == target:
                return checkpoint
    named = _read(disk, root, LATEST_NAME)
    for checkpoint in checkpoints:
        if checkpoint.name == named:
            return checkpoint
    tracked = _read(disk, root, TRACKER_NAME)
    for checkpoint in checkpoints:
        if tracked is not None and tracked.isdigit() and checkpoint.step == int(tracked):
            return checkpoint
    return checkpoints[-1] if checkpoints else None


def move_latest(disk: Disk, root: str, name: str) -> None:
    """Name another checkpoint, durably.

    Raises:
        StorageError: a call failed; ``latest`` names the old one, or the new one.
    """
    path = os.path.join(root, LATEST_NAME)
    if os.path.islink(path) and not os.path.isfile(path):
        _move_link(disk, path, name)
    else:
        commit_metadata(disk, root, name.encode(), name=LATEST_NAME)
    step = step_of(name)
    if step is not None and disk.exists(os.path.join(root, TRACKER_NAME)):
        commit_metadata(disk, root, str(step).encode(), name=TRACKER_NAME)


def _move_link(disk: Disk, path: str, target: str) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    disk.symlink(target, temporary)
    try:
        disk.rename(temporary, path)
    except errors.StorageError:
        disk.unlink(temporary)
        raise
    disk.fsync_directory(os.path.dirname(path))


def _read(disk: Disk, root: str, name: str) -> str | None:
    path = os.path.join(root, name)
    if not disk.exists(path):
        return None
    try:
        data = read_whole_file(disk, path, _MAX_NBYTES)
    except errors.RobustCheckpointError:  # it cannot be read, or is no such file
        return None
    return None if data is None else data.decode(errors="replace").strip()
