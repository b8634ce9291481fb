"""The files that one save has made in its directory: whether they are still its own, and their removal if it fails.

Two saves into one directory are possible where nothing locks it, as on some network file systems. So a file counts as
that of a save only while it carries the mark of that save. ``save_directory`` decides when to check and to remove.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.commit import CHECK
from robust_dcp.storage.committing.removal import is_gone, remove_data_files
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import is_data_file, mark_of
from robust_dcp.storage.layouts.marks import is_of_save

__all__ = ["OwnFiles", "interfered"]

_CHECK_THREADS: Final = 8
"""Files are checked by this many threads: a call to a network file system takes about 1 ms, and there may be
thousands.
"""


def interfered(directory: str, what: str) -> StorageError:
    """The error for a save that finds, right before its commit, that another one has written into its directory."""
    return StorageError(
        f"{what}: another save has written into {directory} meanwhile; nothing is committed, and nothing of the other "
        "save is touched. Save again, each job into a directory of its own",
        path=directory,
        operation=CHECK,
    )


class OwnFiles:
    """The files of one save in one directory, as far as this rank knows them.

    Args:
        disk: the file system.
        directory: the checkpoint's directory.
        save_id: the id of the save.

    Attributes:
        names: their names, relative to the directory.
        not_removed: paths of files that this rank made and could not remove. Whoever fails to remove one adds it here.
    """

    def __init__(self, disk: Disk, directory: str, save_id: str) -> None:
        self.names: set[str] = set()
        self.not_removed: list[str] = []
        self._disk = disk
        self._directory = directory
        self._mark = mark_of(save_id)

    def check(self, names: Collection[str]) -> None:
        """Make sure that data files are still as this save has written them.

        Raises:
            StorageError: another save has written to one of them, or removed it.
        """
        if len(names) <= _CHECK_THREADS:
            for name in sorted(names):
                self._check(name)
            return
        with ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="robust_dcp-check") as pool:
            list(pool.map(self._check, sorted(names)))

    def _check(self, name: str) -> None:
        path = self._path_of(name)
        try:
            is_mine = self._has_mark(name)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise interfered(self._directory, f"{path}, which this save has written, is gone") from error
        if not is_mine:
            raise interfered(self._directory, f"{path} is not as this save has written it")

    def among(self, files: Collection[str]) -> frozenset[str]:
        """Those of ``files`` that lie in the directory and were written by this save, on whatever rank.

        Raises:
            StorageError: one of them cannot be read.
        """
        return frozenset(filter(self._has_mark, set(self._disk.list_directory(self._directory)) & set(files)))

    def remove(self, unfinished: Collection[str]) -> list[str]:
        """Remove all of them. Returns the paths of those that are still there.

        Args:
            unfinished: names of files that the commit would have renamed.
        """
        names = {name for name in self.names if self._may_be_removed(name)}.union(unfinished)
        left = [self._path_of(name) for name in remove_data_files(self._disk, self._directory, names)]
        left += [path for path in self.not_removed if not is_gone(self._disk.unlink, path)]
        self.not_removed = []
        return left

    def _may_be_removed(self, name: str) -> bool:
        """Whether the file of this name is still the one that this save has made, and not somebody else's."""
        if not is_data_file(name):
            return True
        try:
            return self._has_mark(name)
        except StorageError:
            return True  # removing it will fail as well, and is reported

    def _has_mark(self, name: str) -> bool:
        return is_of_save(self._disk, self._path_of(name), self._mark)

    def _path_of(self, name: str) -> str:
        return os.path.join(self._directory, name)
