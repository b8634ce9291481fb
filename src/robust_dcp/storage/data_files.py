"""The data files of one rank: made under names that nobody has, thrown away if the save fails.

Owns the choice of names (design: no byte of a committed checkpoint is overwritten) and the clean-up after a failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from robust_dcp.errors import StorageError
from robust_dcp.storage.disk import Disk, OpenFile
from robust_dcp.storage.paths import data_file_name

__all__ = ["DataFile", "create_data_files", "discard"]


@dataclass(eq=False)
class DataFile:
    """One open file of a save in progress. ``nbytes`` is its length once it has been written."""

    number: int
    generation: int
    file: OpenFile
    nbytes: int = 0


def create_data_files(disk: Disk, directory: str, rank: int, file_nbytes: Sequence[int]) -> list[DataFile]:
    """Create ``len(file_nbytes)`` files for ``rank``, all of one generation, and reserve their space.

    The generation is 0 in a fresh directory (``__0_0.distcp``); where files of an older save are in the way it is the
    first whose names are all free (``__0_0.1.distcp``). Files are created exclusively, so neither another process nor
    a stale directory listing can make this overwrite anything.

    Raises:
        StorageError: no space, no permission, …; the files made so far are removed.
    """
    generation = 0
    while True:
        files: list[DataFile] = []
        try:
            for number, nbytes in enumerate(file_nbytes):
                path = os.path.join(directory, data_file_name(rank, number, generation))
                files.append(DataFile(number, generation, disk.open_new(path)))
                disk.preallocate(files[-1].file, nbytes)
            return files
        except BaseException as error:
            discard(disk, files)
            if not (isinstance(error, StorageError) and error.errno == errno.EEXIST):
                raise
            generation += 1


def discard(disk: Disk, files: Sequence[DataFile]) -> None:
    """Close and remove the files of a save that failed; what cannot be removed is left for the next commit."""
    for file in files:
        with contextlib.suppress(StorageError):
            disk.close(file.file)
        with contextlib.suppress(StorageError):
            disk.unlink(file.file.path)
