"""List the checkpoints below a directory with step, size, state and age.

It finds directories like step_1000, iter_0001000, global_step1000 and checkpoint-1000. Those whose
names begin alike are a series. Series follow each other, and the newest line of each is its last.

Examples:
  robust-dcp ls checkpoints
  robust-dcp ls s3://bucket/run_7
  robust-dcp ls checkpoints --json | jq '.checkpoints[].step'
"""

from __future__ import annotations

import errno
import os
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from robust_dcp import errors
from robust_dcp.cli.arguments import place
from robust_dcp.cli.checkpoint import disk_of_root, protected_in_words
from robust_dcp.cli.output import Output, age, number, size
from robust_dcp.manager.series import Checkpoint, parse_name, series_in
from robust_dcp.nodes.parity_file import read_parity_note
from robust_dcp.report import listed
from robust_dcp.storage.committing.saving_file import OtherSave, saving_files_in
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import (
    COPYING_PREFIX,
    METADATA_NAME,
    MODEL_INDEX_NAME,
    PARITY_PREFIX,
    REMOVING_PREFIX,
    SAFETENSORS_SUFFIX,
    metadata_name,
)
from robust_dcp.storage.files.what_is_there import what_is_there
from robust_dcp.storage.metadata.stored_pickle import TRAILER_NBYTES, is_cut_off

_THREADS: Final = 8  # a network file system answers several at once
_RECENT_SECONDS: Final = 600.0
CRASHED: Final = "crashed save"
_UNKNOWN: Final = "saving or crashed"


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("root", type=place, help="The directory, or the URL, that holds the checkpoints.")


def run(options: Namespace) -> None:
    """Print the checkpoints below a directory."""
    root = options.root
    disk = disk_of_root(root)
    now_seconds = time.time()
    removals = [name for name in disk.list_directory(root) if name.startswith(REMOVING_PREFIX)]
    others = [_row(disk, os.path.join(root, each), "being removed") for each in removals]
    checkpoints: list[Checkpoint] = []
    latest: list[Checkpoint | None] = []
    for series in series_in(disk, root):
        committed = series.look(by_ranks=True)
        checkpoints += committed
        latest.append(series.latest_of(committed))
        uncommitted = sorted(set(series.directories()) - {each.path for each in committed})
        others += [_row(disk, path, state_of(disk, path, now_seconds)) for path in uncommitted]

    def row(checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            **_row(disk, checkpoint.path, state_of(disk, checkpoint.path, now_seconds)),
            "saved_seconds": checkpoint.saved_seconds,
            "is_latest": checkpoint in latest,
            "metrics": dict(checkpoint.metrics),
        }

    Output.note(f"{root}: {number(len(checkpoints), 'checkpoint')}")
    with ThreadPoolExecutor(_THREADS) as pool:
        rows = list(pool.map(row, checkpoints))
    Output.put({"root": root, "checkpoints": rows, "uncommitted": others})
    if not rows and not others:
        is_one = disk.exists(os.path.join(root, METADATA_NAME))
        itself = "this is a checkpoint itself: give the directory that holds it, or see inspect"
        Output.note(itself if is_one else what_is_there(disk, root))
        return
    metrics = sorted({name for each in checkpoints for name in each.metrics})
    shown = [
        (
            each["step"],
            each["name"],
            size(each["nbytes"]),
            age(each["saved_seconds"]) if "saved_seconds" in each else None,
            each["state"] + (", latest" if each.get("is_latest") else ""),
            *(each.get("metrics", {}).get(name) for name in metrics),
        )
        for each in (*others, *rows)
    ]
    Output.table(("step", "name", "size", "age", "state", *metrics), shown, right=("step", "size", *metrics))


def _row(disk: Disk, path: str, state: str) -> dict[str, Any]:
    name = os.path.basename(path).removeprefix(REMOVING_PREFIX)
    step = (parse_name(name) or ("", None))[1]
    return {
        "step": step,
        "name": name,
        "path": path,
        "nbytes": sum(nbytes for nbytes, _ in disk.files_below(path)),
        "state": state,
    }


def state_of(disk: Disk, path: str, now_seconds: float) -> str:
    """What goes on in a directory, in words.

    Args:
        now_seconds: the time, in seconds since 1970.
    """
    try:
        names = disk.list_directory(path)
    except errors.StorageError as error:
        return "gone" if error.errno == errno.ENOENT else "unreadable"
    saves = [_save_in(disk, path, name, now_seconds) for name in saving_files_in(names)]
    states = {save.is_over for save in saves if save is not None}

    def is_recent() -> bool:
        return now_seconds - max((seconds for _, seconds in disk.files_below(path)), default=0) < _RECENT_SECONDS

    saves_of_ours = CRASHED if states else ""
    if False in states:
        saves_of_ours = "saving now"
    elif None in states and is_recent():
        saves_of_ours = _UNKNOWN
    metadata = [METADATA_NAME] if METADATA_NAME in names else []
    if not metadata and metadata_name(0) in names:  # each rank has saved for itself
        metadata = [each for each in names if each.endswith(METADATA_NAME)]
    if metadata:
        try:
            cut = [each for each in metadata if is_cut_off(*disk.read_end(os.path.join(path, each), TRAILER_NBYTES))]
        except errors.StorageError:
            return "unreadable"
        committed = f"damaged: {listed(cut, 3)} is cut off" if cut else "committed"
        state = f"{committed}, {saves_of_ours}".removesuffix(", ")
        has_parity = any(name.startswith(PARITY_PREFIX) for name in names)
        return state + protected_in_words(read_parity_note(disk, path) if has_parity else None)
    if saves_of_ours or not names:
        return saves_of_ours or "empty"
    if any(name.startswith(COPYING_PREFIX) for name in names):
        return "copying or half a copy"
    if MODEL_INDEX_NAME in names and any(name.endswith(SAFETENSORS_SUFFIX) for name in names):
        return "a Hugging Face model"
    return _UNKNOWN if is_recent() else "not committed"  # stock leaves no file that tells


def _save_in(disk: Disk, path: str, name: str, now_seconds: float) -> OtherSave | None:
    try:
        return OtherSave.read(disk, path, name, now_seconds=now_seconds)
    except errors.StorageError:  # it has ended meanwhile
        return None
