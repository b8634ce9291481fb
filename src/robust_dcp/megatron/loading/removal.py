"""Removes items from a committed checkpoint (``dist_checkpointing.remove_sharded_tensors``).

Owns the order of the steps: the new ``.metadata`` is durable before any data file is removed. Called by
``load_strategy``.
"""

from __future__ import annotations

import logging
import os

from robust_dcp.storage.committing.cleaning import remove_data_files
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, directory_path
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.metadata.metadata_file import encode_metadata, referenced_files
from robust_dcp.storage.reader import RobustReader

__all__ = ["remove_keys"]

logger = logging.getLogger(__name__)


def remove_keys(checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
    """Remove every item with a key that starts with ``key_prefix``, and the files that hold only such items.

    This selects items by their keys. Stock selects files by their names, and only a save with ``separation_hint``
    makes files with such a prefix. If the process is killed at any time, the checkpoint loads with all items or without
    the removed ones.

    Raises:
        ValueError: ``checkpoint_dir`` is a URL.
        StorageError, CorruptCheckpoint, UnsafeCheckpoint: there is no checkpoint, or it cannot be read or written.
    """
    directory = directory_path(checkpoint_dir)
    reader = RobustReader(directory)
    metadata = reader.source.decode_metadata(reader.source.metadata_bytes())
    before = set(referenced_files(metadata))
    items = metadata.state_dict_metadata
    kept = {key: value for key, value in items.items() if not key.startswith(key_prefix)}
    if len(kept) == len(items):
        logger.warning("no item of %s begins with %r: nothing is removed", directory, key_prefix)
        return
    metadata.state_dict_metadata = kept
    if metadata.planner_data is not None:
        metadata.planner_data = {k: v for k, v in metadata.planner_data.items() if not k.startswith(key_prefix)}
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if not index.fqn.startswith(key_prefix)
    }
    after = set(referenced_files(metadata))
    disk = PosixDisk()
    disk.replace_file(os.path.join(directory, METADATA_NAME), encode_metadata(metadata))
    # The index describes the replaced `.metadata`. Nobody would use or remove it later.
    remove_data_files(disk, directory, (before - after) | {INDEX_NAME}, keep=after)
