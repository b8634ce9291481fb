"""The index of a checkpoint, if it has one that fits.

Owns the decision. Called by ``reader`` before a load and by ``plan.stored_plan`` before a save; both go on without an
index that is damaged, and say so.
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
    """The index in ``directory``; ``None`` if there is none, or it belongs to another ``.metadata``.

    Raises:
        DamagedIndex: it is not what was written.
        StorageError: it cannot be read.
    """
    index = _opened(disk, directory)
    if index is None:
        return None
    try:
        fits = fit_of_file(disk, os.path.join(directory, METADATA_NAME)) == index.file.fit
    except StorageError:  # whoever needs the .metadata will say what is wrong with it
        return None
    if not fits:
        logger.info("%s is not used: it belongs to another %s", index.file.path, METADATA_NAME)
    return index if fits else None


def index_called(disk: Disk, directory: str, identity: bytes) -> StoredIndex | None:
    """The very index that another rank has found to fit; ``None`` if it is not what lies in ``directory`` here.

    Raises:
        DamagedIndex, StorageError: as :func:`fitting_index`.
    """
    index = _opened(disk, directory)
    return index if index is not None and index.file.identity == identity else None


def _opened(disk: Disk, directory: str) -> StoredIndex | None:
    path = os.path.join(directory, INDEX_NAME)
    return StoredIndex(IndexFile(disk, path)) if disk.exists(path) else None
