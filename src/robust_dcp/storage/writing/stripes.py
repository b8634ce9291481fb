"""Where the data files of a checkpoint lie when they are spread over several mounts.

Owns the directories on those mounts, and which files in them may be removed. The checkpoint's directory holds a
symbolic link of the same name for each file, so that every reader finds it. Called by ``data_files`` and ``writer``.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Sequence

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import committed_name, is_data_file

__all__ = ["remove_targets", "stripe_directories", "stripe_of"]


def stripe_directories(disk: Disk, directory: str, stripe_paths: Sequence[str]) -> list[str]:
    """The directory on each of the mounts that belongs to the checkpoint in ``directory``, and to no other.

    Its name tells people whose it is; what follows the name is a hash of the checkpoint's path, so that two
    checkpoints called ``step-100`` do not meet, and a copy of a checkpoint's links owns none of their targets.
    """
    name = _name(disk, directory)
    return [os.path.join(os.path.abspath(path), name) for path in stripe_paths]


def stripe_of(rank: int, number: int, directories: Sequence[str]) -> str:
    """Which of the directories takes a file: in turn, and each rank begins at another."""
    return directories[(rank + number) % len(directories)]


def remove_targets(disk: Disk, directory: str, names: Iterable[str]) -> list[str]:
    """Remove what the links ``names`` in ``directory`` lead to, if it belongs to this checkpoint; the links stay.

    Targets go before links: a link without a target is found and removed by the next commit, a target without a link
    by nobody.

    Returns:
        those of ``names`` whose targets are still there.
    """
    left = []
    for name in sorted(names):
        if not is_data_file(name):
            continue
        path = os.path.join(directory, name)
        try:
            target = disk.resolve(path)
            is_ours = os.path.basename(os.path.dirname(target)) == _name(disk, directory)
            same_name = committed_name(os.path.basename(target)) == committed_name(name)
            if is_ours and same_name and target != path:
                disk.unlink(target)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                left.append(name)
    return left


def _name(disk: Disk, directory: str) -> str:
    path = disk.resolve(directory)
    return f"{os.path.basename(path)}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
