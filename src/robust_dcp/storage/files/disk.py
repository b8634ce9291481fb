"""Every call that touches a file system, behind one small protocol.

Owns how a call is made, completed (short reads and writes) and reported when it fails. Never decides what is written
where. The writer, the commit and the reader call it; tests put a disk behind it that fails or loses unsynced data.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.alignment import Alignment, alignment_of
from robust_dcp.storage.files.mounts import is_of_this_machine
from robust_dcp.storage.files.page_cache import cached_nbytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Disk", "OpenFile", "PosixDisk", "storage_error"]

# One call takes at most IOV_MAX buffers: 1024 on Linux, macOS and the BSDs.
_BUFFERS_PER_CALL: Final = 1024

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_ADVICE: Final = {
    errno.ENOSPC: "the file system is full: free space, or save elsewhere; the last committed checkpoint is untouched",
    errno.EDQUOT: "the quota is used up: free space, or save elsewhere; the last committed checkpoint is untouched",
    errno.EFBIG: "the file would be larger than the file system or `ulimit -f` allows",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EACCES: "check who owns the directory and with which mode",
    errno.EROFS: "the file system is mounted read-only",
    errno.EIO: "the device reported an error: look at the kernel's log, and do not trust this disk",
    errno.ESTALE: "the network file system dropped the file: check its server",
    errno.EEXIST: "the file exists already, and files of a checkpoint are never overwritten",
}


def storage_error(operation: str, path: str, error: OSError) -> StorageError:
    """Describe a failed call: what was done to which path, the system's word for it, and what to do where we know."""
    advice = _ADVICE.get(error.errno or 0)
    message = f"{operation} {path}: {error.strerror or error}"
    if error.errno is not None:
        message += f" ({errno.errorcode.get(error.errno, error.errno)})"
    if advice:
        message += f"; {advice}"
    return StorageError(message, path=path, errno=error.errno, operation=operation)


class OpenFile:
    """An open file: its path (for error messages), its descriptor, how it takes bytes, and whether it was given up.

    ``alignment`` is what direct I/O on it asks for, and ``None`` while its bytes go through the page cache;
    ``why_buffered`` says why they do although direct I/O was asked for.

    ``given_up`` is set by a failed fsync. The kernel may then have dropped the dirty pages and marked them clean, so
    that a second fsync would succeed without the data being on disk: such a file is only closed and written anew.
    """

    __slots__ = ("alignment", "fd", "given_up", "path", "why_buffered")

    def __init__(self, path: str, fd: int, alignment: Alignment | None = None) -> None:
        self.path = path
        self.fd = fd
        self.alignment = alignment
        self.why_buffered = ""
        self.given_up = False

    def __repr__(self) -> str:
        return f"OpenFile({self.path!r}, fd={self.fd})"


class Disk(Protocol):
    """What the storage layer needs of a file system. Every method raises :class:`StorageError` and nothing else.

    Methods may be called from several threads; no two at once on the same byte range of one file.
    """

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        """Create ``path`` for writing; it must not exist. ``direct`` asks for O_DIRECT; where the file system has no
        such thing the file is open all the same, and has no ``alignment``."""

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        """Open an existing regular file for reading; ``direct`` as for :meth:`open_new`. A FIFO, a device or a
        directory is refused at once."""

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        """Go on without O_DIRECT: writes that its ``alignment`` would not allow are allowed from here on."""

    def close(self, file: OpenFile) -> None:
        """Close ``file``; a second close does nothing."""

    def pwrite(self, file: OpenFile, data: Buffer | Sequence[Buffer], offset: int) -> None:
        """Write all of ``data`` (one buffer, or several one after the other) at ``offset`` bytes."""

    def pread_into(self, file: OpenFile, buffer: Buffer | Sequence[Buffer], offset: int) -> int:
        """Fill ``buffer`` (or several, one after the other) from ``offset``; returns the bytes read, which are fewer
        only at the end of the file."""

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        """How many of these bytes need not come from the device, asked without reading them; all of them where the
        system does not tell."""

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        """Reserve space for bytes 0 to ``nbytes``; returns False where the file system cannot. Sets the file's size."""

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        """Set the file's size."""

    def fsync(self, file: OpenFile) -> None:
        """Make the file's bytes durable. If this fails once, the file is given up and every further call fails."""

    def fsync_directory(self, path: str) -> None:
        """Make the names in the directory ``path`` durable: files created, renamed and removed in it."""

    def rename(self, source: str, target: str) -> None:
        """Give ``source`` the name ``target`` in one step, replacing what had it."""

    def link(self, source: str, target: str) -> None:
        """Give the file ``source`` a second name, which must be free; not every file system can."""

    def unlink(self, path: str) -> None:
        """Remove a file or a symbolic link (not its target)."""

    def mkdirs(self, path: str) -> list[str]:
        """Create the directory and its missing parents, durably; one that exists is left as it is.

        Returns:
            the directories that this call made, the outermost first. If it fails, none of them stays.
        """

    def rmdir(self, path: str) -> None:
        """Remove a directory, which must be empty."""

    def symlink(self, target: str, path: str) -> None:
        """Create the symbolic link ``path`` that points to ``target``; ``path`` must not exist."""

    def resolve(self, path: str) -> str:
        """The absolute path with every symbolic link followed; the file itself need not exist."""

    def list_directory(self, path: str) -> list[str]:
        """The sorted names in a directory."""

    def exists(self, path: str) -> bool:
        """Whether ``path`` is there; a symbolic link whose target is missing is not."""

    def size(self, path: str) -> int:
        """The size of a file in bytes."""

    def modified_seconds(self, path: str) -> float:
        """When a file was last written, by the clock of its file system."""

    def fingerprint(self, path: str) -> tuple[int, int, int]:
        """What changes when a file is written or replaced: inode, size and time of the last write, in nanoseconds."""

    def open_lock(self, path: str) -> OpenFile:
        """Open a regular file for reading and writing; it is made if it is not there."""

    def is_at(self, file: OpenFile, path: str) -> bool:
        """Whether ``path`` is a name of the open ``file``."""

    def unlock(self, file: OpenFile) -> None:
        """Let go of what :meth:`lock` has locked, also where a forked process has the file open."""

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        """Lock ``file`` until it is closed or this process ends, without waiting. A lock that is held is exchanged.

        Returns:
            ``True``: it is locked. ``False``: somebody else holds a lock on it. ``None``: there are no locks here.
        """

    def is_of_this_machine(self, path: str) -> bool:
        """Whether no other machine can have files of the file system of ``path`` open."""


