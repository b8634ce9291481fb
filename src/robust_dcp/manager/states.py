"""What goes on in the directory of a checkpoint: whether it is committed, and whether a save or a removal is under way.

It only looks. It takes no lock, because a save that begins in that moment would find the directory taken.
"""

from __future__ import annotations

import os
import socket
from enum import Enum
from typing import Final

from robust_dcp.manager.paths import REMOVING_PREFIX
from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.journal import OtherSave, journals_in
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.mounts import boot_id
from robust_dcp.storage.files.paths import METADATA_NAME

__all__ = ["DirectoryState", "directories_being_removed", "state_of_directory"]

_RECENT_SECONDS: Final = 600.0


class DirectoryState(Enum):
    """The value is what people read."""

    COMMITTED = "committed"
    SAVING_AGAIN = "committed, saving now"
    SAVING = "saving now"
    MAYBE_SAVING = "saving or crashed"
    CRASHED = "crashed save"
    COMMITTED_CRASHED = "committed, crashed save"
    NOT_COMMITTED = "not committed"
    EMPTY = "empty"
    BEING_REMOVED = "being removed"
    GONE = "gone"


_BESIDE_A_CHECKPOINT: Final = {
    DirectoryState.SAVING: DirectoryState.SAVING_AGAIN,
    DirectoryState.MAYBE_SAVING: DirectoryState.SAVING_AGAIN,
    DirectoryState.CRASHED: DirectoryState.COMMITTED_CRASHED,
}


def state_of_directory(disk: Disk, path: str, now_seconds: float) -> DirectoryState:
    """What goes on in ``path``.

    Args:
        now_seconds: the time, in seconds since 1970.
    """
    try:
        names = disk.list_directory(path)
    except errors.StorageError:
        return DirectoryState.GONE
    states = [_state_of_save(disk, path, name, now_seconds) for name in journals_in(names)]
    saving = next((state for state in DirectoryState if state in states), None)
    if METADATA_NAME in names:
        return DirectoryState.COMMITTED if saving is None else _BESIDE_A_CHECKPOINT.get(saving, saving)
    if saving is not None:
        return saving
    if not names:
        return DirectoryState.EMPTY
    is_recent = now_seconds - _last_change(disk, path, names) < _RECENT_SECONDS  # stock keeps no journal
    return DirectoryState.MAYBE_SAVING if is_recent else DirectoryState.NOT_COMMITTED


def directories_being_removed(disk: Disk, root: str) -> list[tuple[str, str]]:
    """(name that the checkpoint had, path) of removals that are under way, or were cut off."""
    names = [name for name in disk.list_directory(root) if name.startswith(REMOVING_PREFIX)]
    return [(name.removeprefix(REMOVING_PREFIX), os.path.join(root, name)) for name in names]


def _state_of_save(disk: Disk, path: str, journal: str, now_seconds: float) -> DirectoryState:
    try:
        record = OtherSave.read(disk, path, journal, now_seconds=now_seconds, is_locked=False).record
        changed = _last_change(disk, path, disk.list_directory(path))
    except errors.StorageError:  # the save has ended meanwhile
        return DirectoryState.COMMITTED
    if record is None:
        return DirectoryState.CRASHED  # it was killed while it wrote the journal
    if record.boot_id == boot_id() and record.host == socket.gethostname():  # containers have names of their own
        return DirectoryState.SAVING if os.path.exists(f"/proc/{record.pid}") else DirectoryState.CRASHED
    return DirectoryState.MAYBE_SAVING if now_seconds - changed < _RECENT_SECONDS else DirectoryState.CRASHED


def _last_change(disk: Disk, path: str, names: list[str]) -> float:
    """When a file of the directory was last written."""
    return max((_changed(disk, os.path.join(path, name)) for name in names), default=0.0)


def _changed(disk: Disk, path: str) -> float:
    try:
        return disk.modified_seconds(path)
    except errors.StorageError:  # it has just been removed
        return 0.0
