"""``robust-dcp prune``: removes checkpoints that no policy keeps, as ``CheckpointManager`` does."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import Any, Final

from robust_dcp.cli.ls import check_root
from robust_dcp.cli.output import CommandFailed, Output, age, number, safe_text
from robust_dcp.manager.series import Checkpoint, Series, is_marked, policies_of, series_in
from robust_dcp.on_demand import errors
from robust_dcp.storage.files.posix_disk import PosixDisk

__all__ = ["run"]

_NOT_REMOVED: Final = 2


def run(
    root: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    largest: bool,
    name: str | None,
    dry_run: bool,
    yes: bool,
) -> int:
    """Remove the checkpoints of a series that none of the given rules keeps."""
    check_root(root)
    if largest and keep_best is None:
        raise CommandFailed("--largest says which value of a metric is best: name the metric with --keep-best")
    policies = policies_of(keep_last, keep_every, keep_best, best="largest" if largest else "smallest")
    if not policies:
        raise CommandFailed("say what to keep: --keep-last, --keep-every or --keep-best")
    disk = PosixDisk()
    series = _series(disk, root, name)
    checkpoints, _ = series.look()
    _check_metric(checkpoints, keep_best)
    doomed = series.unkept(policies)
    doomed_paths = {each.path for each in doomed}
    Output.note(f"{root}: {number(len(checkpoints), 'checkpoint')}, of which {len(doomed)} would be removed")
    Output.table(
        ("step", "name", "age", "what"),
        [(each.step, each.name, age(each.saved_seconds), _what(series, each, doomed_paths)) for each in checkpoints],
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
        return 0
    if not yes and not _is_agreed(doomed):
        Output.put(report)
        Output.note("nothing was removed: pass --yes")
        return _NOT_REMOVED
    # Again by the rules, and only what was shown: a job may have saved while the user was thinking.
    from robust_dcp.manager.retention import prune  # imports torch

    pruned = prune(series, policies, only=doomed_paths)
    report.update(asdict(pruned))
    Output.put(report)
    for path in pruned.in_use:
        Output.note(f"{path} stays: it is being loaded, or a save runs into it")
    for path in pruned.swept:
        Output.note(f"{path} was the leftover of a crashed save")
    Output.note(f"{number(len(pruned.removed), 'checkpoint')} removed")
    return _NOT_REMOVED if pruned.failed else 0  # the log has said why


def _series(disk: PosixDisk, root: str, name: str | None) -> Series:
    """The series that is meant: the only one that holds something of ours, or the one that was named."""
    if name is not None:
        try:
            chosen = Series(disk, root, name)
        except ValueError as error:
            raise CommandFailed(f"--name: {error}") from None
        if not chosen.directories():
            raise CommandFailed(f"{root} holds nothing that is called as --name {name!r} says")
        return chosen
    there = series_in(disk, root)
    ours = [series for series in there if any(not _is_of_others(disk, each.path) for each in series.look()[0])]
    if len(ours) > 1:
        options = " or ".join(f"--name {shlex.quote(series.name)}" for series in ours)
        raise CommandFailed(f"{root} holds {len(ours)} series of checkpoints: say which one with {options}")
    return next(iter([*ours, *there]), Series(disk, root))


def _is_of_others(disk: PosixDisk, path: str) -> bool:
    try:
        return not is_marked(disk, path)
    except errors.StorageError:
        return False


def _what(series: Series, checkpoint: Checkpoint, doomed_paths: set[str]) -> str:
    if checkpoint.path in doomed_paths:
        return "remove"
    why = series.why_it_stays(checkpoint)
    return f"keep, {why}" if why else "keep"


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
    try:
        answer = input(f"Remove {names}{more}? [y/N]: ")
    except EOFError:
        raise KeyboardInterrupt from None
    return answer.strip().lower() in ("y", "yes")
