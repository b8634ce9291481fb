"""Finds the files that earlier saves have left in a directory, and tells them from files of somebody else.

The rule: a file may be removed if the ``.metadata`` that was replaced names it, or if the journal of a save that is
over accounts for it and it has the mark of that save. Every other file stays, and the log says so. This module removes
nothing itself. ``save_directory`` calls it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.committed import Committed, committed_in
from robust_dcp.storage.committing.journal import OtherSave, SaveState, journals_in
from robust_dcp.storage.committing.left_report import unfinished_report
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, holds_raw_bytes, is_data_file, mark_of, writer_of
from robust_dcp.storage.layouts.marks import is_of_save
from robust_dcp.storage.layouts.safetensors_head import MARK_KEY

__all__ = ["LeftOvers", "find_left_overs", "named_by_ranks", "tell_what_stays"]

logger = logging.getLogger(__name__)

_METADATA_OF_A_RANK: Final = re.compile(r"__\d+\.metadata")
_LOOKED_AT_NBYTES: Final = 4096
_SHOWN: Final = 5


@dataclass(frozen=True)
class LeftOvers:
    """What was found in a directory when a save began.

    Attributes:
        by_journal: for each journal of a robust_dcp save that is over, the names of the files that this save has left.
        others: robust_dcp saves that may still be running.
        other_files: names of files that these may have made.
    """

    by_journal: Mapping[str, frozenset[str]] = field(default_factory=dict)
    others: tuple[OtherSave, ...] = ()
    other_files: frozenset[str] = frozenset()

    @property
    def files(self) -> frozenset[str]:
        """The files that all saves that are over have left."""
        return frozenset[str]().union(*self.by_journal.values())


def find_left_overs(
    disk: Disk,
    directory: str,
    names: Sequence[str],
    committed: Committed | None,
    *,
    now_seconds: float,
    is_locked: bool,
) -> LeftOvers:
    """Sort out the files in a directory.

    Args:
        names: what lies in ``directory``, without the journal of the save that asks.
        committed: the checkpoint that is committed there.
        now_seconds: the time by the clock of the file system.
        is_locked: whether the save that asks holds the lock of the directory.

    Raises:
        StorageError: a call failed.
    """
    found = [_read(disk, directory, name, now_seconds, is_locked) for name in journals_in(names)]
    saves = [save for save in found if save is not None]
    over = [save for save in saves if save.state is SaveState.OVER]
    others = tuple(save for save in saves if save.state is not SaveState.OVER)
    other_files = frozenset[str]().union(*(save.may_have_made(names) for save in others))
    if committed is not None and not committed.is_readable:
        return LeftOvers(others=others, other_files=other_files)
    needed = other_files | (frozenset() if committed is None else committed.files)
    by_journal = {}
    for save in over:
        left: set[str] = set()
        if save.record is not None and committed is not None and save.record.save_id == committed.save_id:
            # That save was killed after its commit, so the files that it replaced are garbage. So is half a report.
            left = {name for name in set(save.record.replaces) & set(names) if _may_be_data(disk, directory, name)}
            left |= {unfinished_report(mark_of(save.record.save_id))} & set(names)
        elif save.record is not None:
            made = save.record.may_have_made(names) - needed
            left = {name for name in made if _is_of(disk, directory, name, save.record.save_id)}
        by_journal[save.name] = frozenset(left - needed)
    return LeftOvers(by_journal, others, other_files)


def _read(disk: Disk, directory: str, name: str, now_seconds: float, is_locked: bool) -> OtherSave | None:
    try:
        return OtherSave.read(disk, directory, name, now_seconds=now_seconds, is_locked=is_locked)
    except StorageError as error:
        if error.errno == errno.ENOENT:  # its save has just ended
            return None
        raise


def _may_be_data(disk: Disk, directory: str, name: str) -> bool:
    """Whether a file may be a data file of a checkpoint, by its first bytes: none yet, zeros, a record, or a shard of
    ours.

    If somebody else has made a file of that name since, it usually begins with other bytes.
    """
    path = os.path.join(directory, name)
    if not disk.exists(path):  # a link to a stripe, and the file on the stripe is gone
        return True
    file = disk.open_read(path)
    try:
        head = bytearray(_LOOKED_AT_NBYTES)
        head = head[: disk.pread_into(file, head, 0)]
    finally:
        disk.close(file)
    if not any(head):
        return True
    if holds_raw_bytes(name):
        return f'"{MARK_KEY}"'.encode() in head
    return head.lstrip(b"\0").startswith(b"PK\x03\x04")  # a gap of zeros may come first


def _is_of(disk: Disk, directory: str, name: str, save_id: str) -> bool:
    """Whether a save has made a file: the mark of the save is in its name or in its content.

    A file gets a plain name only once it is whole. So a file of a plain name without a mark inside belongs to somebody
    else.
    """
    writer = writer_of(name)
    if writer is None or writer.mark:
        return True
    path = os.path.join(directory, name)
    # A link to a file that is gone from its stripe is left to its owner.
    return disk.exists(path) and is_of_save(disk, path, mark_of(save_id))


def named_by_ranks(disk: Disk, directory: str, names: Collection[str]) -> frozenset[str] | None:
    """The data files that ``__{rank}.metadata`` files name. Saves without collectives write such files.

    Their checkpoint stays beside that of ``.metadata``, because readers may want it.

    Returns:
        ``None`` if one of these files cannot be read: nobody knows then what it names.
    """
    files: set[str] = set()
    for name in names:
        if _METADATA_OF_A_RANK.fullmatch(name):
            committed = committed_in(disk, os.path.join(directory, name))
            if committed is not None and not committed.is_readable:
                return None
            files |= frozenset() if committed is None else committed.files
    return frozenset(files)


def tell_what_stays(
    directory: str, names: Collection[str], left_overs: LeftOvers, of_ranks: Collection[str], known: Collection[str]
) -> None:
    """Log which files stay although they look like files of a checkpoint, and why.

    Args:
        names: what was in ``directory`` when the save began.
        of_ranks: the data files that ``__{rank}.metadata`` files name.
        known: files that are not reported, because they were removed or belong to the new checkpoint.
    """
    data_files = {name for name in names if is_data_file(name)} - set(known)
    others = data_files & left_overs.other_files
    if left_overs.others:
        saves = "; ".join(save.description for save in left_overs.others)
        _tell(directory, "another save is not known to be over: " + saves, others)
    beside = data_files & set(of_ranks)
    if beside:
        reason = f"a save without collectives, whose __{{rank}}{METADATA_NAME} files name them, was made there too"
        _tell(directory, reason, beside)
    unknown = data_files - others - beside
    if unknown:
        reason = f"neither the {METADATA_NAME} that was replaced names them nor is it known that robust_dcp made them"
        _tell(directory, reason, unknown)


def _tell(directory: str, reason: str, files: Collection[str]) -> None:
    shown = ", ".join(sorted(files)[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
    logger.warning("%s: %d files are kept, as %s: %s", directory, len(files), reason, shown or "none yet")
