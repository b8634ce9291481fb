"""Every call to a file system that the storage layer makes.

This module completes short reads and writes, and reports failures. It never decides what is written where.
``storage.remote`` has a disk that reads from a store. Tests use disks that fail, or lose data that was not synced.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from robust_dcp import errors
from robust_dcp.storage.files.kernel import Alignment, alignment_of, allocate, cached_nbytes, is_of_this_machine

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

# One call takes at most IOV_MAX buffers: 1024 on Linux, macOS and the BSDs.
_BUFFERS_PER_CALL: Final = 1024

_HASHED_NBYTES: Final = 1 << 20

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
    errno.EEXIST: "a file of that name is there already, and no save overwrites it: save to another directory",
}


Fingerprint = tuple[int, int, int]
"""Inode, size, and time of the last write in nanoseconds: one at least changes when a file is written or replaced."""


def storage_error(operation: str, path: str, error: OSError) -> errors.StorageError:
    """The error for a failed call: the operation, the path, what the system says, and what to do if we know that."""
    advice = _ADVICE.get(error.errno or 0)
    if isinstance(error, FileExistsError) and not os.path.exists(path):
        advice = "it is a symbolic link to nothing: mount or make what it points to, or remove the link"
    message = f"{operation} {path}: {error.strerror or error}"
    if error.errno is not None:
        message += f" ({errno.errorcode.get(error.errno, error.errno)})"
    if advice:
        message += f"; {advice}"
    return errors.StorageError(message, path=path, errno=error.errno, operation=operation)


class OpenFile(msgspec.Struct, eq=False, weakref=True):
    """An open file: its path (for error messages), its descriptor, its alignment, whether it was given up, and which
    process has locked it.

    ``alignment`` is what direct I/O on the file needs. It is ``None`` while bytes go through the page cache;
    ``why_buffered`` says why, if direct I/O was asked for, and ``must_be_direct`` that this is not allowed.

    ``nbytes`` is its size when it was opened for reading. At its path there may be another file meanwhile.

    ``given_up`` is set by a failed fsync. The kernel may then have dropped the dirty pages and marked them clean. A
    second fsync would succeed although the data is not on disk. So such a file is only closed, and written anew.
    """

    path: str
    fd: int
    alignment: Alignment | None = None
    why_buffered: str = ""
    must_be_direct: bool = False
    given_up: bool = False
    locked_by: int = 0
    nbytes: int = 0


def free_nbytes(room: os.statvfs_result) -> int:
    """How many bytes of a file system are free for this process. Root may fill the blocks that are reserved, too."""
    return (room.f_bfree if os.geteuid() == 0 else room.f_bavail) * room.f_frsize


_LOCKED: Final = weakref.WeakSet[OpenFile]()
"""The files that this process has locked."""


def _close_in_child() -> None:
    """A lock lasts as long as a process has the open file. A child that was forked, such as a worker of a DataLoader,
    must not keep it after this process was killed: the next save would wait for one that is over."""
    for file in list(_LOCKED):
        fd, file.fd = file.fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)  # which releases nothing while the parent has it
    _LOCKED.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Disk:
    """The calls to a file system that the storage layer needs, made by the operating system. It has no state. Every
    method raises :class:`StorageError` and nothing else.

    Several threads may call methods at once, but not on the same byte range of one file.
    """

    # Whole calls, made of those below.

    @contextmanager
    def reading(self, path: str, *, flags: int = os.O_RDONLY) -> Iterator[OpenFile]:
        """The file at ``path``, open for reading in the block."""
        file = self.open_read(path, flags=flags)
        try:
            yield file
        finally:
            self.close(file)

    def read(self, file: OpenFile, offset: int, nbytes: int) -> bytes:
        """These bytes of a file; fewer only at its end."""
        try:
            buffer = bytearray(nbytes)
            return bytes(memoryview(buffer)[: self.pread_into(file, buffer, offset)]) if nbytes else b""
        except MemoryError as error:
            raise storage_error("read", file.path, OSError(errno.ENOMEM, f"no memory for {nbytes} bytes")) from error

    def read_file(self, path: str, at_most: int | None = None, *, begins: bytes = b"") -> bytes | None:
        """The bytes of the file at ``path``; ``None`` if there is none. No memory is taken for a file that is too long.

        Args:
            begins: what it has to begin with. Of any other file only so many bytes are read.

        Raises:
            CorruptCheckpoint: it has more than ``at_most`` bytes.
        """
        try:
            with self.reading(path) as file:
                nbytes, head = file.nbytes, self.read(file, 0, len(begins))
                if head != begins:
                    return head
                if at_most is None or nbytes <= at_most:
                    return self.read(file, 0, nbytes)
        except errors.StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None
        raise errors.CorruptCheckpoint.of_file(path, f"at most {at_most} bytes", f"{nbytes} bytes")

    def read_end(self, path: str, at_most: int) -> tuple[int, bytes]:
        """(the length of the file at ``path``, its last ``at_most`` bytes)."""
        with self.reading(path) as file:
            length = min(at_most, file.nbytes)
            return file.nbytes, self.read(file, file.nbytes - length, length)

    def hashes_of(
        self, paths: Mapping[str, str], check_stop: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None
    ) -> dict[str, str]:
        """The SHA-256 of files, in hex, by name.

        Args:
            paths: by name.
            check_stop: called between blocks with how many bytes are hashed, and how many there are.
        """
        total_nbytes = sum(self.read_end(path, 0)[0] for path in paths.values())
        hashes, done_nbytes, buffer = dict[str, str](), 0, memoryview(bytearray(_HASHED_NBYTES))
        for name, path in paths.items():
            digest = hashlib.sha256()
            with self.reading(path) as file:
                for offset in range(0, file.nbytes, _HASHED_NBYTES):
                    n_read = self.pread_into(file, buffer[: file.nbytes - offset], offset)
                    digest.update(buffer[:n_read])
                    done_nbytes += n_read
                    check_stop(done_nbytes, total_nbytes)
            hashes[name] = digest.hexdigest()
        return hashes

    def write_file(self, path: str, data: Buffer | Sequence[Buffer], *, durable: bool = True) -> Fingerprint:
        """Make a new file with these bytes; ``durable``: wait until the device has them. After an error the file may be
        there, and the caller removes it.

        Returns:
            its :meth:`fingerprint`.
        """
        return self._write(self.open_new(path), ((0, data),), durable=durable)

    def write_parts(self, path: str, parts: Sequence[tuple[int, Buffer]]) -> Fingerprint:
        """Write parts of a file, each at its offset in bytes, and wait until the device has them. Others may write
        other parts meanwhile: who comes first makes the file.

        Returns:
            its :meth:`fingerprint`.
        """
        return self._write(_open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, "create"), parts, durable=True)

    def _write(
        self, file: OpenFile, parts: Sequence[tuple[int, Buffer | Sequence[Buffer]]], *, durable: bool
    ) -> Fingerprint:
        try:
            for offset, data in parts:
                self.pwrite(file, data, offset)
            if durable:
                self.fsync(file)
            status = _call("look at", file.path, os.fstat, file.fd)
            return status.st_ino, status.st_size, status.st_mtime_ns
        finally:
            self.close(file)

    def replace_file(self, path: str, data: Buffer, *, mark: str | None = None, durable: bool = True) -> None:
        """Put a file at ``path``, over an old one: wholly or not at all. After an error either file may be found later.

        Args:
            mark: of the save that does it, which is in the name that the file has at first.
            durable: wait until the device has it.
        """
        temporary = f"{path}.{mark or secrets.token_hex(8)}.tmp"
        try:
            self.write_file(temporary, data, durable=durable)
            self.rename(temporary, path)
        except BaseException:
            with suppress(errors.StorageError):
                self.unlink(temporary)
            raise
        if durable:
            self.fsync_directory(os.path.dirname(path))

    def write_pages(self, file: OpenFile, data: Buffer | Sequence[Buffer], offset: int) -> None:
        """Write whole pages. Some file systems have O_DIRECT and refuse such a write. Then the file goes on through the
        page cache, unless it must be direct.
        """
        was_direct = file.alignment is not None
        try:
            self.pwrite(file, data, offset)
        except errors.StorageError as error:
            # A short direct write that ended within a block gives this error, too, because its rest is not aligned.
            if error.errno != errno.EINVAL or not was_direct or file.must_be_direct:
                raise
            if file.alignment is not None:  # else another thread has found that, too; to do it twice harms nobody
                self.use_page_cache(file, f"a direct write was refused: {error.message}")
            self.pwrite(file, data, offset)

    # Each of these is one call to the system, or nearly so.

    def open_new(self, path: str, *, direct: bool | None = False) -> OpenFile:
        """Create ``path`` for writing; it must not exist.

        Args:
            direct: ``None`` asks for O_DIRECT. If the file system does not have it, the file is opened all the same and
                has no ``alignment``. With ``True`` that is an error.
        """
        file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "create")
        try:
            if direct is not False:
                # Set after open(2): if open refuses O_DIRECT, a new file may have been made all the same.
                _ask_for_direct(file, "create", must=direct is True)
        except BaseException:
            self.close(file)
            with suppress(errors.StorageError):
                self.unlink(path)
            raise
        return file

    def open_read(self, path: str, *, direct: bool | None = False, flags: int = os.O_RDONLY) -> OpenFile:
        """Open an existing regular file for reading; ``direct`` as for :meth:`open_new`.

        A FIFO, a device or a directory is refused without waiting.
        """
        # O_NONBLOCK, because opening a FIFO blocks until somebody writes to it.
        file = _open(path, flags | os.O_NONBLOCK, "open")
        try:
            status = _call("look at", path, os.fstat, file.fd)
            file.nbytes = status.st_size
            for is_kind, name, code in _KINDS:
                if is_kind(status.st_mode):
                    what = f"it is {name}, and the files of a checkpoint are regular files"
                    raise storage_error("open", path, OSError(code, what))
            flags = _call("set flags of", path, fcntl.fcntl, file.fd, fcntl.F_GETFL)
            _call("set flags of", path, fcntl.fcntl, file.fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
            if direct is not False:
                _ask_for_direct(file, "open", must=direct is True)
        except BaseException:
            self.close(file)
            raise
        return file

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        """Go on without O_DIRECT. From here on, writes do not have to be aligned."""
        flags = _call("set flags of", file.path, fcntl.fcntl, file.fd, fcntl.F_GETFL)
        _call("set flags of", file.path, fcntl.fcntl, file.fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        file.alignment, file.why_buffered = None, why

    def close(self, file: OpenFile) -> None:
        """Close ``file`` and release its lock, even if a forked process has it open, too. A second close does
        nothing.
        """
        fd, file.fd = file.fd, -1
        _LOCKED.discard(file)
        if fd < 0:
            return
        if file.locked_by == os.getpid():
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        # On Linux the descriptor is gone even after an error. Closing it again could close another thread's file.
        _call("close", file.path, os.close, fd)

    def pwrite(self, file: OpenFile, data: Buffer | Sequence[Buffer], offset: int) -> None:
        """Write all of ``data`` (one buffer, or several one after the other) at ``offset`` bytes."""
        if not _in_full("write", os.pwritev, file, data, offset)[1]:
            raise storage_error("write", file.path, OSError(errno.EIO, "the system wrote nothing"))

    def pread_into(self, file: OpenFile, buffer: Buffer | Sequence[Buffer], offset: int) -> int:
        """Fill ``buffer`` (or several, one after the other) from ``offset``. Returns how many bytes were read: fewer
        than asked for only at the end of the file.
        """
        return _in_full("read", os.preadv, file, buffer, offset)[0]

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        """How many of these bytes are in memory, so that the device need not read them. Nothing is read to find that
        out.

        If the system does not tell, this is all of them.
        """
        return cached_nbytes(file.fd, offset, nbytes)

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        """Reserve space for bytes 0 to ``nbytes``, and set the file's size. Returns ``False`` if the file system cannot
        do that.
        """
        return nbytes == 0 or _call("preallocate", file.path, allocate, file.fd, nbytes)

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        """Set the file's size."""
        _call("truncate", file.path, os.ftruncate, file.fd, nbytes)

    def fsync(self, file: OpenFile) -> None:
        """Make the file's bytes durable. If this fails once, the file is given up, and every further call fails."""
        if file.given_up:
            raise storage_error("fsync", file.path, OSError(errno.EIO, "an earlier fsync of this file failed"))
        try:
            _call("fsync", file.path, os.fsync, file.fd)
        except errors.StorageError:
            file.given_up = True
            raise

    def fsync_directory(self, path: str) -> None:
        """Make the names in the directory ``path`` durable: files created, renamed and removed in it."""
        directory = _open(path, os.O_RDONLY | os.O_DIRECTORY, "open directory")
        try:
            os.fsync(directory.fd)
        except OSError as error:
            # These errors mean that the file system cannot sync a directory (some FUSE and CIFS mounts).
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise storage_error("fsync directory", path, error) from error
        finally:
            _call("close", path, os.close, directory.fd)

    def rename(self, source: str, target: str) -> None:
        """Give ``source`` the name ``target`` in one step. If there is a file of that name, it is replaced."""
        _call("rename", target, os.replace, source, target)

    def unlink(self, path: str) -> None:
        """Remove a file or a symbolic link (not its target)."""
        _call("remove", path, os.unlink, path)

    def mkdirs(self, path: str) -> list[str]:
        """Create the directory and its missing parents, durably. Directories that exist are left as they are.

        Returns:
            the directories that this call made, the outermost first. If it fails, none of them stays.
        """
        # Not `abspath`, which takes `link/..` for the directory of the link.
        path, made = os.path.join("" if os.path.isabs(path) else os.getcwd(), path), list[str]()
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        parent = os.path.dirname(path.rstrip(os.sep))
        if not missing and os.access(parent, os.R_OK):
            # A process may have made the directory and been killed before it synced that.
            self.fsync_directory(parent)
        try:
            for directory in reversed(missing):
                try:
                    os.mkdir(directory)
                    made.append(directory)
                except OSError as error:
                    # If there is a directory now, another rank was faster.
                    if not (isinstance(error, FileExistsError) and os.path.isdir(directory)):
                        raise storage_error("create directory", directory, error) from error
                self.fsync_directory(os.path.dirname(directory))
        except BaseException:
            for directory in reversed(made):
                with suppress(OSError):
                    os.rmdir(directory)
            raise
        return made

    def private_directory(self, path: str) -> list[str]:
        """Make the directory ``path`` for this user alone, or make sure that the one that is there is so. Somebody else
        may have made it, if it lies where all users may write, such as in ``/tmp``.

        Returns:
            the directories that this call made, as :meth:`mkdirs` does.

        Raises:
            StorageError: it is a link or another user's, or others may write to it; or a call failed.
        """
        parent = os.path.dirname(path)
        made = self.mkdirs(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise storage_error("create directory", path, error) from error
        else:
            made.append(path)
            self.fsync_directory(parent)
        status, what = _call("look at", path, os.lstat, path), ""
        if not stat.S_ISDIR(status.st_mode):
            what = "it is a link, or no directory"
        elif status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_ones_in(parent):
            what = f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            what = f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
        if what:
            raise errors.StorageError(
                f"{path} is not private: {what}. Another user could read what is saved there, or put something else in "
                "its place: remove it, or set ROBUST_DCP_STAGING to a directory of your own",
                path=path,
                errno=errno.EPERM,
                operation="begin",
            )
        if status.st_mode & 0o077:  # nobody else can put a link in its place: it is this user's
            _call("set mode of", path, os.chmod, path, 0o700)
        return made

    def rmdir(self, path: str) -> None:
        """Remove a directory, which must be empty."""
        _call("remove directory", path, os.rmdir, path)

    def resolve(self, path: str) -> str:
        """The absolute path with every symbolic link followed. The file itself need not exist."""
        return str(_call("resolve", path, os.path.realpath, path))

    def list_directory(self, path: str) -> list[str]:
        """The sorted names in a directory."""
        return sorted(_call("list", path, os.listdir, path))

    def directories_in(self, path: str) -> list[str]:
        """The sorted names of the directories in a directory, and of links to such."""
        return [name for name in self.list_directory(path) if os.path.isdir(os.path.join(path, name))]

    def files_below(self, path: str) -> Iterator[tuple[int, float]]:
        """Size and time of the last write of each file below a directory, without what vanishes meanwhile."""
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        yield from self.files_below(entry.path)
                    else:
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_size, status.st_mtime
        except OSError:
            return

    def exists(self, path: str) -> bool:
        """Whether ``path`` exists. ``False`` for a symbolic link that leads nowhere, or to itself."""
        try:
            os.stat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise storage_error("look at", path, error) from error  # if we may not look, something may still be there
        return True

    def room(self, path: str) -> tuple[int, int]:
        """The number of the file system that a directory lies in, and how many bytes are free there for this process.

        If the directory does not exist, its nearest parent counts. A file system that does not say how large it is has
        room for everything.
        """
        path = os.path.join("" if os.path.isabs(path) else os.getcwd(), path)  # a relative one has no parent to look at
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        number = _call("look at", path, os.stat, path).st_dev
        room = _call("look at", path, os.statvfs, path)
        return number, free_nbytes(room) if room.f_blocks else sys.maxsize

    def modified_seconds(self, path: str) -> float:
        """When a file was last written, by the clock of its file system."""
        return _call("look at", path, os.stat, path).st_mtime

    def fingerprint(self, path: str) -> Fingerprint | None:
        """What tells a file from others, and from itself after it was written; ``None`` if there is no file."""
        try:
            try:
                # Opened, because a network file system then asks its server, and else tells what was so a minute ago.
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except PermissionError:
                status = os.stat(path)
            else:
                try:
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error("look at", path, error) from error
        return status.st_ino, status.st_size, status.st_mtime_ns

    def is_at(self, file: OpenFile, path: str) -> bool:
        """Whether ``path`` is a name of the open ``file``."""
        try:
            there = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise storage_error("look at", path, error) from error
        own = _call("look at", file.path, os.fstat, file.fd)
        return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        """Lock ``file`` until it is closed or this process ends. Does not wait. A lock that we hold already is
        converted.

        Returns:
            ``True``: the file is locked. ``False``: somebody else holds a lock on it. ``None``: the file system has no
            locks.
        """
        # A lock by flock(2) belongs to the open file. So two saves of one process see each other's locks, as those of
        # two processes do.
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP, EBADF, …: it depends on the file system
            return None
        file.locked_by = os.getpid()
        _LOCKED.add(file)
        return True

    def is_of_this_machine(self, path: str) -> bool:
        """Whether the file system of ``path`` belongs to this machine alone, so that no other machine can open its
        files.
        """
        return is_of_this_machine(path)


def _call(operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
    try:
        return function(*args)
    except OSError as error:
        raise storage_error(operation, path, error) from error


def _owner_of_new_ones_in(directory: str) -> int:
    """Whose a directory is that this user makes: some network file systems say that all are one user's."""
    probe = _call("create directory in", directory, tempfile.mkdtemp, None, ".robust_dcp.owner-", directory)
    try:
        return _call("look at", probe, os.lstat, probe).st_uid
    finally:
        with suppress(OSError):
            os.rmdir(probe)


def _open(path: str, flags: int, operation: str) -> OpenFile:
    return OpenFile(path, _call(operation, path, os.open, path, flags | os.O_CLOEXEC, 0o666))


_KINDS: Final = (
    (stat.S_ISDIR, "a directory", errno.EISDIR),
    (stat.S_ISFIFO, "a FIFO", errno.EINVAL),
    (stat.S_ISCHR, "a character device", errno.EINVAL),
    (stat.S_ISBLK, "a block device", errno.EINVAL),
    (stat.S_ISSOCK, "a socket", errno.EINVAL),
)


def _ask_for_direct(file: OpenFile, operation: str, *, must: bool) -> None:
    file.must_be_direct = must
    if not _O_DIRECT:
        file.why_buffered = "this system has no O_DIRECT"
    else:
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file.fd, fcntl.F_SETFL, flags | _O_DIRECT)
        except OSError as error:
            file.why_buffered = f"the file system refuses O_DIRECT: {error.strerror}"
        else:
            file.alignment = alignment_of(file.fd)
            if file.alignment is None:
                fcntl.fcntl(file.fd, fcntl.F_SETFL, flags)
                file.why_buffered = "the file system has no direct I/O"
    if must and file.alignment is None:
        raise errors.StorageError(
            f"{file.path} cannot be written by direct I/O, and direct=True: {file.why_buffered}; leave direct at None "
            "to go through the page cache there",
            path=file.path,
            errno=errno.EINVAL,
            operation=operation,
        )


def _in_full(
    operation: str, function: Callable[..., int], file: OpenFile, data: Buffer | Sequence[Buffer], offset: int
) -> tuple[int, bool]:
    """Call ``function`` until all of ``data`` (one buffer, or several one after the other) is written or filled.

    Returns:
        How many bytes that was, and whether it was all: a call that did nothing ends it.
    """
    buffers: Sequence[Any] = data if isinstance(data, (list, tuple)) else [data]
    views: list[memoryview] = list(map(memoryview, buffers))  # type: ignore[arg-type]  # bytes-like, all of them
    first = done = 0
    while True:
        while first < len(views) and not views[first].nbytes:
            first += 1
        if first == len(views):
            return done, True
        some = views[first : first + _BUFFERS_PER_CALL]
        try:
            nbytes = function(file.fd, some, offset + done)
        except OSError as error:
            raise storage_error(operation, file.path, error) from error
        if nbytes == 0:
            return done, False
        done += nbytes
        while nbytes:
            taken = min(nbytes, views[first].nbytes)
            views[first] = views[first].cast("B")[taken:]
            nbytes -= taken
            first += not views[first].nbytes
