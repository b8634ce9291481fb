"""The directory that a save is made in, from the first look at it until the save has announced itself there.

A save makes the directory, locks it, and writes a journal that names the files which the save may make. From then on
no other save takes its files for left-overs. If the save fails, :meth:`DirectoryClaim.give_up` undoes all of this.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.directory_lock import DirectoryLock
from robust_dcp.storage.committing.earlier_checkpoint import EarlierCheckpoint
from robust_dcp.storage.committing.journal import Journal, await_announced, is_announced, journals_in
from robust_dcp.storage.committing.leftovers import LeftOvers, find_left_overs
from robust_dcp.storage.committing.removal import is_gone
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import SAFETENSORS_SUFFIX, metadata_name
from robust_dcp.storage.layouts import Layout

__all__ = ["DirectoryClaim", "not_one_directory"]

_NOT_OURS_TO_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT})


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


class DirectoryClaim:
    """What one rank has found in the directory of its save, and what it has made there to announce the save.

    Args:
        disk: the file system.
        path: the checkpoint's directory.
        save_id: the id of the save.
        layout: the layout of the data files.
        rank: the number of this rank in a save without collectives, where each rank commits by itself; else ``None``.

    Attributes:
        names: the names in the directory before this save wrote anything.
        earlier: the checkpoint that was there; ``None`` until the directory is locked.
        left_overs: what saves that were killed have left there.
        journal: the journal of this save; ``None`` on ranks that have not announced it.
    """

    def __init__(self, disk: Disk, path: str, *, save_id: str, layout: Layout, rank: int | None) -> None:
        self.names: tuple[str, ...] = ()
        self.earlier: EarlierCheckpoint | None = None
        self.left_overs = LeftOvers()
        self.journal: Journal | None = None
        self._disk = disk
        self._path = path
        self._save_id = save_id
        self._layout = layout
        self._rank = rank
        self._made: list[str] = []
        self._overwrite = True
        self._lock: DirectoryLock | None = None

    def make(self, path: str) -> None:
        """Make a directory that the save needs. It is removed if the save fails."""
        self._made += self._disk.mkdirs(path)

    def begin(self, *, overwrite: bool) -> None:
        """Make the checkpoint's directory and see what is in it. Called before any rank writes.

        Raises:
            StorageError: there is a checkpoint that must not be replaced, or a call to the file system failed.
        """
        self.make(self._path)
        self._overwrite = overwrite
        self._look()

    def _look(self) -> None:
        is_committed = self._disk.exists(os.path.join(self._path, metadata_name(self._rank)))
        if is_committed and not self._overwrite:
            raise StorageError(
                f"Checkpoint already exists in {self._path} and overwrite=False: save to another directory",
                path=self._path,
                operation="begin",
            )
        if is_committed and not self._layout.may_share_directory:
            raise self._cannot_share("a committed checkpoint")
        self.names = tuple(self._disk.list_directory(self._path))

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
        self._lock = DirectoryLock.take(self._disk, self._path, save_id=self._save_id)
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
        if is_announced(self._disk, self._path, self._save_id):
            return False
        self.begin(overwrite=overwrite)
        try:
            journal = self._write_journal(ranks, files)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            await_announced(self._disk, self._path, self._save_id)
            return False
        try:
            self._lock = DirectoryLock.take(self._disk, self._path, save_id=self._save_id)
            self._find_left_overs(journal, is_locked=self._lock.is_proof)
        except BaseException:
            is_gone(self._disk.unlink, journal.path)
            self.journal = None
            self.release()
            raise
        return True

    def _write_journal(self, ranks: int, files: int | None) -> Journal:
        self._look()  # another save may have ended since ``begin``
        self.earlier = EarlierCheckpoint(self._disk, self._path, self._rank)
        self.journal = Journal.begin(
            self._disk,
            self._path,
            save_id=self._save_id,
            layout=self._layout.name,
            ranks=ranks,
            files=files,
            replaces=self.earlier.files & set(self.names),
            present=self.names,
        )
        return self.journal

    def _find_left_overs(self, journal: Journal, *, is_locked: bool) -> None:
        if journals_in(self.names):
            self.left_overs = find_left_overs(
                self._disk,
                self._path,
                self.names,
                None if self.earlier is None else self.earlier.committed,
                now_seconds=self._disk.modified_seconds(journal.path),
                is_locked=is_locked,
            )
        if not self._layout.may_share_directory:
            for name in self.names:
                if name.endswith(SAFETENSORS_SUFFIX) and name not in self.left_overs.files:
                    raise self._cannot_share(name)

    def share(self) -> None:
        """Lock the directory together with other ranks, each of which commits by itself. Called before this rank
        writes.

        Raises:
            StorageError: another save is running into the directory.
        """
        if self._lock is None:
            self._lock = DirectoryLock.take(self._disk, self._path, save_id=self._save_id, shared=True)
            self.earlier = EarlierCheckpoint(self._disk, self._path, self._rank)

    def _cannot_share(self, present: str) -> StorageError:
        """The error for a directory that holds ``present``.

        Readers of safetensors take every file of a directory. So all such files in it must belong to this save.
        """
        return StorageError(
            f"{self._path} holds {present}: readers of safetensors take every file of a directory, so a checkpoint "
            f"with layout={self._layout.name!r} cannot replace another or lie beside other files of theirs, whatever "
            "overwrite says; save to another directory",
            path=self._path,
            operation="begin",
        )

    @property
    def is_announced(self) -> bool:
        return self.journal is not None

    def release(self) -> None:
        """End the save. If it has left files, the journal stays and names them, and the next save removes them."""
        if self._lock is not None:
            self._lock.release()

    def give_up(self) -> list[str]:
        """After a save that has failed, remove the journal and the directories that this rank has made, once no rank
        has files there.

        A directory in which others have put something stays. Returns the paths of what is still there.
        """
        left = []
        if self.journal is not None and not is_gone(self._disk.unlink, self.journal.path):
            left.append(self.journal.path)
        self.release()
        self.journal = None
        left += [path for path in reversed(self._made) if not is_gone(self._disk.rmdir, path, _NOT_OURS_TO_EMPTY)]
        self._made = []
        return left
