"""Disks that are full, that refuse, or that hold up writes. Everything else goes to the real file system.

For example, pass ``RobustWriter(path, disk=FullDisk())`` on one rank. Readers take a disk too.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error

__all__ = ["Acts", "FullDisk", "GatedDisk"]

_DATA = (".distcp", ".safetensors")


class Acts(Disk):
    """Does something right before a call for a path: what another program does meanwhile, or what the disk refuses."""

    def __init__(self, call: str, end: str, act: Callable[[str], object]) -> None:
        super().__init__()
        self.call, self.end, self.act = call, end, act
        self.n_acted = 0

    def _at(self, call: str, path: str) -> None:
        if call == self.call and path.endswith(self.end):
            self.n_acted += 1
            self.act(path)

    def exists(self, path: str) -> bool:
        self._at("exists", path)
        return super().exists(path)

    def list_directory(self, path: str) -> list[str]:
        self._at("list", path)
        return super().list_directory(path)

    def modified_seconds(self, path: str) -> float:
        self._at("modified", path)
        return super().modified_seconds(path)

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        self._at("open", path)
        return super().open_read(path, direct=direct)

    def rename(self, source: str, target: str) -> None:
        self._at("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._at("unlink", path)
        super().unlink(path)


class GatedDisk(Disk):
    """Makes no data file until ``gate`` is set. So the writer does not ask for data before that either.

    Attributes:
        gate: set it to let all files be made.
        limit_seconds: how long a file waits for the gate before it fails the test.
    """

    def __init__(self, *, limit_seconds: float = 60.0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.limit_seconds = limit_seconds

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if path.endswith(_DATA) and not self.gate.wait(self.limit_seconds):
            raise AssertionError(f"nobody has opened the gate of {path} within {self.limit_seconds:g} seconds")
        return super().open_new(path, direct=direct)


class FullDisk(Disk):
    """Has room for some data, and then fails as a full disk does, with ``ENOSPC``.

    Args:
        room_nbytes: how many bytes of data can be written to all files together.
    """

    def __init__(self, room_nbytes: int = 0) -> None:
        super().__init__()
        self.room_nbytes = room_nbytes
        self._lock = threading.Lock()

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        if file.path.endswith(_DATA):
            with self._lock:
                self.room_nbytes -= _nbytes(data)
                is_full = self.room_nbytes < 0
            if is_full:
                raise storage_error("write", file.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        super().pwrite(file, data, offset)


def _nbytes(data: Any) -> int:
    """The number of bytes in one buffer, or in several."""
    return sum(memoryview(each).nbytes for each in data) if isinstance(data, list | tuple) else memoryview(data).nbytes
