"""What all files of a rank share with an earlier checkpoint, and what the report says about it.

This module pairs the new files with the earlier ones, and closes these at the end. It never compares bytes:
``shared_extents`` does. ``engine`` calls it for a save with ``share_unchanged``.
"""

from __future__ import annotations

from collections.abc import Sequence

from robust_dcp.staging import BlockLease
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts.protocol import FileName
from robust_dcp.storage.writing.earlier_file import open_earlier_files
from robust_dcp.storage.writing.shared_extents import SharedExtents

__all__ = ["Sharing"]


class Sharing:
    """The sharing of one rank in one save.

    Args:
        directory: the directory of the earlier checkpoint, which need not exist.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._files: list[SharedExtents | None] = []
        self._why_not: set[str] = set()

    def begin(
        self, rank: int, files: Sequence[OpenFile], names: Sequence[FileName], mark: str, lease: BlockLease
    ) -> None:
        """Open the earlier files.

        Args:
            files: the new files.
            names: their plain names.
            mark: the mark of the save.
            lease: lends blocks to read into.
        """
        found = open_earlier_files(self._disk, self._directory, rank, names, mark)
        for earlier, file in zip(found, files, strict=True):
            if isinstance(earlier, str):
                self._why_not.add(earlier)
                self._files.append(None)
            else:
                self._files.append(SharedExtents(self._disk, earlier, file, lease))

    def of_file(self, number: int) -> SharedExtents | None:
        """What a new file shares; ``None`` if there is no earlier file for it."""
        return self._files[number]

    @property
    def nbytes(self) -> int:
        """How many bytes all files share."""
        return sum(file.nbytes for file in self._files if file is not None)

    @property
    def how(self) -> tuple[str, ...]:
        """What is shared with which checkpoint, and why not more, in words."""
        files = [file for file in self._files if file is not None]
        why_not = self._why_not | {file.why_not for file in files if file.why_not}
        shares = [f"sharing with {self._directory}"] if self.nbytes else []
        if not self.nbytes and not why_not:
            why_not = {"no unchanged bytes were found there"}
        differing = sum(file.differing_nbytes for file in files)
        if differing:
            why_not.add(
                f"{differing} bytes in it do not fit their checksums, or cannot be read: verify that checkpoint"
            )
        return (*shares, *(f"not sharing with {self._directory}: {why}" for why in sorted(why_not)))

    def close(self) -> None:
        """Close the earlier files."""
        for file in self._files:
            if file is not None:
                file.close()
