"""The data files of one rank. They get names that nobody else has, and are removed if the save fails.

Each has the mark of its save in its name, such as ``__0_0.5f0c9a3e7b21d846.distcp``. So no byte of another file is ever
overwritten. This module makes the links to files on other mounts (``stripes`` says where those are), and cleans up
after a failure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.cleaning import is_gone, stripe_of
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts import Layout
from robust_dcp.storage.layouts.places import Placements

__all__ = ["DataFile", "create_data_files", "discard", "remove_files_of"]


@dataclass(eq=False)
class DataFile:
    """One open file of a save in progress.

    Attributes:
        number: the number of the file among the rank's files.
        committed_name: its name after the commit, relative to the checkpoint's directory.
        file: the file, open for writing.
        link: the path of the symbolic link to it in the checkpoint's directory; ``None`` if the file itself lies there.
        nbytes: its length once it has been written, without the footer.
        digest: 16 bytes over the checksums of its items.
        how: ``direct``, or ``buffered`` with the reason.
    """

    number: int
    committed_name: str
    file: OpenFile
    link: str | None = None
    nbytes: int = 0
    digest: bytes = b""
    how: str = ""

    @property
    def name(self) -> str:
        """Its current name, relative to the checkpoint's directory."""
        return os.path.basename(self.file.path)

    def note_how(self) -> None:
        """Note for the report how its blocks were written."""
        if self.file.alignment is not None:
            self.how = "direct"
        else:
            self.how = f"buffered: {self.file.why_buffered}" if self.file.why_buffered else "buffered"


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
    """Create the files of ``rank``.

    Each file must be new (``O_EXCL``). So this overwrites nothing, whatever other processes do and however stale a
    directory listing is.

    Args:
        placements: says how many files there are, and of which kind.
        layout: gives their names.
        mark: the mark of the save.
        direct: whether to ask for direct I/O.
        stripes: existing directories that take the files in turn. ``directory`` then gets links to them.
        not_removed: receives the paths of files that were made and could not be removed.

    Raises:
        StorageError: a file cannot be created, for example for lack of permission. The files made so far are removed.
    """
    files: list[DataFile] = []
    try:
        for number, name in enumerate(layout.file_names(rank, placements.head_nbytes, mark)):
            path, link = os.path.join(directory, name.written), None
            if stripes:
                # Make the link first. If we are killed in between, the next save finds and removes a link without a
                # file, but nobody finds a file without a link.
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


def discard(disk: Disk, files: Sequence[DataFile]) -> list[str]:
    """Close and remove the files of a save that failed.

    Returns:
        the paths of those that are still there. A link is removed after its target; if the target stays, so does the
        link.
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
    """Remove whatever a process has made that died while it wrote the files of ``rank``.

    Returns:
        the paths of those that are still there.
    """
    left: list[str] = []
    for number, name in enumerate(layout.file_names(rank, placements.head_nbytes, mark)):
        path = os.path.join(directory, name.written)
        paths = [os.path.join(stripe_of(rank, number, stripes), name.written), path] if stripes else [path]
        while paths and is_gone(disk.unlink, paths[0]):
            del paths[0]
        left += paths
    return left
