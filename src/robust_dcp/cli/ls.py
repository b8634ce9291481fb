"""``robust-dcp ls``: the checkpoints below a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final

import typer

from robust_dcp.cli.checkpoint import age, local_path
from robust_dcp.cli.output import CommandFailed, Json, Output, number, size
from robust_dcp.manager.checkpoints import Checkpoint, find_checkpoints, step_of, uncommitted_directories
from robust_dcp.manager.latest import latest_of
from robust_dcp.manager.states import directories_being_removed, state_of_directory
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.files.what_is_there import what_is_there

__all__ = ["EXAMPLES", "check_root", "run"]

EXAMPLES: Final = ("robust-dcp ls checkpoints", "robust-dcp ls checkpoints --json | jq '.checkpoints[].step'")

_THREADS: Final = 8  # a network file system answers several at once


def run(
    root: Annotated[
        str, typer.Argument(help="The directory that holds the checkpoints.", callback=local_path, show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run with step, size, state and age.

    It finds directories like step_1000, iter_0001000, global_step1000 and checkpoint-1000. The newest line is the last.
    """
    disk = PosixDisk()
    check_root(root)
    checkpoints = find_checkpoints(disk, root)
    uncommitted = uncommitted_directories(disk, root)
    removals = directories_being_removed(disk, root)
    Output.note(f"{root}: {number(len(checkpoints), 'checkpoint')}")
    latest = latest_of(disk, root, checkpoints)
    metrics = sorted({name for checkpoint in checkpoints for name in checkpoint.metrics})
    now_seconds = time.time()

    def row_of(checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            "step": checkpoint.step,
            "name": checkpoint.name,
            "path": checkpoint.path,
            "nbytes": _nbytes_in(checkpoint.path),
            "saved_seconds": checkpoint.saved_seconds,
            "state": state_of_directory(disk, checkpoint.path, now_seconds).value,
            "is_latest": checkpoint == latest,
            "metrics": dict(checkpoint.metrics),
            "provenance": dict(checkpoint.provenance),
        }

    def other(name: str, path: str, state: str) -> dict[str, Any]:
        return {"step": step_of(name), "name": name, "path": path, "nbytes": _nbytes_in(path), "state": state}

    with ThreadPoolExecutor(_THREADS) as pool:
        rows = list(pool.map(row_of, checkpoints))
    others = [
        *(other(name, path, "being removed") for name, path in removals),
        *(
            other(os.path.basename(path), path, state_of_directory(disk, path, now_seconds).value)
            for path in uncommitted
        ),
    ]
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
