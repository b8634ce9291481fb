"""The files that earlier saves have left in a directory, told from files of somebody else.

A file may be removed if the ``.metadata`` that was replaced names it, or if its name has the mark of a save that is
over and no checkpoint needs it. Every other file stays, and the log says so. Nothing is removed here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from robust_dcp.storage.committing.committed import Committed
from robust_dcp.storage.committing.saving_file import OtherSave, SaveState
from robust_dcp.storage.files.paths import METADATA_NAME, is_data_file, writer_of

__all__ = ["LeftOvers", "find_left_overs", "made_by", "tell_what_stays"]

logger = logging.getLogger(__name__)

_SHOWN: Final = 5


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


def made_by(mark: str, names: Collection[str]) -> frozenset[str]:
    """Those of ``names`` that the save with this mark has given: data files, and files that were to be renamed."""
    return frozenset(
        name
        for name in names
        if name.endswith(f".{mark}.tmp") or ((writer := writer_of(name)) is not None and writer.mark == mark)
    )


def find_left_overs(names: Sequence[str], committed: Committed | None, saves: Sequence[OtherSave]) -> LeftOvers:
    """Sort out the files in a directory.

    Args:
        names: what lies there.
        committed: the checkpoint that is committed there.
        saves: the other saves whose files lie there.
    """
    others = tuple(save for save in saves if save.state is not SaveState.OVER)
    other_files = frozenset[str]().union(*(made_by(save.mark, names) for save in others))
    if committed is not None and not committed.is_readable:
        return LeftOvers(others=others, other_files=other_files)
    needed = other_files | (frozenset() if committed is None else committed.files)
    by_save = {}
    for save in saves:
        if save.state is SaveState.OVER:
            left = set(made_by(save.mark, names))
            record = save.record
            if record is not None and committed is not None and record.save_id == committed.save_id:
                # It was killed after its commit. Of the files that it replaced, those without a mark may have been
                # written anew by stock.
                left |= {name for name in set(record.replaces) & set(names) if (by := writer_of(name)) and by.mark}
            by_save[save.name] = frozenset(left - needed)
    return LeftOvers(by_save, others, other_files)


def tell_what_stays(directory: str, names: Collection[str], left_overs: LeftOvers, known: Collection[str]) -> None:
    """Log which files stay although they look like files of a checkpoint, and why.

    Args:
        names: what was in ``directory`` when the save began.
        known: files that are not reported, because they were removed or belong to the new checkpoint.
    """
    data_files = {name for name in names if is_data_file(name)} - set(known)
    others = data_files & left_overs.other_files
    if left_overs.others:
        saves = "; ".join(save.description for save in left_overs.others)
        _tell(directory, "another save is not known to be over: " + saves, others)
    unknown = data_files - others
    if unknown:
        reason = f"neither the {METADATA_NAME} that was replaced names them nor is it known that robust_dcp made them"
        _tell(directory, reason, unknown)


def _tell(directory: str, reason: str, files: Collection[str]) -> None:
    shown = ", ".join(sorted(files)[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
    logger.warning("%s: %d files are kept, as %s: %s", directory, len(files), reason, shown or "none yet")
