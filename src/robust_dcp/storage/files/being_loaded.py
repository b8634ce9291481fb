"""The lock that keeps a checkpoint from being removed while it is loaded.

A load takes a shared lock on ``.metadata``. Before :mod:`robust_dcp.manager` removes a checkpoint, it asks for that
lock for itself. If a load holds it, the checkpoint stays. The lock is on a file that exists anyway, so nothing is
written into a checkpoint, which may be read-only. It ends with the process that holds it. On a file system without
locks a checkpoint can be removed while it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME

__all__ = ["needed_for_a_load", "not_being_loaded"]


@contextmanager
def needed_for_a_load(disk: Disk, directory: str) -> Iterator[None]:
    """Keep a checkpoint from being removed while the block runs. Without locks the block runs anyway."""
    file = None
    with suppress(errors.StorageError):
        file = disk.open_read(os.path.join(directory, METADATA_NAME))
        disk.lock(file, shared=True)
    try:
        yield
    finally:
        if file is not None:
            disk.close(file)


@contextmanager
def not_being_loaded(disk: Disk, directory: str) -> Iterator[bool]:
    """Give ``True`` if no load uses the checkpoint. Then none can take the lock while the block runs.

    Raises:
        StorageError: ``.metadata`` cannot be opened.
    """
    file = disk.open_read(os.path.join(directory, METADATA_NAME))
    try:
        yield disk.lock(file) is not False
    finally:
        disk.close(file)
