"""Checks ``.robust_dcp.index``: whether it belongs to its ``.metadata``, and all of its checksums."""

from __future__ import annotations

import os

from robust_dcp.contents.checks.findings import Findings
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index import IndexFile, fit_of_file

__all__ = ["check_index"]


def check_index(disk: Disk, path: str, findings: Findings) -> None:
    """Add what is wrong with the index of the checkpoint in ``path``, if it has one."""
    if not disk.exists(os.path.join(path, INDEX_NAME)):
        return
    try:
        index = IndexFile(disk, os.path.join(path, INDEX_NAME))
        if index.fit != fit_of_file(disk, os.path.join(path, METADATA_NAME)):
            # A load does without such an index. Another save or tool has written one of the two files.
            findings.broken(INDEX_NAME, None, f"the index of this {METADATA_NAME}", f"one of another {METADATA_NAME}")
            return
        index.check_all()
    except (CorruptCheckpoint, StorageError) as error:
        found = getattr(error, "found", None) or error.message
        findings.broken(INDEX_NAME, None, "an index as it was written", found)
