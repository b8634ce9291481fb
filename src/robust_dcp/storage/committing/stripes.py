"""The directories on several mounts over which the data files of a checkpoint are spread.

This module names those directories, and knows which files in them may be removed. The checkpoint's directory holds a
symbolic link of the same name for each file, so that every reader finds it. ``data_files``, ``removal`` and ``writer``
call it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence

from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import committed_name, is_data_file

__all__ = ["remove_target", "stripe_directories", "stripe_of"]


def stripe_directories(disk: Disk, directory: str, stripe_paths: Sequence[str]) -> list[str]:
    """For each mount, the directory that belongs to the checkpoint in ``directory`` and to no other.

    It has the name of the checkpoint, so that people see whose it is. A hash of the checkpoint's path follows the name.
    So two checkpoints called ``step-100`` get different directories, and a copy of a checkpoint's links does not own
    the files that they lead to.
    """
    name = _name(disk, directory)
    return [os.path.join(os.path.abspath(path), name) for path in stripe_paths]


def stripe_of(rank: int, number: int, directories: Sequence[str]) -> str:
    """The directory that takes a file. The directories take turns, and each rank begins at another one."""
    return directories[(rank + number) % len(directories)]


def remove_target(disk: Disk, directory: str, name: str, saved_as: str | None = None) -> None:
    """Remove the file that the link ``name`` in ``directory`` leads to, if it belongs to this checkpoint. The link
    stays.

    Args:
        saved_as: the path that ``directory`` had when the file was written, if it was renamed.

    Raises:
        StorageError: the file cannot be removed, or is gone already.
    """
    if not is_data_file(name):
        return
    path = os.path.join(directory, name)
    target = disk.resolve(path)
    is_ours = os.path.basename(os.path.dirname(target)) == _name(disk, saved_as or directory)
    if target != path and is_ours and committed_name(os.path.basename(target)) == committed_name(name):
        disk.unlink(target)
        if saved_as is not None:  # the whole checkpoint goes
            with contextlib.suppress(errors.StorageError):  # other files of it are there
                disk.rmdir(os.path.dirname(target))


def _name(disk: Disk, directory: str) -> str:
    path = disk.resolve(directory)
    return f"{os.path.basename(path)}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
