"""The checkpoint that a save replaces: which of its files the save may remove after the commit.

DCP's writer gives its files the same names each time. So a name that the earlier ``.metadata`` holds may belong to a
new file by now, and a file is removed only if it is still the earlier one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection

from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.committed import Committed, committed_in
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, mark_of, metadata_name, writer_of
from robust_dcp.storage.layouts.marks import is_of_save

__all__ = ["EarlierCheckpoint"]


class EarlierCheckpoint:
    """What was committed in a directory when a save began.

    Args:
        disk: the file system.
        directory: the checkpoint's directory.
        rank: the number of a rank that commits by itself; ``None`` in a save with one ``.metadata``.

    Attributes:
        committed: what its ``.metadata`` says; ``None`` if there was no checkpoint.

    Raises:
        StorageError: its ``.metadata`` cannot be read.
    """

    def __init__(self, disk: Disk, directory: str, rank: int | None) -> None:
        self._disk = disk
        self._directory = directory
        self._rank = rank
        self.committed = self._read()
        self._unmarked: dict[str, tuple[int, int, int] | None] = {}
        if self.committed is not None and not self.committed.are_marked:
            self._unmarked = {name: self._fingerprint(name) for name in self.committed.files}

    def _read(self) -> Committed | None:
        return committed_in(self._disk, os.path.join(self._directory, metadata_name(self._rank)))

    @property
    def files(self) -> frozenset[str]:
        """The data files that its ``.metadata`` names."""
        return frozenset() if self.committed is None else self.committed.files

    def is_still_committed(self) -> bool:
        """Whether nobody has committed anything since.

        Raises:
            StorageError: ``.metadata`` cannot be read.
        """
        return self._read() == self.committed

    def removable(self, present: Collection[str]) -> set[str]:
        """Those of its files that this rank may remove after its own commit.

        Args:
            present: the names that were in the directory when the save began.
        """
        if self._rank is None:
            return set(self.files)
        # A rank that commits by itself does not judge the files of other ranks.
        if METADATA_NAME in present:
            return set()
        return {name for name in self.files if (writer := writer_of(name)) is not None and writer.rank == self._rank}

    def still_owns(self, name: str) -> bool:
        """Whether the file of this name is still that of this checkpoint."""
        if self.committed is None:
            return False
        if not self.committed.are_marked or self.committed.save_id is None:
            return self._unmarked.get(name) == self._fingerprint(name)
        try:
            return is_of_save(self._disk, os.path.join(self._directory, name), mark_of(self.committed.save_id))
        except StorageError as error:
            return error.errno == errno.ENOENT  # a link to a stripe, and the file on the stripe is gone

    def _fingerprint(self, name: str) -> tuple[int, int, int] | None:
        try:
            return self._disk.fingerprint(os.path.join(self._directory, name))
        except StorageError:
            return None
