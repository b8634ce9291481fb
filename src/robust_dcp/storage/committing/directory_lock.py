"""The lock that a save holds on its directory. A second save into it learns who is there, and touches nothing.

This module owns the file ``.robust_dcp.lock``. Its lock ends with the process that holds it, however that ends. On a
file system without locks nobody holds one. On a network file system another machine may seem to hold the lock although
it has crashed. In both cases only the check before the commit (in ``save_directory``) notices a second save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref

import msgspec

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.mounts import boot_id
from robust_dcp.storage.files.paths import LOCK_NAME

__all__ = ["DirectoryLock"]

logger = logging.getLogger(__name__)

_MAX_NBYTES = 4096


class _Holder(msgspec.Struct):
    """What the file holds, for people and for the message to a second save, in JSON."""

    host: str
    pid: int
    save_id: str
    boot_id: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, save {self.save_id}"


class DirectoryLock:
    """The lock of one save; see the module. It is released when the object is dropped.

    Attributes:
        is_proof: whether nobody else can hold the lock. It is ``False`` if the file system has no locks.
    """

    def __init__(self, disk: Disk, path: str, file: OpenFile | None) -> None:
        self.is_proof = file is not None
        self._disk = disk
        self._path = path
        self._finalizer = weakref.finalize(self, _release_in, os.getpid(), disk, path, file)

    @classmethod
    def take(cls, disk: Disk, directory: str, *, save_id: str, shared: bool = False) -> DirectoryLock:
        """Take the lock.

        Args:
            shared: this is one of several ranks that each commit by themselves.

        Raises:
            StorageError: another save holds the lock, or a call failed. Nothing is left behind.
        """
        path = os.path.join(directory, LOCK_NAME)
        while True:
            file = disk.open_lock(path)
            try:
                is_held = disk.lock(file, shared=shared)
            except StorageError:
                is_held = None
            if is_held is False:
                holder = _read_holder(disk, file)
                if disk.is_of_this_machine(path) or holder is None or holder.boot_id == boot_id():
                    raise _lock_is_held(directory, holder)
                logger.warning(
                    "%s: another save is running into it, or its machine crashed (%s). If it is running, one of the "
                    "two will get an error before it commits",
                    directory,
                    holder,
                )
                return cls(disk, path, None)
            if is_held is None:
                disk.close(file)
                with contextlib.suppress(StorageError):
                    disk.unlink(path)
                return cls(disk, path, None)
            try:
                # The last holder may have removed the file between our two calls.
                if disk.is_at(file, path):
                    if not shared:
                        _write_holder(disk, file, save_id)
                    return cls(disk, path, file)
            except BaseException:
                _release(disk, path, file)
                raise
            disk.close(file)

    def release(self) -> None:
        """Give up the lock: the next save may begin."""
        self._finalizer()


def _release_in(pid: int, disk: Disk, path: str, file: OpenFile | None) -> None:
    if os.getpid() == pid:  # a forked child runs this at its end too, and the lock is its parent's
        _release(disk, path, file)


def _release(disk: Disk, path: str, file: OpenFile | None) -> None:
    if file is None:
        return
    try:
        # The last of the ranks that share a lock can get it for itself alone. That rank removes the file.
        if disk.lock(file) and disk.is_at(file, path):
            disk.unlink(path)
    except Exception as error:
        logger.warning("%s stays, which costs nothing: %s", path, error)
    finally:
        with contextlib.suppress(Exception):
            disk.unlock(file)  # a process that was forked meanwhile also has the file open, and would keep the lock
            disk.close(file)


def _write_holder(disk: Disk, file: OpenFile, save_id: str) -> None:
    holder = _Holder(socket.gethostname(), os.getpid(), save_id, boot_id())
    disk.truncate(file, 0)
    disk.pwrite(file, msgspec.json.encode(holder), 0)


def _read_holder(disk: Disk, file: OpenFile) -> _Holder | None:
    """Who holds the lock of ``file``, by its content. This closes ``file``."""
    data = bytearray(_MAX_NBYTES)
    try:
        data = data[: disk.pread_into(file, data, 0)]
    finally:
        disk.close(file)
    try:
        return msgspec.json.decode(data, type=_Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _lock_is_held(directory: str, holder: _Holder | None) -> StorageError:
    """The error for a save that comes second."""
    who = "its process is not known" if holder is None else str(holder)
    return StorageError(
        f"another save is running into {directory} ({who}): wait until it is over or end that process, or save to "
        "another directory; nothing of it has been touched",
        path=directory,
        operation="begin",
    )
