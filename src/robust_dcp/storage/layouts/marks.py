"""Which save a data file belongs to: the mark of a save is in its files, whatever their layout.

This module finds the mark with one short read. The commit calls it to check its files. Readers do not need it: they
find the mark in what they read anyway.
"""

from __future__ import annotations

import re
from typing import Final

from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import holds_raw_bytes
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Tail
from robust_dcp.storage.layouts.safetensors_head import SAVE_KEY

__all__ = ["is_of_save", "read_tail"]

_HEAD_NBYTES: Final = 4096
_MARK: Final = re.compile(rb'"' + re.escape(SAVE_KEY.encode()) + rb'":"([0-9a-f]{16})"')


def is_of_save(disk: Disk, path: str, mark: str) -> bool:
    """Whether the file at ``path`` has been written, to its end, by the save with this mark.

    Raises:
        StorageError: the file cannot be read.
    """
    file = disk.open_read(path)
    try:
        if holds_raw_bytes(path):
            head = bytearray(_HEAD_NBYTES)
            found = _MARK.search(bytes(head[: disk.pread_into(file, head, 0)]))
            return found is not None and found[1] == mark.encode("ascii")
        tail = read_tail(disk, file, disk.size(file))
    finally:
        disk.close(file)
    return tail is not None and tail.mark == mark


def read_tail(disk: Disk, file: OpenFile, file_nbytes: int) -> Tail | None:
    """The tail of an open file of records; ``None`` if it has no tail, or a damaged one."""
    if file_nbytes < TAIL_NBYTES:
        return None
    data = bytearray(TAIL_NBYTES)
    return Tail.decode(bytes(data[: disk.pread_into(file, data, file_nbytes - TAIL_NBYTES)]), file_nbytes)
