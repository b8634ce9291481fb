"""``robust-dcp prune``: removes checkpoints that no policy keeps, as ``CheckpointManager`` does."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from robust_dcp.cli.checkpoint import age, local_path
from robust_dcp.cli.ls import check_root
from robust_dcp.cli.output import CommandFailed, Json, Output, number, safe_text
from robust_dcp.drain.record import is_awaited
from robust_dcp.manager.checkpoints import Checkpoint, find_checkpoints
from robust_dcp.manager.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy
from robust_dcp.manager.pruning import prune, unkept
from robust_dcp.storage.files.posix_disk import PosixDisk

__all__ = ["EXAMPLES", "run"]

EXAMPLES: Final = (
    "robust-dcp prune checkpoints --keep-last 3 --dry-run",
    "robust-dcp prune checkpoints --keep-last 3 --keep-every 10000 --yes",
    "robust-dcp prune checkpoints --keep-last 1 --keep-best accuracy --largest",
)

_NOT_REMOVED: Final = 2


def run(
    root: Annotated[
        str, typer.Argument(help="The directory that holds the checkpoints.", callback=local_path, show_default=False)
    ],
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the ones with the highest steps, so many.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep steps that are multiples of this.")] = None,
    keep_best: Annotated[str | None, typer.Option(help="Keep the one with the smallest value of this metric.")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="The largest value of the metric is best.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the checkpoints that none of the given rules keeps.

    The latest checkpoint and the one with the highest step always stay, and so does one that is being loaded or saved,
    or whose copy in durable storage has not arrived. In a terminal it asks first. Elsewhere it removes only with --yes,
    and otherwise shows what it would remove, with exit code 2. What crashed saves and cut off removals have left goes
    as well.
    """
    check_root(root)
    policies = _policies(keep_last, keep_every, keep_best, largest)
    if not policies:
        raise CommandFailed("say what to keep: --keep-last, --keep-every or --keep-best")
    disk = PosixDisk()
    checkpoints = find_checkpoints(disk, root)
    _check_metric(checkpoints, keep_best)
    doomed = unkept(disk, root, policies)
    doomed_paths = {each.path for each in doomed}
    Output.note(f"{root}: {number(len(checkpoints), 'checkpoint')}, of which {len(doomed)} would be removed")
    Output.table(
        ("step", "name", "age", "what"),
        [(each.step, each.name, age(each.saved_seconds), _what(disk, each, doomed_paths)) for each in checkpoints],
        right=("step",),
    )
    report: dict[str, Any] = {
        "root": root,
        "kept": [each.path for each in checkpoints if each.path not in doomed_paths],
        "unkept": [each.path for each in doomed],
        "removed": [],
        "in_use": [],
        "swept": [],
        "failed": [],
    }
    if dry_run:
        Output.put(report)
        return
    if not yes and not _is_agreed(doomed):
        Output.put(report)
        Output.note("nothing was removed: pass --yes")
        raise typer.Exit(_NOT_REMOVED)
    # Again by the rules, and only what was shown: a job may have saved while the user was thinking.
    pruned = prune(disk, root, policies, only=set(map(os.path.normpath, doomed_paths)))
    report.update(asdict(pruned))
    Output.put(report)
    for path in pruned.in_use:
        Output.note(f"{path} stays: it is being loaded, or a save runs into it")
    for path in pruned.swept:
        Output.note(f"{path} was the leftover of a crashed save")
    Output.note(f"{number(len(pruned.removed), 'checkpoint')} removed")
    if pruned.failed:  # the log has said why
        raise typer.Exit(_NOT_REMOVED)


def _what(disk: PosixDisk, checkpoint: Checkpoint, doomed_paths: set[str]) -> str:
    if checkpoint.path in doomed_paths:
        return "remove"
    return "keep, its copy has not arrived" if is_awaited(disk, checkpoint.path) else "keep"


def _policies(keep_last: int | None, keep_every: int | None, keep_best: str | None, largest: bool) -> list[KeepPolicy]:
    policies: list[KeepPolicy] = []
    if keep_last is not None:
        policies.append(KeepLast(keep_last))
    if keep_every is not None:
        policies.append(KeepEvery(keep_every))
    if keep_best is not None:
        policies.append(KeepBest(keep_best, best="largest" if largest else "smallest"))
    elif largest:
        raise CommandFailed("--largest says which value of a metric is best: name the metric with --keep-best")
    return policies


def _check_metric(checkpoints: list[Checkpoint], metric: str | None) -> None:
    """A mistyped metric would keep nothing, and the best checkpoint would be lost."""
    known = sorted({name for each in checkpoints for name in each.metrics})
    if metric is not None and checkpoints and metric not in known:
        there = f"they have {', '.join(known)}" if known else "none of them has any"
        raise CommandFailed(f"no checkpoint has the metric {metric!r}: {there}; nothing was removed")


def _is_agreed(doomed: list[Checkpoint]) -> bool:
    if not doomed:
        return True
    if Output.as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    names = ", ".join(safe_text(each.name) for each in doomed[:5])
    more = f" and {len(doomed) - 5} more" if len(doomed) > 5 else ""
    return typer.confirm(f"Remove {names}{more}?")
