"""``robust-dcp verify``: whether a checkpoint is whole, down to its last bit."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from robust_dcp.cli.checkpoint import open_checkpoint, summary, summary_json
from robust_dcp.cli.output import FOUND, CommandFailed, Output, number, size
from robust_dcp.contents.checks.findings import Findings
from robust_dcp.contents.checks.structure import check_structure, unnamed_data_files
from robust_dcp.contents.items import Contents
from robust_dcp.on_demand import errors
from robust_dcp.storage.files.being_loaded import needed_for_a_load
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.files.posix_disk import PosixDisk

__all__ = ["run"]

_MOST_JOBS: Final = 16
_FEWEST_JOBS: Final = 4


def run(path: str, *, jobs: int | None, fast: bool) -> int:
    """Print whether a checkpoint is whole."""
    findings = Findings()
    seconds = 0.0
    contents = _read(path, findings)
    if contents is not None:
        Output.note(summary(contents))
        check_structure(contents, findings)
        for name in unnamed_data_files(contents, sorted(os.listdir(path))):
            findings.note(f"{name} does not belong to this checkpoint: a crashed save may have left it")
        seconds = _verify(contents, findings, jobs or _default_jobs(), with_data=not fast)
    if Output.as_json:
        Output.put(_as_json(path, contents, findings, seconds, with_data=not fast))
    else:
        _show(contents, findings, seconds, with_data=not fast)
    return FOUND if findings.n_problems else 0


def _read(path: str, findings: Findings) -> Contents | None:
    """What the checkpoint holds; ``None`` if its ``.metadata`` is broken."""
    try:
        return open_checkpoint(path)
    except CommandFailed:  # before the next line looks at our errors, which need torch
        raise
    except (errors.CorruptCheckpoint, errors.UnsafeCheckpoint) as error:
        file = os.path.relpath(getattr(error, "file", None) or os.path.join(path, METADATA_NAME), path)
        expected = getattr(error, "expected", None) or "a file of a checkpoint"
        findings.broken(file, None, expected, getattr(error, "found", None) or error.message)
        return None


def _verify(contents: Contents, findings: Findings, jobs: int, *, with_data: bool) -> float:
    """Look at the files. Returns how many seconds that took."""
    # Only here, because it imports torch, and the first line is out.
    from robust_dcp.contents.checks.verify import verify_files

    disk = PosixDisk()
    metadata = os.path.join(contents.path, METADATA_NAME)
    before = disk.fingerprint(metadata) if disk.exists(metadata) else None
    started = time.perf_counter()
    # A manager does not remove a checkpoint that is read.
    with needed_for_a_load(disk, contents.path), Output.progress("verify", contents.file_nbytes) as show:
        verify_files(
            disk,
            contents,
            findings,
            jobs=jobs,
            with_data=with_data,
            on_progress=lambda: show(findings.checked_nbytes),
        )
    if before is not None and (not disk.exists(metadata) or disk.fingerprint(metadata) != before):
        raise CommandFailed(f"{contents.path} was saved to, or removed, while it was verified: run verify again")
    return time.perf_counter() - started


def _default_jobs() -> int:
    return min(_MOST_JOBS, max(_FEWEST_JOBS, len(os.sched_getaffinity(0))))


def _show(contents: Contents | None, findings: Findings, seconds: float, *, with_data: bool) -> None:
    for text in findings.notes:
        Output.note(text)
    for why, n_items, nbytes in findings.unverified:
        Output.note(f"not verified: {size(nbytes)} of {number(n_items, 'item')}: {why}")
    if contents is not None and contents.written_by == "torch":
        Output.note(f"not verified: {METADATA_NAME} has no checksum, it was compared with the files only")
    if findings.n_problems:
        Output.table(("file", "item", "expected", "found"), findings.problems)
        shown = len(findings.problems)
        more = f", of which {shown:,} are shown" if findings.n_problems > shown else ""
        Output.note(f"{_subject(contents)}broken: {number(findings.n_problems, 'problem')}{more}")
        return
    if not with_data:
        Output.note("structure, sizes and marks are as they should be; data was not read")
        return
    rate = findings.checked_nbytes / max(seconds, 1e-9)
    start = "no damage found, and not all could be verified" if findings.unverified_nbytes else "whole"
    Output.note(
        f"{start}: {size(findings.verified_nbytes)} have their checksums; read {size(findings.checked_nbytes)} in "
        f"{seconds:.1f} s, {size(rate)}/s"
    )


def _subject(contents: Contents | None) -> str:
    """The beginning of a line about a checkpoint."""
    return "" if contents is None else f"{contents.path} is "


def _as_json(
    path: str, contents: Contents | None, findings: Findings, seconds: float, *, with_data: bool
) -> dict[str, Any]:
    return {
        **({"path": path} if contents is None else summary_json(contents)),
        "is_whole": not findings.n_problems,
        "with_data": with_data,
        "problems": [each._asdict() for each in findings.problems],
        "n_problems": findings.n_problems,
        "notes": findings.notes,
        "not_verified": [
            {"why": why, "items": n_items, "nbytes": nbytes} for why, n_items, nbytes in findings.unverified
        ],
        "verified_nbytes": findings.verified_nbytes,
        "checked_nbytes": findings.checked_nbytes,
        "seconds": seconds,
    }
