"""Find out whether a checkpoint is whole: all of it is loaded, into nothing, and compared with its checksums.

Of a directory that holds the checkpoints of a run it verifies each. Exit code 1 means that something is
broken. Data that was written without checksums is counted as not verified.

Examples:
  robust-dcp verify checkpoints/step_1000
  robust-dcp verify checkpoints
  robust-dcp verify s3://bucket/run_7 --fast
  robust-dcp verify checkpoints/step_1000 --json | jq '.problems[].item'
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from robust_dcp import errors
from robust_dcp.cli.arguments import number_in, place
from robust_dcp.cli.checkpoint import disk_of, holds_checkpoint, summary, summary_json
from robust_dcp.cli.output import CANNOT, FOUND, CommandFailed, Output, number, size
from robust_dcp.manager.series import series_in
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, is_url
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("path", type=place, help="A checkpoint, its URL, or a directory that holds those of a run.")
    parser.add_argument("-j", "--jobs", type=number_in(int, 1, 256), help="How many threads read.")
    parser.add_argument("--fast", action="store_true", help="Do not read data: structure, sizes and index.")


def run(options: Namespace) -> int:
    """Print whether a checkpoint, or each one of a run, is whole."""
    path, with_data = options.path, not options.fast
    checkpoints = _checkpoints_below(path)
    if not checkpoints:
        verified = _verify(path, options.jobs, with_data=with_data)
        Output.put(verified)
        return 0 if verified["is_whole"] else FOUND
    Output.note(f"{path}: {number(len(checkpoints), 'checkpoint')}")
    all_verified, failed = [], []
    for each in checkpoints:
        try:
            all_verified.append(_verify(each, options.jobs, with_data=with_data))
        except (CommandFailed, errors.StorageError) as error:  # noqa: PERF203 - a checkpoint is many calls
            is_there = is_url(each) or os.path.exists(each)
            failed += [{"path": each, "error": str(error)}] if is_there else []
            Output.note(str(error) if is_there else f"{each} was removed meanwhile")
    n_broken = sum(not each["is_whole"] for each in all_verified)
    Output.put({"root": path, "is_whole": not (n_broken or failed), "checkpoints": all_verified, "failed": failed})
    not_verified = f", and {len(failed)} could not be verified" if failed else ""
    of_all = number(len(all_verified) + len(failed), "checkpoint")
    Output.note(f"{of_all}: {n_broken} broken{not_verified}")
    return FOUND if n_broken else CANNOT if failed else 0


def _checkpoints_below(path: str) -> list[str]:
    """The checkpoints of a run, with those that may not be read; none if ``path`` is a checkpoint itself."""
    disk = disk_of(path) if is_url(path) else Disk()

    def is_closed(place: str) -> bool:
        return not is_url(place) and not (os.path.isdir(place) and os.access(place, os.R_OK | os.X_OK))

    if not disk.exists(path) or is_closed(path) or holds_checkpoint(path, disk):
        return []
    directories = [each for one in series_in(disk, path) for each in one.directories()]
    return [each for each in directories if is_closed(each) or holds_checkpoint(each, disk)]


def _verify(path: str, threads: int | None, *, with_data: bool) -> dict[str, Any]:
    """Verify one checkpoint, show what was found, and give it as JSON."""
    disk, metadata = disk_of(path), os.path.join(path, METADATA_NAME)
    from robust_dcp.contents import Findings, read_contents, verify
    from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint

    findings, started = Findings(), time.perf_counter()
    contents = None
    # A manager does not remove a checkpoint that is read.
    with needed_for_a_load(disk, path), Output.progress("verify") as show:
        before = disk.fingerprint(metadata)
        try:
            contents = read_contents(disk, path)
        except (CorruptCheckpoint, UnsafeCheckpoint) as error:
            findings.add(error, os.path.relpath(getattr(error, "file", None) or metadata, path))
        else:
            Output.note(summary(contents))
            started = time.perf_counter()
            verify(contents, findings, threads=threads, with_data=with_data, progress=show)
    if disk.fingerprint(metadata) != before:
        raise CommandFailed(f"{path} was saved to, or removed, while it was verified: run verify again")
    result = {
        **({"path": path} if contents is None else summary_json(contents)),
        "is_whole": not findings.problems,
        "with_data": with_data,
        "problems": [each._asdict() for each in findings.problems.values()],
        "n_problems": len(findings.problems),
        "notes": findings.notes,
        "unverified_nbytes": findings.unverified_nbytes,
        "verified_nbytes": findings.verified_nbytes,
        "checked_nbytes": findings.checked_nbytes,
        "seconds": time.perf_counter() - started,
    }
    _show(result)
    return result


def _show(result: dict[str, Any]) -> None:
    for text in result["notes"]:
        Output.note(text)
    if result["unverified_nbytes"]:
        Output.note(f"not verified: {size(result['unverified_nbytes'])} were written without a checksum")
    if result.get("written_by") == "torch":
        Output.note(f"not verified: {METADATA_NAME} has no checksum, it was compared with the files only")
    if result["problems"]:
        Output.table(("file", "item", "expected", "found"), [tuple(each.values()) for each in result["problems"]])
        Output.note(f"{result['path']} is broken: {number(result['n_problems'], 'problem')}")
    elif not result["with_data"]:
        Output.note("structure, sizes and index are as they should be; data was not read")
    else:
        rate = result["checked_nbytes"] / max(result["seconds"], 1e-9)
        start = "no damage found, and not all could be verified" if result["unverified_nbytes"] else "whole"
        Output.note(
            f"{start}: {size(result['verified_nbytes'])} have their checksums; read {size(result['checked_nbytes'])} "
            f"in {result['seconds']:.1f} s, {size(rate)}/s"
        )
