"""Real disks that hold up, or refuse, what is written into data files; all else goes through."""

from __future__ import annotations

import threading
from typing import Any

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import OpenFile, PosixDisk

__all__ = ["FullDisk", "GatedDisk"]

_DATA = ".distcp"


class GatedDisk(PosixDisk):
    """Has no file for data until somebody opens the gate, so nobody asks for data before that either."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if path.endswith(_DATA) and not self.gate.wait(timeout=60):
            raise AssertionError("nobody has opened the gate")
        return super().open_new(path, direct=direct)


class FullDisk(PosixDisk):
    """Has no room for data."""

    def pwrite(self, file: Any, data: Any, offset: int) -> None:
        if file.path.endswith(_DATA):
            raise StorageError("there is no space", path=file.path, errno=28, operation="write")
        super().pwrite(file, data, offset)
