"""The data files of one rank: made under names that nobody has, thrown away if the save fails.

Owns the choice of names (design: no byte of a committed checkpoint is overwritten), the links to files on other mounts
(``stripes`` says where), and the clean-up after a failure.

A file is written under a name with the mark of its save, and gets the plain name that stock would give it when it is
whole, if that is free. So nobody who takes the plain name meanwhile, as stock's writer does, writes into our file, nor
do we into theirs.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts import FileName, Layout
from robust_dcp.storage.layouts.marks import is_of_save
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writing.removal import is_gone
from robust_dcp.storage.writing.stripes import stripe_of

__all__ = ["DataFile", "create_data_files", "discard", "remove_files_of", "take_plain_names"]

_CANNOT_LINK: Final = frozenset({errno.EEXIST, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


@dataclass(eq=False)
class DataFile:
    """One open file of a save in progress.

    Attributes:
        number: among the rank's files.
        committed_name: what it is called from the commit on, relative to the checkpoint's directory.
        file: open for writing.
        link: the path of the symbolic link to it in the checkpoint's directory; ``None`` if it lies there itself.
        nbytes: its length once it has been written, without the footer.
        digest: 16 bytes over the checksums of its items; ``None`` without checksums.
    """

    number: int
    committed_name: str
    file: OpenFile
    link: str | None = None
    nbytes: int = 0
    digest: bytes | None = None

    @property
    def name(self) -> str:
        """What it is called now, relative to the checkpoint's directory."""
        return os.path.basename(self.file.path)


def create_data_files(
    disk: Disk,
    directory: str,
    rank: int,
    placements: Placements,
    layout: Layout,
    *,
    mark: str,
    direct: bool = False,
    stripes: Sequence[str] = (),
    not_removed: list[str],
) -> list[DataFile]:
    """Create the files of ``rank``, under names with the mark of the save (``__0_0.5f0c9a3e7b21d846.distcp``).

    They are created exclusively, so neither another process nor a stale directory listing can make this overwrite
    anything.

    Args:
        placements: how many files there are, and of which kind.
        layout: knows their names.
        mark: of the save.
        direct: ask for direct I/O.
        stripes: existing directories that take the files in turn; ``directory`` then gets links to them.
        not_removed: gets the paths of files that were made and could not be removed.

    Raises:
        StorageError: no permission, no space for a name, …; the files made so far are removed.
    """
    files: list[DataFile] = []
    try:
        for number, name in enumerate(layout.file_names(rank, placements.head_nbytes, mark, plain=False)):
            path, link = os.path.join(directory, name.written), None
            if stripes:
                # The link first: killed in between, it is found and removed by the next save, a file without a link by
                # nobody.
                path, link = os.path.join(stripe_of(rank, number, stripes), name.written), path
                disk.symlink(path, link)
            try:
                opened = disk.open_new(path, direct=direct)
            except BaseException:
                if link is not None and not is_gone(disk.unlink, link):
                    not_removed.append(link)
                raise
            files.append(DataFile(number, name.committed, opened, link))
    except BaseException:
        not_removed.extend(discard(disk, files))
        raise
    return files


def take_plain_names(disk: Disk, directory: str, files: Sequence[DataFile], plain: Sequence[FileName]) -> bool:
    """Give files that are whole and closed the plain names of their layout, all of them or none.

    Args:
        plain: of each file.

    Returns:
        whether they have them now. Not if one is taken, or the file system cannot give a file a second name; nor for
        files on other mounts, whose links must be called as they are.

    Raises:
        StorageError: a name cannot be given, or taken back; the files have their marked names.
    """
    renamed = [(file, name) for file, name in zip(files, plain, strict=True) if file.committed_name != name.committed]
    if any(file.link is not None for file in files):
        return False
    taken: list[str] = []
    try:
        for file, name in renamed:
            path = os.path.join(directory, name.committed)
            disk.link(file.file.path, path)
            taken.append(path)
        for file, _ in renamed:
            disk.unlink(file.file.path)
    except StorageError as error:
        for path in taken:
            disk.unlink(path)
        if error.operation == "link" and error.errno in _CANNOT_LINK:
            return False
        raise
    for (file, name), path in zip(renamed, taken, strict=True):
        file.file.path, file.committed_name = path, name.committed
    return True


def discard(disk: Disk, files: Sequence[DataFile]) -> list[str]:
    """Close and remove the files of a save that failed.

    Returns:
        the paths of those that are still there. A link goes after its target, or stays with it.
    """
    left: list[str] = []
    for file in files:
        with contextlib.suppress(StorageError):
            disk.close(file.file)
        paths = [file.file.path] if file.link is None else [file.file.path, file.link]
        while paths and is_gone(disk.unlink, paths[0]):
            del paths[0]
        left += paths
    return left


def remove_files_of(
    disk: Disk,
    directory: str,
    rank: int,
    placements: Placements,
    layout: Layout,
    *,
    mark: str,
    stripes: Sequence[str] = (),
) -> list[str]:
    """Remove what a process has made that died while it wrote the files of ``rank``, whichever of them are there.

    Returns:
        the paths of those that are still there.
    """
    left: list[str] = []
    for number, name in enumerate(layout.file_names(rank, placements.head_nbytes, mark, plain=False)):
        path = os.path.join(directory, name.written)
        paths = [os.path.join(stripe_of(rank, number, stripes), name.written), path] if stripes else [path]
        while paths and is_gone(disk.unlink, paths[0]):
            del paths[0]
        left += paths
    for name in layout.file_names(rank, placements.head_nbytes, mark, plain=True):
        path = os.path.join(directory, name.committed)
        with contextlib.suppress(StorageError):  # it is not there, and may be there again by now
            if is_of_save(disk, path, mark) and not is_gone(disk.unlink, path):
                left.append(path)
    return left