class PosixDisk:
    """:class:`Disk` over the operating system's calls. Has no state; interrupted calls are repeated by Python."""

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "create", direct=direct)

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        # Without waiting: to open a FIFO blocks until somebody writes to it.
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
            # After an error the descriptor is gone as well (Linux): closing it again could close another thread's.
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
        if nbytes == 0:
            return True
        fallocate = _fallocate()
        if fallocate is None:
            return False
        while True:
            if fallocate(file.fd, 0, 0, nbytes) == 0:
                return True
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                return False
            raise storage_error("preallocate", file.path, OSError(code, os.strerror(code)))

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        _call("truncate", file.path, os.ftruncate, file.fd, nbytes)

    def fsync(self, file: OpenFile) -> None:
        if file.given_up:
            raise storage_error("fsync", file.path, OSError(errno.EIO, "an earlier fsync of this file failed"))
        try:
            _call("fsync", file.path, os.fsync, file.fd)
        except StorageError:
            file.given_up = True
            raise

    def fsync_directory(self, path: str) -> None:
        directory = _open(path, os.O_RDONLY | os.O_DIRECTORY, "open directory")
        try:
            os.fsync(directory.fd)
        except OSError as error:
            # These say that the file system has no such thing as syncing a directory (some FUSE and CIFS mounts).
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise storage_error("fsync directory", path, error) from error
        finally:
            self.close(directory)

    def rename(self, source: str, target: str) -> None:
        _call("rename", target, os.replace, source, target)

    def link(self, source: str, target: str) -> None:
        _call("link", target, os.link, source, target)

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
                if not os.path.isdir(path):  # else another rank was faster
                    raise storage_error("create directory", path, error) from error
            except OSError as error:
                raise storage_error("create directory", path, error) from error
        elif parent == path or not os.access(parent, os.R_OK):
            return
        # Also where it existed: a process that was killed may have made it and not come to this line.
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
        except OSError as error:  # not being allowed to look is no proof that nothing is there
            raise storage_error("look at", path, error) from error
        return True

    def size(self, path: str) -> int:
        status: os.stat_result = _call("look at", path, os.stat, path)
        return status.st_size

    def modified_seconds(self, path: str) -> float:
        status: os.stat_result = _call("look at", path, os.stat, path)
        return status.st_mtime

    def fingerprint(self, path: str) -> tuple[int, int, int]:
        status: os.stat_result = _call("look at", path, os.stat, path)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def open_lock(self, path: str) -> OpenFile:
        file = _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, "open")
        try:
            _check_regular(file)
        except BaseException:
            self.close(file)
            raise
        return file

    def is_at(self, file: OpenFile, path: str) -> bool:
        try:
            there = os.stat(path)
        except OSError:
            return False
        own: os.stat_result = _call("look at", file.path, os.fstat, file.fd)
        return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)

    def unlock(self, file: OpenFile) -> None:
        _call("unlock", file.path, fcntl.flock, file.fd, fcntl.LOCK_UN)

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        # flock(2): it belongs to the open file, so two saves of one process see each other as those of two do.
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP, EBADF, …: each file system says it in another way
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
        # Not O_DIRECT in open(2): where that is refused, a new file may have been made nevertheless.
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
    """What is left of ``views`` once their first ``nbytes`` are written."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2), or None where the C library has none.

    Not ``os.posix_fallocate``: where the file system cannot, the C library then writes into every block itself, which
    costs as much as the save and fails on a file opened for direct I/O.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function
