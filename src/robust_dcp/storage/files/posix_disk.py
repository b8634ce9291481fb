"""The calls to a file system, made by the operating system.

This module completes short reads and writes, and reports failures. It never decides what is written where: the writer,
the commit and the reader call it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.kernel import alignment_of, allocate, cached_nbytes, is_of_this_machine

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PosixDisk"]

# One call takes at most IOV_MAX buffers: 1024 on Linux, macOS and the BSDs.
_BUFFERS_PER_CALL: Final = 1024

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class PosixDisk(Disk):
    """:class:`Disk` by calls to the operating system. It has no state. Python repeats interrupted calls."""

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "create", direct=direct)

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        # O_NONBLOCK, because opening a FIFO blocks until somebody writes to it.
        file = _open(path, os.O_RDONLY | os.O_NONBLOCK, "open")
        try:
            _check_regular(file)
            flags = _call("set flags of", path, fcntl.fcntl, file.fd, fcntl.F_GETFL)
            _call("set flags of", path, fcntl.fcntl, file.fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
            if direct:
                _ask_for_direct(file)
        except BaseException:
            self.close(file)
            raise
        return file

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        flags = _call("set flags of", file.path, fcntl.fcntl, file.fd, fcntl.F_GETFL)
        _call("set flags of", file.path, fcntl.fcntl, file.fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        file.alignment, file.why_buffered = None, why

    def close(self, file: OpenFile) -> None:
        fd, file.fd = file.fd, -1
        if fd >= 0:
            # On Linux the descriptor is gone even after an error. Closing it again could close another thread's file.
            _call("close", file.path, os.close, fd)

    def pwrite(self, file: OpenFile, data: Buffer | Sequence[Buffer], offset: int) -> None:
        pending = _byte_views(data)
        while pending:
            written: int = _call("write", file.path, os.pwritev, file.fd, pending[:_BUFFERS_PER_CALL], offset)
            if written == 0:
                raise storage_error("write", file.path, OSError(errno.EIO, "the system wrote nothing"))
            offset += written
            pending = _after(pending, written)

    def pread_into(self, file: OpenFile, buffer: Buffer | Sequence[Buffer], offset: int) -> int:
        pending = _byte_views(buffer)
        done = 0
        while pending:
            nbytes: int = _call("read", file.path, os.preadv, file.fd, pending[:_BUFFERS_PER_CALL], offset + done)
            if nbytes == 0:
                break
            done += nbytes
            pending = _after(pending, nbytes)
        return done

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        return cached_nbytes(file.fd, offset, nbytes)

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        is_allocated: bool = nbytes == 0 or _call("preallocate", file.path, allocate, file.fd, nbytes)
        return is_allocated

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        _call("truncate", file.path, os.ftruncate, file.fd, nbytes)

    def fsync(self, file: OpenFile) -> None:
        if file.given_up:
            raise storage_error("fsync", file.path, OSError(errno.EIO, "an earlier fsync of this file failed"))
        try:
            _call("fsync", file.path, os.fsync, file.fd)
        except errors.StorageError:
            file.given_up = True
            raise

    def fsync_directory(self, path: str) -> None:
        directory = _open(path, os.O_RDONLY | os.O_DIRECTORY, "open directory")
        try:
            os.fsync(directory.fd)
        except OSError as error:
            # These errors mean that the file system cannot sync a directory (some FUSE and CIFS mounts).
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise storage_error("fsync directory", path, error) from error
        finally:
            self.close(directory)

    def rename(self, source: str, target: str) -> None:
        _call("rename", target, os.replace, source, target)

    def unlink(self, path: str) -> None:
        _call("remove", path, os.unlink, path)

    def mkdirs(self, path: str) -> list[str]:
        made: list[str] = []
        try:
            self._mkdirs(os.path.abspath(path), made)
        except BaseException:
            for directory in reversed(made):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            raise
        return made

    def _mkdirs(self, path: str, made: list[str]) -> None:
        parent = os.path.dirname(path)
        if not os.path.isdir(path):
            if not os.path.isdir(parent):
                self._mkdirs(parent, made)
            try:
                os.mkdir(path)
                made.append(path)
            except FileExistsError as error:
                if not os.path.isdir(path):  # if it is one, another rank was faster
                    raise storage_error("create directory", path, error) from error
            except OSError as error:
                raise storage_error("create directory", path, error) from error
        elif parent == path or not os.access(parent, os.R_OK):
            return
        # Sync even if it existed: a process may have made it and been killed before this line.
        self.fsync_directory(parent)

    def rmdir(self, path: str) -> None:
        _call("remove directory", path, os.rmdir, path)

    def symlink(self, target: str, path: str) -> None:
        _call("link", path, os.symlink, target, path)

    def resolve(self, path: str) -> str:
        resolved: str = _call("resolve", path, os.path.realpath, path)
        return resolved

    def list_directory(self, path: str) -> list[str]:
        return sorted(_call("list", path, os.listdir, path))

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # if we may not look, something may still be there
            raise storage_error("look at", path, error) from error
        return True

    def size(self, file: OpenFile) -> int:
        status: os.stat_result = _call("look at", file.path, os.fstat, file.fd)
        return status.st_size

    def room(self, path: str) -> tuple[int, int]:
        path = os.path.abspath(path)  # a relative one has no parent to look at
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        status: os.stat_result = _call("look at", path, os.stat, path)
        room: os.statvfs_result = _call("look at", path, os.statvfs, path)
        return status.st_dev, room.f_bavail * room.f_frsize if room.f_blocks else sys.maxsize

    def modified_seconds(self, path: str) -> float:
        status: os.stat_result = _call("look at", path, os.stat, path)
        return status.st_mtime

    def fingerprint(self, path: str) -> tuple[int, int, int]:
        status: os.stat_result = _call("look at", path, os.stat, path)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def is_at(self, file: OpenFile, path: str) -> bool:
        try:
            there = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise storage_error("look at", path, error) from error
        own: os.stat_result = _call("look at", file.path, os.fstat, file.fd)
        return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)

    def unlock(self, file: OpenFile) -> None:
        _call("unlock", file.path, fcntl.flock, file.fd, fcntl.LOCK_UN)

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        # A lock by flock(2) belongs to the open file. So two saves of one process see each other's locks, as those of
        # two processes do.
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP, EBADF, …: it depends on the file system
            return None
        return True

    def is_of_this_machine(self, path: str) -> bool:
        return is_of_this_machine(path)


def _call(operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as error:
        raise storage_error(operation, path, error) from error


def _open(path: str, flags: int, operation: str, *, direct: bool = False) -> OpenFile:
    file = OpenFile(path, _call(operation, path, os.open, path, flags | os.O_CLOEXEC, 0o666))
    if direct:
        # O_DIRECT is set after open(2): if open refuses it, a new file may have been made all the same.
        _ask_for_direct(file)
    return file


_KINDS: Final = (
    (stat.S_ISDIR, "a directory", errno.EISDIR),
    (stat.S_ISFIFO, "a FIFO", errno.EINVAL),
    (stat.S_ISCHR, "a character device", errno.EINVAL),
    (stat.S_ISBLK, "a block device", errno.EINVAL),
    (stat.S_ISSOCK, "a socket", errno.EINVAL),
)


def _check_regular(file: OpenFile) -> None:
    mode = _call("look at", file.path, os.fstat, file.fd).st_mode
    for is_kind, name, code in _KINDS:
        if is_kind(mode):
            what = f"it is {name}, and the files of a checkpoint are regular files"
            raise storage_error("open", file.path, OSError(code, what))


def _ask_for_direct(file: OpenFile) -> None:
    if not _O_DIRECT:
        file.why_buffered = "this system has no O_DIRECT"
        return
    try:
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) | _O_DIRECT)
    except OSError as error:
        file.why_buffered = f"the file system refuses O_DIRECT: {error.strerror}"
        return
    file.alignment = alignment_of(file.fd)
    if file.alignment is None:
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~_O_DIRECT)
        file.why_buffered = "the file system has no direct I/O"


def _byte_views(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    buffers: Sequence[Any] = data if isinstance(data, (list, tuple)) else [data]
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    return [view for view in views if view.nbytes]


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The part of ``views`` that is left once their first ``nbytes`` bytes are written."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
