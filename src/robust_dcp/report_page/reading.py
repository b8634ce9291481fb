"""Finds and reads the reports of one checkpoint, or of all checkpoints below a directory.

This module decides which reports are believed. A report is not if its file is torn or forged, or if it belongs to
another save than the ``.metadata`` beside it. Such a report is skipped, with the reason.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from robust_dcp.report import MAX_NBYTES, REPORT_NAME, SavedReport, decode_report, listed

_METADATA_NAME: Final = ".metadata"
_END_NBYTES: Final = 1 << 16
"""The end of ``.metadata`` holds the id of its save."""

_DEPTH: Final = 2
_MOST_REPORTS: Final = 2000


class NoReports(ValueError):
    """There is nothing to show. The message says what was looked for, where, and what to do."""


class FoundReport(NamedTuple):
    """A report that is believed, and the name of its checkpoint: a path relative to what was asked for."""

    name: str
    report: SavedReport


class Skipped(NamedTuple):
    """A checkpoint without a report that could be shown, and why."""

    name: str
    reason: str


class Reports(msgspec.Struct, frozen=True):
    """What was found below ``path``.

    Attributes:
        path: what was asked for.
        found: the reports, the oldest save first.
        skipped: checkpoints whose reports are not among them.
    """

    path: str
    found: tuple[FoundReport, ...]
    skipped: tuple[Skipped, ...] = ()


def read_reports(path: str | os.PathLike[str]) -> Reports:
    """Read the report of a checkpoint, or those of all checkpoints that lie up to two levels below a directory.

    If there are more than 2000, the newest count.

    Raises:
        NoReports: no report can be shown. The message has the reason of each checkpoint that was skipped.
    """
    root = os.path.abspath(os.fsdecode(path))
    found: list[FoundReport] = []
    skipped: list[Skipped] = []
    for directory in _checkpoints(root):
        name = os.path.basename(root) if directory == root else os.path.relpath(directory, root)
        try:
            found.append(FoundReport(name, _read(directory)))
        except ValueError as error:
            skipped.append(Skipped(name, str(error)))
    if not found:
        nothing = f"no checkpoint lies there, or up to {_DEPTH} levels below: pass the directory of one, or of several"
        told = listed((f"{each.name}: {each.reason}" for each in skipped), 5, between="; ") or nothing
        raise NoReports(f"{root} has no report that can be shown. {told}")
    found.sort(key=lambda each: (each.report.saved_at_seconds, each.name))
    skipped += [Skipped(each.name, f"only the newest {_MOST_REPORTS} are shown") for each in found[:-_MOST_REPORTS]]
    return Reports(root, tuple(found[-_MOST_REPORTS:]), tuple(sorted(skipped, key=lambda each: each.name)))


def _checkpoints(root: str) -> Iterator[str]:
    """Directories that hold a checkpoint or a report, without those in such a directory. Of a directory and links to it
    there is one, the directory first."""
    there: set[str] = set()
    for depth in range(_DEPTH + 1):
        below = os.path.join(glob.escape(root), *"*" * depth)
        files = (path for name in (_METADATA_NAME, REPORT_NAME) for path in glob.iglob(os.path.join(below, name)))
        directories = {os.path.dirname(path) for path in files}
        for directory in sorted(directories, key=lambda each: (os.path.islink(each), each)):
            real = os.path.realpath(directory)
            if there.isdisjoint({real, os.path.dirname(real), os.path.dirname(os.path.dirname(real))}):
                there.add(real)
                yield directory


def _read(directory: str) -> SavedReport:
    """The report in ``directory``.

    Raises:
        ValueError: there is none, or it is not believed.
    """
    data = _end_of(os.path.join(directory, REPORT_NAME), MAX_NBYTES + 1, follows=False)
    if data is None:
        raise ValueError(
            "it has no report: another program saved it, or report=False, or the save was killed right after the commit"
        )
    if len(data) > MAX_NBYTES:
        raise ValueError(f"{REPORT_NAME} has more than {MAX_NBYTES} bytes, so it is no report")
    metadata = _end_of(os.path.join(directory, _METADATA_NAME), _END_NBYTES)
    if metadata is None:
        raise ValueError(f"no checkpoint is committed there: it has a report and no {_METADATA_NAME}")
    report = decode_report(data)
    if report.save_id.encode() not in metadata:
        raise ValueError(f"the report in it is of another save ({report.save_id}) than its {_METADATA_NAME}")
    return report


def _end_of(path: str, at_most: int, *, follows: bool = True) -> bytes | None:
    """The last bytes of a regular file; ``None`` if it does not exist. Nothing in it is decoded.

    Args:
        follows: whether the file may be a symbolic link.
    """
    try:
        more_flags = os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | more_flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{os.path.basename(path)} is no regular file")
            file.seek(max(0, status.st_size - at_most))
            return file.read(at_most)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{os.path.basename(path)} cannot be read: {error.strerror}") from None
