"""``robust-dcp ls``: the checkpoints below a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Final

from robust_dcp.cli.output import CommandFailed, Output, age, number, size
from robust_dcp.manager.series import Checkpoint, Series, parse_name, series_in
from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.saving_file import OtherSave, SaveState, saving_files_in
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, REMOVING_PREFIX, metadata_name
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.files.what_is_there import what_is_there

__all__ = ["DirectoryState", "check_root", "run", "state_of_directory"]

_THREADS: Final = 8  # a network file system answers several at once
_RECENT_SECONDS: Final = 600.0


def run(root: str) -> None:
    """Print the checkpoints below a directory."""
    disk = PosixDisk()
    check_root(root)
    now_seconds = time.time()
    removals = [name for name in disk.list_directory(root) if name.startswith(REMOVING_PREFIX)]
    others = [
        _other(os.path.join(root, name), name.removeprefix(REMOVING_PREFIX), DirectoryState.BEING_REMOVED)
        for name in removals
    ]
    checkpoints: list[Checkpoint] = []
    latest: list[Checkpoint | None] = []
    for series in series_in(disk, root):
        committed, _ = series.look()
        known = {each.path for each in committed}
        committed = sorted([*committed, *_saved_by_each_rank(disk, series, known)])
        checkpoints += committed
        latest.append(series.latest_of(committed))
        uncommitted = sorted(set(series.directories()) - {each.path for each in committed})
        others += [
            _other(path, os.path.basename(path), state_of_directory(disk, path, now_seconds)) for path in uncommitted
        ]
    Output.note(f"{root}: {number(len(checkpoints), 'checkpoint')}")
    metrics = sorted({name for each in checkpoints for name in each.metrics})
    with ThreadPoolExecutor(_THREADS) as pool:
        rows = list(pool.map(lambda each: _row(disk, each, each in latest, now_seconds), checkpoints))
    Output.put({"root": root, "checkpoints": rows, "uncommitted": others})
    if not rows and not others:
        if disk.exists(os.path.join(root, METADATA_NAME)):
            Output.note(
                "this is a checkpoint itself: give the directory that holds it, or see what it holds with inspect"
            )
        return
    Output.table(
        ("step", "name", "size", "age", "state", *metrics),
        [
            *((row["step"], row["name"], size(row["nbytes"]), None, row["state"]) for row in others),
            *(
                (
                    *(row["step"], row["name"], size(row["nbytes"]), age(row["saved_seconds"])),
                    row["state"] + (", latest" if row["is_latest"] else ""),
                    *(row["metrics"].get(name) for name in metrics),
                )
                for row in rows
            ),
        ],
        right=("step", "size", *metrics),
    )


def _saved_by_each_rank(disk: Disk, series: Series, known: set[str]) -> Iterator[Checkpoint]:
    """The checkpoints that DCP has saved with ``use_collectives=False``: each rank has left a file of its own."""
    for path in series.directories():
        metadata = os.path.join(path, metadata_name(0))
        if path not in known and disk.exists(metadata):
            step = series.step_of(os.path.basename(path)) or 0
            yield Checkpoint(step, path, disk.modified_seconds(metadata))


def _row(disk: Disk, checkpoint: Checkpoint, is_latest: bool, now_seconds: float) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "name": checkpoint.name,
        "path": checkpoint.path,
        "nbytes": _nbytes_in(checkpoint.path),
        "saved_seconds": checkpoint.saved_seconds,
        "state": state_of_directory(disk, checkpoint.path, now_seconds).value,
        "is_latest": is_latest,
        "metrics": dict(checkpoint.metrics),
        "provenance": dict(checkpoint.provenance),
    }


def _other(path: str, name: str, state: DirectoryState) -> dict[str, Any]:
    step = (parse_name(name) or ("", None))[1]
    return {"step": step, "name": name, "path": path, "nbytes": _nbytes_in(path), "state": state.value}


def check_root(root: str) -> None:
    """Refuse what is no directory, without an import of torch.

    Raises:
        CommandFailed: it is not there, or no directory, or may not be read.
    """
    if not os.path.isdir(root):
        raise CommandFailed(f"{root}: {what_is_there(PosixDisk(), root)}")
    if not os.access(root, os.R_OK | os.X_OK):
        raise CommandFailed(f"{root} cannot be read: check who owns the directory and with which mode")


def _nbytes_in(path: str) -> int:
    """Bytes of all files in a directory; those that vanish meanwhile count nothing."""
    return sum(_sizes_in(path))


def _sizes_in(path: str) -> Iterator[int]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes_in(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False).st_size
    except OSError:
        return


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
    states = [_state_of_save(disk, path, name, now_seconds) for name in saving_files_in(names)]
    saving = next((state for state in DirectoryState if state in states), None)
    if METADATA_NAME in names or metadata_name(0) in names:
        return DirectoryState.COMMITTED if saving is None else _BESIDE_A_CHECKPOINT.get(saving, saving)
    if saving is not None:
        return saving
    if not names:
        return DirectoryState.EMPTY
    is_recent = now_seconds - _last_change(disk, path, names) < _RECENT_SECONDS  # stock keeps no journal
    return DirectoryState.MAYBE_SAVING if is_recent else DirectoryState.NOT_COMMITTED


def _state_of_save(disk: Disk, path: str, name: str, now_seconds: float) -> DirectoryState:
    try:
        save = OtherSave.read(disk, path, name, now_seconds=now_seconds)
        if save is not None and save.state is SaveState.UNKNOWN:
            changed = _last_change(disk, path, disk.list_directory(path))
            return DirectoryState.MAYBE_SAVING if now_seconds - changed < _RECENT_SECONDS else DirectoryState.CRASHED
    except errors.StorageError:
        save = None
    if save is None:  # it has ended meanwhile
        return DirectoryState.COMMITTED
    return DirectoryState.SAVING if save.state is SaveState.RUNNING else DirectoryState.CRASHED


def _last_change(disk: Disk, path: str, names: list[str]) -> float:
    """When a file of the directory was last written."""
    return max((_changed(disk, os.path.join(path, name)) for name in names), default=0.0)


def _changed(disk: Disk, path: str) -> float:
    try:
        return disk.modified_seconds(path)
    except errors.StorageError:  # it has just been removed
        return 0.0
