"""``robust-dcp verify``: whether a checkpoint is whole, down to its last bit."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from robust_dcp.cli.checkpoint import check_is_there, disk_of, holds_checkpoint, open_checkpoint, summary, summary_json
from robust_dcp.cli.output import FOUND, CommandFailed, Output, number, size
from robust_dcp.manager.series import series_in
from robust_dcp.storage.committing.saving_file import needed_for_a_load
from robust_dcp.storage.files.paths import METADATA_NAME, is_url
from robust_dcp.storage.files.posix_disk import PosixDisk

if TYPE_CHECKING:
    from robust_dcp.contents.read import Contents
    from robust_dcp.contents.verify import Findings

__all__ = ["run"]


def run(path: str, *, jobs: int | None, fast: bool) -> int:
    """Print whether a checkpoint, or each one of a run, is whole."""
    jobs = jobs or min(16, max(4, len(os.sched_getaffinity(0))))
    checkpoints = _checkpoints_of_run(path)
    if not checkpoints:
        check_is_there(path)
        checked = _verify(path, jobs, with_data=not fast)
        Output.put(checked)
        return 0 if checked["is_whole"] else FOUND
    Output.note(f"{path}: {number(len(checkpoints), 'checkpoint')}")
    found = [_verify(each, jobs, with_data=not fast) for each in checkpoints]
    broken = [each["path"] for each in found if not each["is_whole"]]
    Output.put({"root": path, "is_whole": not broken, "checkpoints": found})
    Output.note(f"{len(broken)} of {number(len(found), 'checkpoint')} {'is' if len(broken) == 1 else 'are'} broken")
    return FOUND if broken else 0


def _checkpoints_of_run(path: str) -> list[str]:
    """The checkpoints of a directory that holds those of a run; none if it is a checkpoint itself."""
    if is_url(path) or not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK) or holds_checkpoint(path):
        return []
    return [each for series in series_in(PosixDisk(), path) for each in series.directories() if holds_checkpoint(each)]


def _verify(path: str, jobs: int, *, with_data: bool) -> dict[str, Any]:
    """Verify one checkpoint, show what was found, and give it as JSON."""
    from robust_dcp.contents.verify import Findings, verify
    from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint

    findings = Findings()
    seconds = 0.0
    try:
        contents = open_checkpoint(path)
    except (CorruptCheckpoint, UnsafeCheckpoint) as error:
        contents = None
        file = os.path.relpath(getattr(error, "file", None) or os.path.join(path, METADATA_NAME), path)
        expected = getattr(error, "expected", None) or "a file of a checkpoint"
        findings.broken(file, None, expected, getattr(error, "found", None) or error.message)
    if contents is not None:
        Output.note(summary(contents))
        disk = disk_of(path)
        metadata = os.path.join(path, METADATA_NAME)
        before = disk.fingerprint(metadata) if disk.exists(metadata) else None
        started = time.perf_counter()
        # A manager does not remove a checkpoint that is read.
        with needed_for_a_load(disk, path), Output.progress("verify", contents.file_nbytes) as show:
            verify(
                disk,
                contents,
                findings,
                jobs=jobs,
                with_data=with_data,
                on_progress=lambda: show(findings.checked_nbytes),
            )
        seconds = time.perf_counter() - started
        if before is not None and (not disk.exists(metadata) or disk.fingerprint(metadata) != before):
            raise CommandFailed(f"{path} was saved to, or removed, while it was verified: run verify again")
    _show(contents, findings, seconds, with_data=with_data)
    return {
        **({"path": path} if contents is None else summary_json(contents)),
        "is_whole": not findings.n_problems,
        "with_data": with_data,
        "problems": [each._asdict() for each in findings.problems],
        "n_problems": findings.n_problems,
        "notes": findings.notes,
        "not_verified": [
            {"why": why, "items": n_items, "nbytes": nbytes}
            for why, (n_items, nbytes) in sorted(findings.unverified.items())
        ],
        "verified_nbytes": findings.verified_nbytes,
        "checked_nbytes": findings.checked_nbytes,
        "seconds": seconds,
    }


def _show(contents: Contents | None, findings: Findings, seconds: float, *, with_data: bool) -> None:
    for text in findings.notes:
        Output.note(text)
    for why, (n_items, nbytes) in sorted(findings.unverified.items()):
        Output.note(f"not verified: {size(nbytes)} of {number(n_items, 'item')}: {why}")
    if contents is not None and contents.written_by == "torch":
        Output.note(f"not verified: {METADATA_NAME} has no checksum, it was compared with the files only")
    if findings.n_problems:
        Output.table(("file", "item", "expected", "found"), findings.problems)
        shown = len(findings.problems)
        more = f", of which {shown:,} are shown" if findings.n_problems > shown else ""
        subject = "" if contents is None else f"{contents.path} is "
        Output.note(f"{subject}broken: {number(findings.n_problems, 'problem')}{more}")
    elif not with_data:
        Output.note("structure, sizes and marks are as they should be; data was not read")
    else:
        rate = findings.checked_nbytes / max(seconds, 1e-9)
        start = "no damage found, and not all could be verified" if findings.unverified else "whole"
        Output.note(
            f"{start}: {size(findings.verified_nbytes)} have their checksums; read {size(findings.checked_nbytes)} in "
            f"{seconds:.1f} s, {size(rate)}/s"
        )
