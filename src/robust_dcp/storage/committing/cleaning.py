"""Which files in a checkpoint's directory may be removed, and how.

A file may be removed if the ``.metadata`` that was replaced names it, or if its name has the mark of a save that is
over and no checkpoint needs it. Every other file stays, and the log says so.

If the files of a checkpoint are spread over several mounts, its directory holds a symbolic link of the same name for
each file, so that every reader finds it. The file is removed before the link to it. If we are killed in between, the
next save finds and removes a link without a file, but nobody would find a file without a link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.saving_file import OtherSave, SaveState
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import (
    METADATA_NAME,
    check_relative_path,
    committed_name,
    is_data_file,
    writer_of,
)

__all__ = [
    "LeftOvers",
    "find_left_overs",
    "is_gone",
    "name_left_over",
    "remove_data_files",
    "remove_target",
    "stripe_directories",
    "stripe_of",
]

logger = logging.getLogger(__name__)

_SHOWN: Final = 5
_SHOWN_IN_ERRORS: Final = 20


@dataclass(frozen=True)
class LeftOvers:
    """What saves have left in a directory.

    Attributes:
        by_save: for the file of each save that is over, the names of the files that this save has left.
        others: saves that may still be running.
        other_files: names of files that these may have made.
    """

    by_save: Mapping[str, frozenset[str]] = field(default_factory=dict)
    others: tuple[OtherSave, ...] = ()
    other_files: frozenset[str] = frozenset()

    @property
    def files(self) -> frozenset[str]:
        """The files that all saves that are over have left."""
        return frozenset[str]().union(*self.by_save.values())

    def tell_what_stays(self, directory: str, names: Collection[str]) -> None:
        """Log which of these files stay although they look like files of a checkpoint, and why."""
        data_files = set(filter(is_data_file, names))
        others = data_files & self.other_files
        reasons = []
        if self.others:
            saves = "; ".join(save.description for save in self.others)
            reasons.append(("another save is not known to be over: " + saves, others))
        if data_files - others:
            reason = (
                f"neither the {METADATA_NAME} that was replaced names them nor is it known that robust_dcp made them"
            )
            reasons.append((reason, data_files - others))
        for reason, files in reasons:
            shown = ", ".join(sorted(files)[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
            logger.warning("%s: %d files are kept, as %s: %s", directory, len(files), reason, shown or "none yet")


def find_left_overs(
    names: Sequence[str],
    needed: Collection[str] | None,
    saves: Sequence[OtherSave],
    committed_by: str | None = None,
) -> LeftOvers:
    """Sort out the files in a directory.

    Args:
        names: what lies there.
        needed: the data files of the checkpoint that is committed there; ``None`` if nobody knows which it needs.
        saves: the other saves whose files lie there.
        committed_by: the save that committed it.
    """

    def made_by(save: OtherSave) -> set[str]:
        """The data files of a save, and files that were to be renamed."""
        return {
            name
            for name in names
            if name.endswith(f".{save.mark}.tmp") or ((by := writer_of(name)) is not None and by.mark == save.mark)
        }

    others = tuple(save for save in saves if save.state is not SaveState.OVER)
    other_files = frozenset[str]().union(*map(made_by, others))
    by_save = {}
    for save in saves if needed is not None else ():
        if save.state is SaveState.OVER:
            left = made_by(save)
            if save.record is not None and save.record.save_id == committed_by:
                # It was killed after its commit. Of the files that it replaced, those without a mark may have been
                # written anew by stock.
                replaced = set(save.record.replaces) & set(names)
                left |= {name for name in replaced if (by := writer_of(name)) and by.mark}
            by_save[save.name] = frozenset(left - other_files - set(needed or ()))
    return LeftOvers(by_save, others, other_files)


# How files are removed.


def is_gone(
    remove: Callable[[str], None], path: str, *, harmless: Collection[int] = (errno.ENOENT,), tells: bool = False
) -> bool:
    """Remove ``path`` if that is possible. Returns whether it is gone, or the error is one of the ``harmless`` ones.

    Args:
        tells: whether it is logged if it stays.
    """
    try:
        remove(path)
    except errors.StorageError as error:
        if error.errno in harmless:
            return True
        if tells:
            logger.warning("not removed, which costs space and nothing else: %s", error.message)
        return False
    return True


def remove_data_files(
    disk: Disk, directory: str, files: Iterable[str], *, keep: Collection[str] = (), saved_as: str | None = None
) -> list[str]:
    """Remove files that no committed checkpoint names any more. After a commit, call this only once the commit has
    returned. A file that cannot be removed stays: the checkpoint is right, and only takes more space.

    Args:
        files: relative paths of files of the old checkpoint or of saves that failed.
        keep: relative paths that the committed metadata names. These are never removed.
        saved_as: the path that the directory had when its files were written, if it was renamed.

    Returns:
        The relative paths that are still there.

    Raises:
        UnsafeCheckpoint: a path leads out of the directory.
    """
    left = []
    for name in sorted({check_relative_path(path, file=directory) for path in files} - set(keep)):
        is_target_gone = is_gone(lambda name: remove_target(disk, directory, name, saved_as), name, tells=True)
        if not (is_target_gone and is_gone(disk.unlink, os.path.join(directory, name), tells=True)):
            left.append(name)
    return left


def name_left_over(error: BaseException, paths: Collection[str]) -> None:
    """Add to the error of a failed save which files it has made and could not remove."""
    if not paths:
        return
    named = sorted(set(paths))
    more = f" and {len(named) - _SHOWN_IN_ERRORS} more" if len(named) > _SHOWN_IN_ERRORS else ""
    shown = ", ".join(named[:_SHOWN_IN_ERRORS]) + more
    told = f"what the failed save has made and could not remove: {shown}; the next save into that directory tries again"
    if isinstance(error, errors.RobustCheckpointError):
        error.message = f"{error.message}; {told}"
    else:
        logger.warning("%s", told)


# Files on other mounts.


def stripe_directories(disk: Disk, directory: str, stripe_paths: Sequence[str]) -> list[str]:
    """For each mount, the directory that belongs to the checkpoint in ``directory`` and to no other.

    It has the name of the checkpoint, so that people see whose it is. A hash of the checkpoint's path follows the name.
    So two checkpoints called ``step-100`` get different directories, and a copy of a checkpoint's links does not own
    the files that they lead to.
    """
    return [os.path.join(os.path.abspath(path), _stripe_name(disk, directory)) for path in stripe_paths]


def _stripe_name(disk: Disk, directory: str) -> str:
    path = disk.resolve(directory)
    return f"{os.path.basename(path)}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"


def stripe_of(rank: int, number: int, directories: Sequence[str]) -> str:
    """The directory that takes a file. The directories take turns, and each rank begins at another one."""
    return directories[(rank + number) % len(directories)]


def remove_target(disk: Disk, directory: str, name: str, saved_as: str | None = None) -> None:
    """Remove the file that the link ``name`` in ``directory`` leads to, if it belongs to this checkpoint. The link
    stays.

    Args:
        saved_as: the path that ``directory`` had when the file was written, if it was renamed.

    Raises:
        StorageError: the file cannot be removed, or is gone already.
    """
    if not is_data_file(name):
        return
    path = os.path.join(directory, name)
    target = disk.resolve(path)
    is_ours = os.path.basename(os.path.dirname(target)) == _stripe_name(disk, saved_as or directory)
    if target != path and is_ours and committed_name(os.path.basename(target)) == committed_name(name):
        disk.unlink(target)
        if saved_as is not None:  # the whole checkpoint goes
            with contextlib.suppress(errors.StorageError):  # other files of it are there
                disk.rmdir(os.path.dirname(target))
