"""The checksums of all blocks of a data file that lies on a disk, in either layout.

This module finds them in the footer or head. It never compares them with data. ``writing.earlier_file`` calls it.
"""

from __future__ import annotations

import numpy as np

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import Footer, SumColumns
from robust_dcp.storage.layouts.marks import read_tail
from robust_dcp.storage.layouts.read_head import read_head
from robust_dcp.storage.records.block_sums import SUM_NBYTES, block_counts

__all__ = ["stored_sums"]


def stored_sums(disk: Disk, file: OpenFile) -> SumColumns | None:
    """The checksums that an open data file holds, for blocks of ``SUM_NBYTES``; ``None`` if it holds none, or damaged
    ones.

    Raises:
        StorageError: the file cannot be read.
    """
    if holds_raw_bytes(file.path):
        return _sums_in_head(disk, file.path)
    tail = read_tail(disk, file, disk.size(file))
    if tail is None or tail.block_nbytes != SUM_NBYTES:
        return None

    def read(offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        return bytes(buffer[: disk.pread_into(file, buffer, offset)])

    try:
        return Footer(tail, read).columns()
    except ValueError:
        return None


def _sums_in_head(disk: Disk, path: str) -> SumColumns | None:
    try:
        head = read_head(disk, path)
    except CorruptCheckpoint:
        return None
    rows: list[tuple[int, int, list[int]]] = []
    for tensor in head.tensors.values():
        if tensor.crc32 is not None and tensor.nbytes:
            sums = list(tensor.block_crc32s) or [tensor.crc32]
            if len(sums) == block_counts(np.array([tensor.nbytes])).item():  # some files have one for the whole tensor
                rows.append((tensor.offset, tensor.nbytes, sums))
    rows.sort()
    return SumColumns(
        np.array([offset for offset, _, _ in rows], dtype=np.int64),
        np.array([nbytes for _, nbytes, _ in rows], dtype=np.int64),
        np.array([crc for _, _, sums in rows for crc in sums], dtype=np.uint32),
    )
