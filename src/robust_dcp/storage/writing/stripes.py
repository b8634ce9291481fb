"""Where the data files of a checkpoint lie when they are spread over several mounts.

Owns the directories on those mounts, and which files in them may be removed. The checkpoint's directory holds a
symbolic link of the same name for each file, so that every reader finds it. Called by ``data_files``, ``removal`` and
``writer``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import committed_name, is_data_file

__all__ = ["remove_target", "stripe_directories", "stripe_of"]


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


def remove_target(disk: Disk, directory: str, name: str) -> None:
    """Remove what the link ``name`` in ``directory`` leads to, if it belongs to this checkpoint; the link stays.

    Raises:
        StorageError: it cannot be removed, or has gone already.
    """
    if not is_data_file(name):
        return
    path = os.path.join(directory, name)
    target = disk.resolve(path)
    is_ours = os.path.basename(os.path.dirname(target)) == _name(disk, directory)
    if target != path and is_ours and committed_name(os.path.basename(target)) == committed_name(name):
        disk.unlink(target)


def _name(disk: Disk, directory: str) -> str:
    path = disk.resolve(directory)
    return f"{os.path.basename(path)}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
