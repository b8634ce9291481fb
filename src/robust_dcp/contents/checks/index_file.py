"""Checks ``.robust_dcp.index``: whether it belongs to its ``.metadata``, and all of its checksums."""

from __future__ import annotations

import os

from robust_dcp.contents.checks.findings import Findings
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index import IndexFile, fit_of_file
from robust_dcp.storage.index.form import SECTIONS

__all__ = ["check_index"]

_READ_NBYTES = 1 << 20


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
        for section in SECTIONS:
            if section == "checksums":  # their own CRC-32 was compared when the file was opened
                continue
            nbytes = index.nbytes(section)
            for start in range(0, nbytes, _READ_NBYTES):
                index.read(section, start, min(start + _READ_NBYTES, nbytes))
    except (CorruptCheckpoint, StorageError) as error:
        found = getattr(error, "found", None) or error.message
        findings.broken(INDEX_NAME, None, "an index as it was written", found)
