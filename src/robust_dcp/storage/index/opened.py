"""Opens the index of a checkpoint, if there is one that fits its ``.metadata``.

``reader`` calls this before a load, ``plan.cache`` before a save. Both go on without the index if it is damaged,
and log that.
"""

from __future__ import annotations

import logging
import os

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index.fit import fit_of_file
from robust_dcp.storage.index.index_file import IndexFile
from robust_dcp.storage.index.stored_index import StoredIndex

__all__ = ["fitting_index", "index_called"]

logger = logging.getLogger(__name__)


def fitting_index(disk: Disk, directory: str) -> StoredIndex | None:
    """The index in ``directory``; ``None`` if there is none, or if it belongs to another ``.metadata``.

    Raises:
        DamagedIndex: the index is not what was written.
        StorageError: it cannot be read.
    """
    index = _opened(disk, directory)
    if index is None:
        return None
    try:
        fits = fit_of_file(disk, os.path.join(directory, METADATA_NAME)) == index.file.fit
    except StorageError:  # code that needs the .metadata will report what is wrong with it
        return None
    if not fits:
        logger.info("%s is not used: it belongs to another %s", index.file.path, METADATA_NAME)
    return index if fits else None


def index_called(disk: Disk, directory: str, identity: bytes) -> StoredIndex | None:
    """The index that another rank has checked; ``None`` if the file in ``directory`` on this rank is another one.

    Raises:
        DamagedIndex, StorageError: as :func:`fitting_index`.
    """
    index = _opened(disk, directory)
    return index if index is not None and index.file.identity == identity else None


def _opened(disk: Disk, directory: str) -> StoredIndex | None:
    path = os.path.join(directory, INDEX_NAME)
    return StoredIndex(IndexFile(disk, path)) if disk.exists(path) else None
