"""The lock by which a load says that it needs a checkpoint, and by which whoever removes checkpoints asks for that.

A load holds a shared lock on ``.metadata``, which is there anyway: nothing is written into a checkpoint that may be
read-only. The lock ends with the process that holds it. Where a file system has no locks, nobody is held up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME

__all__ = ["needed_for_a_load", "not_being_loaded"]


@contextmanager
def needed_for_a_load(disk: Disk, directory: str) -> Iterator[None]:
    """Keep a checkpoint from being removed by :mod:`robust_dcp.manager`. If that cannot be done, nothing happens."""
    file = None
    with suppress(StorageError):
        file = disk.open_read(os.path.join(directory, METADATA_NAME))
        disk.lock(file, shared=True)
    try:
        yield
    finally:
        if file is not None:
            disk.close(file)


@contextmanager
def not_being_loaded(disk: Disk, directory: str) -> Iterator[bool]:
    """Whether no load needs the checkpoint, nor begins to as long as the block lasts.

    Raises:
        StorageError: ``.metadata`` cannot be opened.
    """
    file = disk.open_read(os.path.join(directory, METADATA_NAME))
    try:
        yield disk.lock(file) is not False
    finally:
        disk.close(file)
