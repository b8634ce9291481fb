"""Disks for tests: one that forgets what was not fsynced when it crashes, and one that notes or fails calls.

Never used with real files, but for :meth:`SimulatedDisk.copy_to`, which lets stock readers look at what survived.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.kernel import Alignment

_ALIGNMENT = Alignment(memory=64, offset=512)


class Unsynced(Enum):
    """What a crash leaves of the bytes that were written and not fsynced."""

    LOST = "lost"
    TORN = "torn"  # the file has its length, and zeros from the middle on
    KEPT = "kept"


@dataclass
class _Inode:
    cached: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def after_crash(self, unsynced: Unsynced) -> _Inode:
        survived = self.durable
        if unsynced is Unsynced.KEPT:
            survived = bytes(self.cached)
        elif unsynced is Unsynced.TORN and bytes(self.cached) != self.durable:
            half = len(self.cached) // 2
            survived = bytes(self.cached[:half]).ljust(len(self.cached), b"\0")
        return _Inode(bytearray(survived), survived)


_NameChange = Callable[[dict[str, _Inode]], None]


@dataclass
class _Directory:
    """Names that survive, and the changes to them since the last fsync, in order (as a journal would replay them)."""

    durable: dict[str, _Inode] = field(default_factory=dict)
    pending: list[_NameChange] = field(default_factory=list)

    @property
    def names(self) -> dict[str, _Inode]:
        return self.replayed(len(self.pending))

    def replayed(self, changes: int) -> dict[str, _Inode]:
        names = dict(self.durable)
        for change in self.pending[:changes]:
            change(names)
        return names


class SimulatedDisk(Disk):
    """A :class:`Disk` in memory, with a page cache that a crash loses. Paths are absolute; no symbolic links.

    Args:
        alignment: what direct I/O on it asks for, and is refused without (EINVAL); ``None`` if it has none.
    """

    def __init__(self, alignment: Alignment | None = _ALIGNMENT) -> None:
        self._alignment = alignment
        self._directories: dict[str, _Directory] = {"/": _Directory()}
        self._open: dict[int, _Inode] = {}
        self._locked: set[int] = set()
        self._next_fd = 1000

    def crashes(self) -> Iterator[SimulatedDisk]:
        """Every disk that may be found after losing power now: unsynced bytes lost, torn or kept; unsynced changes of
        names replayed up to any one of them."""
        for unsynced in Unsynced:
            for changes in range(max(len(d.pending) for d in self._directories.values()) + 1):
                disk = SimulatedDisk(self._alignment)
                inodes: dict[int, _Inode] = {}
                for path, directory in self._directories.items():
                    names = directory.replayed(changes)
                    for inode in names.values():
                        inodes.setdefault(id(inode), inode.after_crash(unsynced))
                    disk._directories[path] = _Directory({name: inodes[id(i)] for name, i in names.items()})
                yield disk

    def clone(self) -> SimulatedDisk:
        return deepcopy(self)

    def copy_to(self, directory: str, target: Path) -> None:
        """Write the files of ``directory`` to the real directory ``target``."""
        target.mkdir(parents=True)
        for name, inode in self._directory(directory).names.items():
            (target / name).write_bytes(inode.cached)

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        directory, name = self._split(path)
        if name in directory.names:
            raise self._error("create", path, errno.EEXIST)
        inode = _Inode()
        directory.pending.append(lambda names: names.__setitem__(name, inode))
        file = self._opened(path, inode)
        if direct:
            file.alignment = self._alignment
            file.why_buffered = "" if self._alignment else "it is simulated"
        return file

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        file.alignment, file.why_buffered = None, why

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        return self._opened(path, self._inode(path, "open"))

    def close(self, file: OpenFile) -> None:
        self._open.pop(file.fd, None)
        self._locked.discard(file.fd)
        file.fd = -1

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        cached = self._open[file.fd].cached
        for buffer in data if isinstance(data, (list, tuple)) else [data]:
            view = memoryview(buffer).cast("B")
            self._check_alignment(file, view, offset)
            cached.extend(bytes(max(0, offset + view.nbytes - len(cached))))
            cached[offset : offset + view.nbytes] = view
            offset += view.nbytes

    def _check_alignment(self, file: OpenFile, view: memoryview, offset: int) -> None:
        needed = file.alignment
        if needed is None or view.nbytes == 0:
            return
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        if address % needed.memory or offset % needed.offset or view.nbytes % needed.offset:
            raise self._error("write", file.path, errno.EINVAL)

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        done = 0
        for each in buffer if isinstance(buffer, (list, tuple)) else [buffer]:
            view = memoryview(each).cast("B")
            found = self._open[file.fd].cached[offset + done : offset + done + view.nbytes]
            view[: len(found)] = found
            done += len(found)
        return done

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        return nbytes  # all of it is in memory

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        cached = self._open[file.fd].cached
        cached.extend(bytes(max(0, nbytes - len(cached))))
        return True

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        self.preallocate(file, nbytes)
        del self._open[file.fd].cached[nbytes:]

    def fsync(self, file: OpenFile) -> None:
        inode = self._open[file.fd]
        inode.durable = bytes(inode.cached)

    def fsync_directory(self, path: str) -> None:
        directory = self._directory(path)
        directory.durable, directory.pending = directory.names, []

    def rename(self, source: str, target: str) -> None:
        directory, old = self._split(source)
        self._inode(source, "rename")
        new = posixpath.basename(target)
        directory.pending.append(lambda names: names.__setitem__(new, names.pop(old)))

    def unlink(self, path: str) -> None:
        directory, name = self._split(path)
        self._inode(path, "remove")
        directory.pending.append(lambda names: names.__delitem__(name))

    def mkdirs(self, path: str) -> list[str]:
        if path in self._directories:
            return []
        self._directories[path] = _Directory()
        return [path]

    def rmdir(self, path: str) -> None:
        if self._directory(path).names:
            raise self._error("remove directory", path, errno.ENOTEMPTY)
        del self._directories[path]

    def symlink(self, target: str, path: str) -> None:
        raise self._error("link", path, errno.EPERM)

    def resolve(self, path: str) -> str:
        return posixpath.normpath(path)

    def list_directory(self, path: str) -> list[str]:
        return sorted(self._directory(path).names)

    def exists(self, path: str) -> bool:
        directory = self._directories.get(posixpath.dirname(path))
        return path in self._directories or (directory is not None and posixpath.basename(path) in directory.names)

    def size(self, file: OpenFile) -> int:
        return len(self._open[file.fd].cached)

    def room(self, path: str) -> tuple[int, int]:
        return 0, 1 << 62

    def modified_seconds(self, path: str) -> float:
        self._inode(path, "look at")
        return 0.0

    def fingerprint(self, path: str) -> tuple[int, int, int]:
        inode = self._inode(path, "look at")
        return id(inode), len(inode.cached), hash(bytes(inode.cached))

    def is_at(self, file: OpenFile, path: str) -> bool:
        return self.exists(path) and self._inode(path, "look at") is self._open[file.fd]

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        inode = self._open[file.fd]
        if any(self._open.get(fd) is inode for fd in self._locked - {file.fd}):
            return False
        self._locked.add(file.fd)
        return True

    def is_of_this_machine(self, path: str) -> bool:
        return True

    def _opened(self, path: str, inode: _Inode) -> OpenFile:
        self._next_fd += 1
        self._open[self._next_fd] = inode
        return OpenFile(path, self._next_fd)

    def _inode(self, path: str, operation: str) -> _Inode:
        directory, name = self._split(path)
        if name not in directory.names:
            raise self._error(operation, path, errno.ENOENT)
        return directory.names[name]

    def _split(self, path: str) -> tuple[_Directory, str]:
        return self._directory(posixpath.dirname(path)), posixpath.basename(path)

    def _directory(self, path: str) -> _Directory:
        if path not in self._directories:
            raise self._error("open directory", path, errno.ENOENT)
        return self._directories[path]

    @staticmethod
    def _error(operation: str, path: str, code: int) -> Exception:
        return storage_error(operation, path, OSError(code, os.strerror(code)))


class WatchedDisk:
    """Passes every call on to another disk, and notes it.

    Args:
        disk: does the work.
        fail_at: the number of the call, from 0 on, that raises ``StorageError`` with ``code`` and is not passed on.
        before: called with the number of a call before it is made.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        fail_at: int | None = None,
        code: int = errno.EIO,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._disk = disk
        self._fail_at = fail_at
        self._code = code
        self._before = before
        self.calls: list[tuple[str, str]] = []

    @property
    def operations(self) -> list[str]:
        return [operation for operation, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        if name in (
            "reading",
            "read",
            "read_file",
            "read_end",
            "write_file",
            "replace_file",
        ):  # made of calls that are noted
            return partial(getattr(Disk, name), self)
        method = getattr(self._disk, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            path = args[0].path if isinstance(args[0], OpenFile) else args[0]
            self.calls.append((name, path))
            if self._before is not None:
                self._before(number)
            if number == self._fail_at:
                raise storage_error(name, path, OSError(self._code, os.strerror(self._code)))
            return method(*args, **kwargs)

        return call
