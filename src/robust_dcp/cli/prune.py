"""Remove the checkpoints that none of the given rules keeps.

Checkpoints whose names begin alike are a series. If there are several, --name says which one. The latest
checkpoint of the series, the one with the highest step, the newest one with a whole .metadata, and the
newest one that outlives the loss of a node always stay, and so does one that is being loaded or saved,
that robust_dcp has not saved, or whose copy in durable storage has not arrived. In a terminal it asks
first. Elsewhere it removes only with --yes, and otherwise shows what it would remove, with exit code 2.
What crashed saves and cut off removals have left goes as well.

Examples:
  robust-dcp prune checkpoints --keep-last 3 --dry-run
  robust-dcp prune checkpoints --keep-last 3 --keep-every 10000 --yes
  robust-dcp prune checkpoints --keep-last 1 --keep-best accuracy --largest
  robust-dcp prune checkpoints --keep-last 1 --name 'critic_{step}'
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from robust_dcp import errors
from robust_dcp.cli.arguments import number_in, place
from robust_dcp.cli.checkpoint import disk_of_root
from robust_dcp.cli.ls import CRASHED, state_of
from robust_dcp.cli.output import CANNOT, CommandFailed, Output, age, number, safe_text
from robust_dcp.manager.series import Checkpoint, KeepBest, Series, policies_of, prune, series_in
from robust_dcp.report import listed
from robust_dcp.storage.files.disk import Disk


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    whole = number_in(int, 1)
    parser.add_argument("root", type=place, help="The directory, or the URL, that holds the checkpoints.")
    parser.add_argument("--keep-last", type=whole, help="Keep the ones with the highest steps, so many.")
    parser.add_argument("--keep-every", type=whole, help="Keep steps that are multiples of this.")
    parser.add_argument("--keep-best", help="Keep the one with the smallest value of this metric.")
    parser.add_argument("--largest", action="store_true", help="The largest value of the metric is best.")
    parser.add_argument("--name", help="Which series, as CheckpointManager's name: critic_{step}.")
    parser.add_argument("-n", "--dry-run", action="store_true", help="Only show what would be removed.")
    parser.add_argument("-y", "--yes", action="store_true", help="Do not ask.")


def run(options: Namespace) -> int:
    """Remove the checkpoints of a series that none of the given rules keeps."""
    root, dry_run = options.root, options.dry_run
    disk = disk_of_root(root)
    if options.largest and options.keep_best is None:
        raise CommandFailed("--largest says which value of a metric is best: name the metric with --keep-best")
    best = [KeepBest(options.keep_best, best="largest" if options.largest else "smallest")] if options.keep_best else []
    policies = policies_of(options.keep_last, options.keep_every, None, best)
    if not policies:
        raise CommandFailed("say what to keep: --keep-last, --keep-every or --keep-best")
    series = _series(disk, root, options.name)
    decided = series.decide(policies)
    crashed = [path for path in series.directories() if state_of(disk, path, time.time()) == CRASHED]
    _check_metric([each for each, _ in decided], options.keep_best)
    doomed = [each for each, why_it_stays in decided if why_it_stays is None]
    Output.note(f"{root}: {number(len(decided), 'checkpoint')}, of which {len(doomed)} would be removed")
    what = {None: "remove", "": "keep"}
    rows = [(each.step, each.name, age(each.saved_seconds), what.get(why, f"keep, {why}")) for each, why in decided]
    left = [(series.step_of(name), name, None, "remove crash leftovers") for name in map(os.path.basename, crashed)]
    Output.table(("step", "name", "age", "what"), [*left, *rows], right=("step",))
    report: dict[str, Any] = {
        "root": root,
        "kept": [each.path for each, why_it_stays in decided if why_it_stays is not None],
        "unkept": [each.path for each in doomed],
        "crashed": crashed,
        **{key: [] for key in ("removed", "in_use", "swept", "failed")},
    }
    if dry_run or not (options.yes or _is_agreed([*crashed, *report["unkept"]])):
        Output.put(report)
        if not dry_run:
            Output.note("nothing was removed: pass --yes")
        return 0 if dry_run else CANNOT
    # Again by the rules, and only what was shown: a job may have saved while the user was thinking.
    with Output.cleaning_up():
        pruned = prune(series, policies, only={each.path for each in doomed})
    Output.put({**report, **pruned})
    for path in pruned["in_use"]:
        Output.note(f"{path} stays: it is being loaded, or a save runs into it")
    n_removed, n_swept = len(pruned["removed"]), len(pruned["swept"])
    Output.note(f"removed: {number(n_removed, 'checkpoint')}, {number(n_swept, 'crashed save')}")
    return CANNOT if pruned["failed"] else 0  # the log has said why


def _series(disk: Disk, root: str, name: str | None) -> Series:
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

    def is_ours(series: Series, path: str) -> bool:
        try:
            return series.is_ours(path)
        except errors.StorageError:  # nobody knows, so it may be
            return True

    ours = [each for each in there if any(is_ours(each, checkpoint.path) for checkpoint in each.look())]
    if len(ours) > 1:
        options = " or ".join(f"--name {shlex.quote(series.name)}" for series in ours)
        raise CommandFailed(f"{root} holds {len(ours)} series of checkpoints: say which one with {options}")
    return next(iter([*ours, *there]), Series(disk, root))


def _check_metric(checkpoints: list[Checkpoint], metric: str | None) -> None:
    """A mistyped metric would keep nothing, and the best checkpoint would be lost."""
    known = sorted({name for each in checkpoints for name in each.metrics})
    if metric is not None and checkpoints and metric not in known:
        there = f"they have {', '.join(known)}" if known else "none of them has any"
        raise CommandFailed(f"no checkpoint has the metric {metric!r}: {there}; nothing was removed")


def _is_agreed(doomed: list[str]) -> bool:
    if not doomed:
        return True
    if Output.as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    names = listed((safe_text(os.path.basename(path)) for path in doomed), 5)
    try:
        return input(f"Remove {names}? [y/N]: ").strip().lower() in ("y", "yes")
    except EOFError:
        raise KeyboardInterrupt from None
