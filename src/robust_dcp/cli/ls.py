"""``robust-dcp ls``: the checkpoints below a directory."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import typer

from robust_dcp.cli.checkpoint import age
from robust_dcp.cli.output import CommandFailed, Json, Output, size
from robust_dcp.manager.checkpoints import Checkpoint, find_checkpoints, uncommitted_directories
from robust_dcp.manager.latest import latest_of
from robust_dcp.storage.files.disk import PosixDisk
from robust_dcp.storage.files.what_is_there import what_is_there

__all__ = ["EXAMPLES", "run"]

EXAMPLES: Final = ("robust-dcp ls checkpoints", "robust-dcp ls checkpoints --json")


def run(
    root: Annotated[str, typer.Argument(help="The directory that holds the checkpoints.", show_default=False)],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run with step, size, state and age.

    It finds directories like step_1000, iter_0001000, global_step1000 and checkpoint-1000. The newest line is the last.
    """
    disk = PosixDisk()
    if not disk.exists(root):
        raise CommandFailed(f"{root}: {what_is_there(disk, root)}")
    checkpoints = find_checkpoints(disk, root)
    uncommitted = uncommitted_directories(disk, root)
    latest = latest_of(disk, root, checkpoints)
    metrics = sorted({name for checkpoint in checkpoints for name in checkpoint.metrics})
    rows = [_row(checkpoint, checkpoint == latest) for checkpoint in checkpoints]
    Output.put({"root": root, "checkpoints": rows, "uncommitted": uncommitted})
    if not rows and not uncommitted:
        Output.say(f"{root} holds no checkpoints.")
        return
    Output.table(
        ("step", "name", "size", "age", "state", *metrics),
        [
            *(
                (
                    *(row["step"], row["name"], size(row["nbytes"]), age(row["saved_seconds"])),
                    "latest" if row["is_latest"] else "committed",
                    *(row["metrics"].get(name) for name in metrics),
                )
                for row in rows
            ),
            *(
                (None, os.path.basename(path), None, None, "not committed", *(None for _ in metrics))
                for path in uncommitted
            ),
        ],
        right=("step", "size", *metrics),
    )


def _row(checkpoint: Checkpoint, is_latest: bool) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "name": checkpoint.name,
        "path": checkpoint.path,
        "nbytes": _nbytes_in(checkpoint.path),
        "saved_seconds": checkpoint.saved_seconds,
        "is_latest": is_latest,
        "metrics": dict(checkpoint.metrics),
        "provenance": dict(checkpoint.provenance),
    }


def _nbytes_in(path: str) -> int:
    """Bytes of all files in a directory; those that vanish meanwhile count nothing."""
    return sum(_nbytes_of(os.path.join(directory, name)) for directory, _, names in os.walk(path) for name in names)


def _nbytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
