"""The blocks of a data file whose checksums it holds, in either layout."""

from __future__ import annotations

import numpy as np

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import Int64, UInt32, footer_in
from robust_dcp.storage.layouts.safetensors import read_head


def blocks_in(disk: Disk, file: OpenFile, mark: str) -> tuple[Int64, Int64, UInt32]:
    """Where each block of data begins and ends in an open file, and its CRC-32, in the order of the file.

    Args:
        mark: of the save whose file it is; empty for a file of others, which may have none.

    Raises:
        CorruptCheckpoint: they are damaged, or not there.
    """
    if holds_raw_bytes(file.path):
        tensors = read_head(disk, file.path).tensors.values() if mark else ()
        rows = sorted((at.offset, at.offset + at.nbytes, at.crc32) for at in tensors if at.crc32 is not None)
        begins, ends, crcs = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return begins, ends, crcs.astype(np.uint32)
    footer = footer_in(disk, file)
    if mark and (footer is None or footer.mark != mark):
        raise CorruptCheckpoint.of_file(file.path, f"the footer of the save {mark} at its end", "none")
    try:
        none: Int64 = np.empty(0, dtype=np.int64)
        return (none, none, none.astype(np.uint32)) if footer is None else footer.blocks()
    except ValueError as error:
        raise CorruptCheckpoint.of_file(file.path, "checksums of its blocks as they were saved", str(error)) from error
