"""The commit of one save in its directory, and what follows: the removal of what it replaces, or of what it has made.

:class:`DirectoryClaim` comes before: it announces the save. This module owns the order of the steps after the data
files are written. It never decides when they are made: ``writer`` calls it, for its own rank.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.report_file import REPORT_NAME, SavedReport
from robust_dcp.storage.committing.commit import BEFORE_RENAME, MetadataToPublish, PreparedCommit
from robust_dcp.storage.committing.committed import remember
from robust_dcp.storage.committing.directory_claim import DirectoryClaim
from robust_dcp.storage.committing.earlier_checkpoint import EarlierCheckpoint
from robust_dcp.storage.committing.left_report import NO_INDEX, leave_report
from robust_dcp.storage.committing.leftovers import named_by_ranks, tell_what_stays
from robust_dcp.storage.committing.own_files import OwnFiles, interfered
from robust_dcp.storage.committing.removal import is_gone, name_left_over, remove_data_files
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.nodes_file import NodeOfSave, write_nodes
from robust_dcp.storage.files.paths import INDEX_NAME, NODES_NAME, mark_of, metadata_name
from robust_dcp.storage.layouts import Layout

__all__ = ["SaveDirectory"]

logger = logging.getLogger(__name__)

_FEW_FILES: Final = 64
_CHECK_AGAIN_SECONDS: Final = 1.0


class SaveDirectory:
    """What one rank has found and made in the directory of one save.

    Args:
        disk: the file system.
        path: the checkpoint's directory.
        save_id: the id of the save, which ``.metadata`` will hold.
        layout: the layout of the data files.
        rank: the number of this rank in a save without collectives, where each rank commits ``__{rank}.metadata``. In
            other saves ``None``.

    Attributes:
        claim: what was there, and the announcement of the save.
        own_files: the files that this rank has made.
        may_be_committed: whether ``.metadata`` may have been replaced. From then on nothing is removed unless
            ``withdraw`` is called.
    """

    def __init__(self, disk: Disk, path: str, *, save_id: str, layout: Layout, rank: int | None) -> None:
        self.path = path
        self.claim = DirectoryClaim(disk, path, save_id=save_id, layout=layout, rank=rank)
        self.own_files = OwnFiles(disk, path, save_id)
        self.may_be_committed = False
        self._disk = disk
        self.save_id = save_id
        self._layout = layout
        self._rank = rank
        self._metadata_name = metadata_name(rank)
        self._has_index = False
        self._asked_for_index = False
        self._has_report = False
        self._files: Collection[str] = ()
        self._prepared: PreparedCommit | None = None
        self._nodes: Sequence[NodeOfSave] = ()
        self._checked_at_seconds = -math.inf

    def check_own(self, names: Collection[str]) -> None:
        """Make sure, right before the commit, that nobody has touched files that this rank has written.

        Raises:
            StorageError: somebody has touched one.
        """
        self._checked_at_seconds = time.monotonic()
        self.own_files.check(names)

    def publish(self, metadata: MetadataToPublish, *, are_checked: bool = False) -> None:
        """Commit, durably and in one step. Call :meth:`tidy_up` afterwards.

        It checks the data files of all ranks once more if there are few, or if the last check was long ago: this
        process may have been paused since.

        Args:
            are_checked: whether all ranks have called :meth:`check_own`.

        Raises:
            StorageError: a call failed. :attr:`may_be_committed` says whether the commit may have happened.
        """
        self.prepare(metadata, metadata.files)
        self.finish(metadata, are_checked=are_checked)

    def prepare(self, metadata: MetadataToPublish, files: Collection[str]) -> None:
        """Make everything durable that the commit needs. Readers still see the earlier checkpoint.

        Args:
            files: those data files of the checkpoint that lie in this directory.

        Raises:
            StorageError: a call failed. Nothing is committed.
        """
        journal = self.claim.journal
        if journal is not None and not self._disk.exists(journal.path):
            raise StorageError(
                f"{journal.path} is gone: another save took this one for one that is over, and may have removed files "
                "of it; nothing is committed, save again",
                path=journal.path,
                operation="commit",
            )
        self._files = files
        self.own_files.names |= {*files, *(name.written for name in metadata.renames)}
        if not self._layout.may_share_directory:
            # Readers would take files of a killed save as part of the new checkpoint.
            remove_data_files(self._disk, self.path, self.claim.left_overs.files)
        with self._noting_what_is_committed():
            self._prepared = PreparedCommit.prepare(
                self._disk,
                self.path,
                metadata.fragments,
                name=self._metadata_name,
                renames=metadata.renames,
                token=mark_of(self.save_id),
                index=metadata.index,
            )

    def finish(self, metadata: MetadataToPublish, *, are_checked: bool = False) -> None:
        """Commit what :meth:`prepare` has prepared. The arguments and errors are those of :meth:`publish`."""
        if self._prepared is None or self.claim.earlier is None:
            raise ValueError("a save is announced and its commit prepared before it is finished")
        with self._noting_what_is_committed():
            earlier = self.claim.earlier
            self._has_index = self._prepared.finish(lambda: self._check_before_commit(earlier, are_checked=are_checked))
        self.may_be_committed = True
        self._asked_for_index = bool(metadata.index)
        remember(self._path_of(self._metadata_name), metadata.fragments, metadata.files, self.save_id)

    def _check_before_commit(self, earlier: EarlierCheckpoint, *, are_checked: bool) -> None:
        if not earlier.is_still_committed():
            path = self._path_of(self._metadata_name)
            raise interfered(self.path, f"{path} is not the one that was there at the beginning")
        is_recent = time.monotonic() - self._checked_at_seconds < _CHECK_AGAIN_SECONDS
        if not are_checked or not is_recent or len(self._files) <= _FEW_FILES:
            self.own_files.check(self._files)

    @contextlib.contextmanager
    def _noting_what_is_committed(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            is_before = isinstance(error, StorageError) and error.operation in BEFORE_RENAME
            self.may_be_committed = self.may_be_committed or not is_before
            raise

    def is_one_of_several(self, nodes: Sequence[NodeOfSave]) -> None:
        """Note that nodes commit this save together, each in a directory of its own. Called before the first commits.

        From then on no node alone can tell whether the save is committed: another one may have committed it.
        """
        self.may_be_committed = True
        self._nodes = nodes

    def leave_report(self, make: Callable[[str, tuple[str, ...]], SavedReport]) -> None:
        """After the commit and before :meth:`tidy_up`, leave a report beside the checkpoint. If that fails, it is
        logged.

        Args:
            make: makes the report, from the id of the save and what its commit went without.
        """
        fallbacks = (NO_INDEX,) if self._asked_for_index and not self._has_index else ()
        self._has_report = leave_report(
            self._disk, self.path, mark_of(self.save_id), lambda: make(self.save_id, fallbacks)
        )

    def tidy_up(self) -> None:
        """After the commit, remove the files that it replaces, and the journal. A file that cannot be removed stays,
        and is logged.
        """
        try:
            if self._nodes:
                write_nodes(self._disk, self.path, self.save_id, self._nodes)
            self._tidy_up()
        except Exception as error:  # the checkpoint is committed, so the save has succeeded
            logger.warning("%s is committed, but not tidied up: %s", self.path, error)
            self.claim.release()

    def _tidy_up(self) -> None:
        of_ranks: frozenset[str] | None = frozenset()
        if self._rank is None:
            of_ranks = named_by_ranks(self._disk, self.path, self.claim.names)
        left = self._remove_superseded(of_ranks)
        if self.claim.journal is None:
            return
        # A journal stays while a file that it accounts for could not be removed. The next save tries again.
        for name, files_left in self.claim.left_overs.by_journal.items():
            if files_left.isdisjoint(left):
                self._is_removed(self._path_of(name))
        if self.claim.earlier is None or self.claim.earlier.files.isdisjoint(left):
            self._is_removed(self.claim.journal.path)
        self.claim.release()
        # Without this fsync a power cut could bring the journal back. It would then account for files of this
        # checkpoint, and the next save could remove them.
        self._disk.fsync_directory(self.path)

    def _remove_superseded(self, of_ranks: frozenset[str] | None) -> list[str]:
        """Remove the files that no checkpoint in the directory needs any more. Returns those that are still there.

        Args:
            of_ranks: files that ranks have committed by themselves, which this rank does not judge. ``None`` means that
                nobody knows them, so no data file is removed.
        """
        old: set[str] = set()
        if self.claim.earlier is not None and of_ranks is not None:
            old = self.claim.earlier.removable(self.claim.names)
        superseded = set(old)
        if self._rank is None and of_ranks is not None:
            superseded |= self.claim.left_overs.files
        superseded -= {*(of_ranks or ()), *self._files}
        superseded |= self._superseded_beside()
        left = []
        for name in sorted(superseded):
            # Check right before the removal: DCP's writer may have made a new file of that name.
            if name not in old or self.claim.earlier is None or self.claim.earlier.still_owns(name):
                left += remove_data_files(self._disk, self.path, [name], keep=self._files)
            else:
                superseded.remove(name)
        if self.claim.journal is not None:
            tell_what_stays(
                self.path, self.claim.names, self.claim.left_overs, of_ranks or (), known={*self._files, *superseded}
            )
        return left

    def _superseded_beside(self) -> set[str]:
        """The index, the report and the like of the earlier checkpoint, and what killed saves have left of them."""
        unfinished = {name for name in self.claim.names if name.startswith(f"{NODES_NAME}.")}
        if self._rank is not None:
            return unfinished
        is_new = {INDEX_NAME: self._has_index, REPORT_NAME: self._has_report, NODES_NAME: bool(self._nodes)}
        return unfinished | {name for name in self.claim.names if not is_new.get(name, True)}

    def remove_files(self) -> list[str]:
        """After a save that has failed, remove the files that this rank has made. Returns the paths of those that are
        still there.
        """
        unfinished: set[str] = set()
        if self.claim.journal is not None:
            unfinished = {f"{name}.{mark_of(self.save_id)}.tmp" for name in (self._metadata_name, INDEX_NAME)}
        return self.own_files.remove(unfinished)

    def roll_back(self, error: BaseException) -> None:
        """Remove what all ranks have made. For a coordinator whose commit has failed and that cannot ask the other
        ranks.

        Args:
            error: the error that is about to be raised. Files that stay are named in it.
        """
        left = [] if self.may_be_committed else self.remove_files()
        if left or self.may_be_committed:
            self.claim.release()
        else:
            left = self.claim.give_up()
        name_left_over(error, left)

    def withdraw(self) -> bool:
        """Undo a commit that was not enough, if it has replaced nothing. Afterwards call :meth:`remove_files` on all
        ranks.

        Returns:
            whether nothing is committed any more.

        Raises:
            StorageError: ``.metadata`` cannot be removed.
        """
        has_replaced = self.claim.earlier is not None and self.claim.earlier.committed is not None
        if not self.may_be_committed or has_replaced or self._nodes or self.claim.journal is None:
            return not self.may_be_committed
        # The disk may be full. If this process is killed right after that, no journal accounts for its files.
        with contextlib.suppress(StorageError):
            self.claim.journal.write()
        self._disk.unlink(self._path_of(self._metadata_name))
        self._disk.fsync_directory(self.path)
        self.may_be_committed = False
        self.own_files.names |= {INDEX_NAME, REPORT_NAME}
        return True

    def _is_removed(self, path: str) -> bool:
        return is_gone(self._disk.unlink, path)

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name)
