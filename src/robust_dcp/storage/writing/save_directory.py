"""The directory of one save, from the first look at it to the commit, or to the clean-up of a save that failed.

This module knows what the save has made: directories, the journal, the data files of this rank, ``.metadata``. It owns
the order in which these are announced, committed, tidied up or removed. It never decides when: ``writer`` calls it, for
its own rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.report_file import REPORT_NAME, SavedReport
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.nodes_file import NodeOfSave, write_nodes
from robust_dcp.storage.files.paths import (
    INDEX_NAME,
    METADATA_NAME,
    NODES_NAME,
    SAFETENSORS_SUFFIX,
    is_data_file,
    mark_of,
    metadata_name,
    writer_of,
)
from robust_dcp.storage.layouts import Layout
from robust_dcp.storage.layouts.marks import is_of_save
from robust_dcp.storage.writing.commit import BEFORE_RENAME, CHECK, MetadataToPublish, PreparedCommit
from robust_dcp.storage.writing.committed import Committed, committed_in, remember
from robust_dcp.storage.writing.directory_lock import DirectoryLock
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.journal import Journal, await_announced, is_announced, journals_in
from robust_dcp.storage.writing.left_report import NO_INDEX, leave_report
from robust_dcp.storage.writing.leftovers import LeftOvers, find_left_overs, named_by_ranks, tell_what_stays
from robust_dcp.storage.writing.removal import is_gone, name_left_over, remove_data_files

__all__ = ["SaveDirectory", "not_one_directory"]

logger = logging.getLogger(__name__)

_NOT_OURS_TO_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT})

_CHECK_THREADS: Final = 8
"""Files are checked by this many threads: a call to a network file system takes about 1 ms, and there may be
thousands.
"""


def not_one_directory(path: str, who: str, what: str) -> StorageError:
    """The error for a save that cannot be made in several directories.

    Args:
        who: a rank that does not see the coordinator's directory.
        what: the kind of save.
    """
    return StorageError(
        f"{path} is not one directory for all ranks: {who} does not see what the coordinator has written there, so "
        f"each node has its own, or one of them lacks a mount. {what} commits on one node only, where the files of the "
        "others are missing; save to a directory that all ranks see, or with robust_dcp.save and layout='torch', which "
        "commit on every node",
        path=path,
        operation="begin",
    )


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
        may_be_committed: whether ``.metadata`` may have been replaced. From then on nothing is removed unless
            ``withdraw`` is called.
    """

    def __init__(self, disk: Disk, path: str, *, save_id: str, layout: Layout, rank: int | None) -> None:
        self.path = path
        self.may_be_committed = False
        self._disk = disk
        self.save_id = save_id
        self._layout = layout
        self._rank = rank
        self._metadata_name = metadata_name(rank)
        self._made: list[str] = []
        self._names: tuple[str, ...] = ()
        self._found = LeftOvers()
        self._overwrite = True
        self._lock: DirectoryLock | None = None
        self._at_begin: Committed | None = None
        self._unmarked: dict[str, tuple[int, int, int] | None] = {}
        self._journal: Journal | None = None
        self._own: set[str] = set()
        self._not_removed: list[str] = []
        self._has_replaced = False
        self._has_index = False
        self._asked_for_index = False
        self._has_report = False
        self._replaced: Committed | None = None
        self._files: Collection[str] = ()
        self._prepared: PreparedCommit | None = None
        self._nodes: Sequence[NodeOfSave] = ()

    def make(self, path: str) -> None:
        """Make a directory that the save needs. It is removed if the save fails."""
        self._made += self._disk.mkdirs(path)

    def begin(self, *, overwrite: bool) -> None:
        """Make the checkpoint's directory and see what is in it. Called before any rank writes.

        Raises:
            StorageError: there is a checkpoint that must not be replaced, or a call to the file system failed.
        """
        self.make(self.path)
        self._overwrite = overwrite
        self._look()

    def _look(self) -> None:
        is_committed = self._disk.exists(os.path.join(self.path, self._metadata_name))
        if is_committed and not self._overwrite:
            raise StorageError(
                f"Checkpoint already exists in {self.path} and overwrite=False: save to another directory",
                path=self.path,
                operation="begin",
            )
        if is_committed and not self._layout.may_share_directory:
            raise self._cannot_share("a committed checkpoint")
        self._names = tuple(self._disk.list_directory(self.path))

    def announce(self, *, ranks: int, files: int | None) -> None:
        """Lock the directory, write the journal durably, and find out what earlier saves have left. Called before any
        rank writes.

        Args:
            ranks: how many ranks write.
            files: how many files each rank may write; ``None`` if that is not known.

        Raises:
            StorageError: another save is running into the directory; it holds files that may not lie beside those of
                the layout; or a call to the file system failed.
        """
        self._lock = DirectoryLock.take(self._disk, self.path, save_id=self.save_id)
        try:
            journal = self._write_journal(ranks, files)
            self._find_left_overs(journal, is_locked=self._lock.is_proof)
        except BaseException:
            self.release()
            raise

    def join(self, *, ranks: int, files: int | None, overwrite: bool) -> bool:
        """Find the announcement of this save in the directory. Called on each other rank before it writes.

        If the announcement is not there, this rank and the coordinator have different directories under the same path.
        Then this rank announces the save in its own. The journal is created with ``O_EXCL``: the server of a network
        file system decides whether it was there already, whatever this machine has in its caches. So a shared directory
        is never taken for another one, and of several ranks on a node exactly one announces.

        Args:
            ranks, files: as for :meth:`announce`.
            overwrite: as for :meth:`begin`.

        Returns:
            whether this rank has announced the save. It then leads the commit in this directory.

        Raises:
            StorageError: as :meth:`begin` and :meth:`announce`.
        """
        if is_announced(self._disk, self.path, self.save_id):
            return False
        self.begin(overwrite=overwrite)
        try:
            journal = self._write_journal(ranks, files)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            await_announced(self._disk, self.path, self.save_id)
            return False
        try:
            self._lock = DirectoryLock.take(self._disk, self.path, save_id=self.save_id)
            self._find_left_overs(journal, is_locked=self._lock.is_proof)
        except BaseException:
            self._is_removed(journal.path)
            self._journal = None
            self.release()
            raise
        return True

    def _write_journal(self, ranks: int, files: int | None) -> Journal:
        self._look()  # another save may have ended since ``begin``
        committed = self._at_begin = self._committed()
        if committed is not None and not committed.are_marked:
            self._unmarked = {name: self._fingerprint(name) for name in committed.files}
        self._journal = Journal.begin(
            self._disk,
            self.path,
            save_id=self.save_id,
            layout=self._layout.name,
            ranks=ranks,
            files=files,
            replaces=set() if committed is None else committed.files & set(self._names),
            present=self._names,
        )
        return self._journal

    def _find_left_overs(self, journal: Journal, *, is_locked: bool) -> None:
        if journals_in(self._names):
            self._found = find_left_overs(
                self._disk,
                self.path,
                self._names,
                self._at_begin,
                now_seconds=self._disk.modified_seconds(journal.path),
                is_locked=is_locked,
            )
        if not self._layout.may_share_directory:
            for name in self._names:
                if name.endswith(SAFETENSORS_SUFFIX) and name not in self._found.files:
                    raise self._cannot_share(name)

    def share(self) -> None:
        """Lock the directory together with other ranks, each of which commits by itself. Called before this rank
        writes.

        Raises:
            StorageError: another save is running into the directory.
        """
        if self._lock is None:
            self._lock = DirectoryLock.take(self._disk, self.path, save_id=self.save_id, shared=True)
            self._at_begin = self._committed()

    def _cannot_share(self, present: str) -> StorageError:
        """The error for a directory that holds ``present``.

        Readers of safetensors take every file of a directory. So all such files in it must belong to this save.
        """
        return StorageError(
            f"{self.path} holds {present}: readers of safetensors take every file of a directory, so a checkpoint with "
            f"layout={self._layout.name!r} cannot replace another or lie beside other files of theirs, whatever "
            "overwrite says; save to another directory",
            path=self.path,
            operation="begin",
        )

    @property
    def is_announced(self) -> bool:
        return self._journal is not None

    def has_written(self, written: WrittenFiles) -> None:
        """Note the data files of this rank."""
        self._own |= {*written.uncommitted_names, *written.names}

    @property
    def not_removed(self) -> list[str]:
        """Paths of files that this rank made and could not remove. Whoever fails to remove one adds it here."""
        return self._not_removed

    def check_own(self, files: Collection[str]) -> None:
        """Make sure, right before the commit, that data files are still as this save has written them.

        Args:
            files: their current names.

        Raises:
            StorageError: another save has written to one of them, or removed it.
        """
        if len(files) <= _CHECK_THREADS:
            for name in sorted(files):
                self._check_own(name)
            return
        with ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="robust_dcp-check") as pool:
            list(pool.map(self._check_own, sorted(files)))

    def _check_own(self, name: str) -> None:
        path = self._path_of(name)
        try:
            is_mine = is_of_save(self._disk, path, mark_of(self.save_id))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise self._interfered(f"{path}, which this save has written, is gone") from error
        if not is_mine:
            raise self._interfered(f"{path} is not as this save has written it")

    def _interfered(self, what: str) -> StorageError:
        return StorageError(
            f"{what}: another save has written into {self.path} meanwhile; nothing is committed, and nothing of the "
            "other save is touched. Save again, each job into a directory of its own",
            path=self.path,
            operation=CHECK,
        )

    def publish(self, metadata: MetadataToPublish, *, is_checked: Callable[[], bool] = lambda: False) -> None:
        """Commit, durably and in one step. Call :meth:`tidy_up` afterwards.

        Args:
            is_checked: called right before the rename. ``True`` means that all data files have just been checked.

        Raises:
            StorageError: a call failed. :attr:`may_be_committed` says whether the commit may have happened.
        """
        self.prepare(metadata, metadata.files)
        self.finish(metadata, is_checked=is_checked)

    def prepare(self, metadata: MetadataToPublish, files: Collection[str]) -> None:
        """Make everything durable that the commit needs. Readers still see the earlier checkpoint.

        Args:
            files: those data files of the checkpoint that lie in this directory.

        Raises:
            StorageError: a call failed. Nothing is committed.
        """
        if self._journal is not None and not self._disk.exists(self._journal.path):
            raise StorageError(
                f"{self._journal.path} is gone: another save took this one for one that is over, and may have removed "
                "files of it; nothing is committed, save again",
                path=self._journal.path,
                operation="commit",
            )
        self._files = files
        self._own |= {*files, *(name.written for name in metadata.renames)}
        if (
            not self._layout.may_share_directory
        ):  # readers would take files of a killed save as part of the new checkpoint
            self._remove(self._found.files)
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

    def finish(self, metadata: MetadataToPublish, *, is_checked: Callable[[], bool] = lambda: False) -> None:
        """Commit what :meth:`prepare` has prepared. The arguments and errors are those of :meth:`publish`."""
        if self._prepared is None:
            raise ValueError("a commit is prepared before it is finished")
        replaced = self._at_begin

        def check() -> None:
            if self._committed() != replaced:
                path = self._path_of(self._metadata_name)
                raise self._interfered(f"{path} is not the one that was there at the beginning")
            if not is_checked():
                self.check_own(self._files)

        with self._noting_what_is_committed():
            self._has_index = self._prepared.finish(check)
        self.may_be_committed = True
        self._asked_for_index = bool(metadata.index)
        self._has_replaced = replaced is not None
        remember(self._path_of(self._metadata_name), metadata.fragments, metadata.files, self.save_id)
        self._replaced = replaced

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

    def files_here(self, files: Collection[str]) -> frozenset[str]:
        """Those of ``files`` that lie in this directory and were written by this save.

        Raises:
            StorageError: one of them cannot be read.
        """
        names = set(self._disk.list_directory(self.path)) & set(files)
        return frozenset(name for name in names if is_of_save(self._disk, self._path_of(name), mark_of(self.save_id)))

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
            self._tidy_up(self._replaced, self._files)
        except Exception as error:  # the checkpoint is committed, so the save has succeeded
            logger.warning("%s is committed, but not tidied up: %s", self.path, error)
            self.release()

    def _committed(self) -> Committed | None:
        return committed_in(self._disk, self._path_of(self._metadata_name))

    def _tidy_up(self, replaced: Committed | None, files: Collection[str]) -> None:
        of_ranks: frozenset[str] | None = frozenset()
        if self._rank is None:
            of_ranks = named_by_ranks(self._disk, self.path, self._names)
        old = self._named_by(replaced) if of_ranks is not None else set()
        superseded = old | self._found.files if of_ranks is not None and self._rank is None else old
        superseded = superseded.difference(of_ranks or (), files)
        new = {INDEX_NAME: self._has_index, REPORT_NAME: self._has_report, NODES_NAME: bool(self._nodes)}
        if self._rank is None:  # those of the checkpoint that was replaced
            superseded |= {name for name, is_new in new.items() if name in self._names and not is_new}
        superseded |= {name for name in self._names if name.startswith(f"{NODES_NAME}.")}  # of a save that was killed
        left = []
        for name in sorted(superseded):
            # Check right before the removal: DCP's writer may have made a new file of that name.
            if name not in old or replaced is None or self._is_still(replaced, name):
                left += self._remove([name], keep=files)
            else:
                superseded.remove(name)
        if self._journal is None:
            return
        tell_what_stays(self.path, self._names, self._found, of_ranks or (), known={*files, *superseded})
        # A journal stays while a file that it accounts for could not be removed. The next save tries again.
        for name, files_left in self._found.by_journal.items():
            if files_left.isdisjoint(left):
                self._is_removed(self._path_of(name))
        if replaced is None or replaced.files.isdisjoint(left):
            self._is_removed(self._journal.path)
        self.release()
        # Without this fsync a power cut could bring the journal back. It would then account for files of this
        # checkpoint, and the next save could remove them.
        self._disk.fsync_directory(self.path)

    def _named_by(self, replaced: Committed | None) -> set[str]:
        """The files that the replaced ``.metadata`` names, if this rank may judge them."""
        files = set() if replaced is None else set(replaced.files)
        if self._rank is None:
            return files
        # A rank that commits by itself does not judge the files of other ranks.
        if METADATA_NAME in self._names:
            return set()
        return {name for name in files if (writer := writer_of(name)) is not None and writer.rank == self._rank}

    def _is_still(self, replaced: Committed, name: str) -> bool:
        """Whether a file is still that of the replaced checkpoint. DCP's writer may have made a new one of the same
        name.
        """
        if self._journal is None:
            return True
        if not replaced.are_marked or replaced.save_id is None:
            return self._unmarked.get(name) == self._fingerprint(name)
        try:
            return is_of_save(self._disk, self._path_of(name), mark_of(replaced.save_id))
        except StorageError as error:
            return error.errno == errno.ENOENT  # a link to a stripe, and the file on the stripe is gone

    def _fingerprint(self, name: str) -> tuple[int, int, int] | None:
        try:
            return self._disk.fingerprint(self._path_of(name))
        except StorageError:
            return None

    # The methods below are for a save that has failed and was not committed.

    def remove_files(self) -> list[str]:
        """Remove the data files that this rank has made. Returns the paths of those that are still there."""
        names = {name for name in self._own if self._is_mine(name)}
        if self._journal is not None:
            names |= {f"{name}.{mark_of(self.save_id)}.tmp" for name in (self._metadata_name, INDEX_NAME)}
        left = [self._path_of(name) for name in self._remove(names)]
        left += [path for path in self._not_removed if not self._is_removed(path)]
        self._not_removed = []
        return left

    def _is_mine(self, name: str) -> bool:
        """Whether the file of this name is still the one that this save has made, and not somebody else's."""
        if not is_data_file(name):
            return True
        try:
            return is_of_save(self._disk, self._path_of(name), mark_of(self.save_id))
        except StorageError:
            return True  # removing it will fail as well, and is reported

    def remove_directories(self) -> list[str]:
        """Remove the journal and the directories that this rank has made, once no rank has files there.

        A directory in which others have put something stays. Returns the paths of what is still there.
        """
        left = []
        if self._journal is not None and not self._is_removed(self._journal.path):
            left.append(self._journal.path)
        self.release()
        self._journal = None
        left += [path for path in reversed(self._made) if not is_gone(self._disk.rmdir, path, _NOT_OURS_TO_EMPTY)]
        self._made = []
        return left

    def release(self) -> None:
        """End the save. If it has left files, the journal stays and names them, and the next save removes them."""
        if self._lock is not None:
            self._lock.release()

    def roll_back(self, error: BaseException) -> None:
        """Remove what all ranks have made. For a coordinator whose commit has failed and that cannot ask the other
        ranks.

        Args:
            error: the error that is about to be raised. Files that stay are named in it.
        """
        left = [] if self.may_be_committed else self.remove_files()
        if left or self.may_be_committed:
            self.release()
        else:
            left = self.remove_directories()
        name_left_over(error, left)

    def withdraw(self) -> bool:
        """Undo a commit that was not enough, if it has replaced nothing. Afterwards call :meth:`remove_files` on all
        ranks.

        Returns:
            whether nothing is committed any more.

        Raises:
            StorageError: ``.metadata`` cannot be removed.
        """
        if not self.may_be_committed or self._has_replaced or self._nodes or self._journal is None:
            return not self.may_be_committed
        with contextlib.suppress(
            StorageError
        ):  # the disk may be full; if we are killed now, no journal accounts for our files
            self._journal.write()
        self._disk.unlink(self._path_of(self._metadata_name))
        self._disk.fsync_directory(self.path)
        self.may_be_committed = False
        self._own |= {INDEX_NAME, REPORT_NAME}
        return True

    def _remove(self, names: Collection[str], keep: Collection[str] = ()) -> list[str]:
        return remove_data_files(self._disk, self.path, names, keep=keep)

    def _is_removed(self, path: str) -> bool:
        return is_gone(self._disk.unlink, path)

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name)
