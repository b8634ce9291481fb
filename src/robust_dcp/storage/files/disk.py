"""Every call to a file system that the storage layer makes, as one small protocol.

``posix_disk`` makes the calls, and ``remote_disk`` those that read from a store. Tests replace them with a disk that
fails or loses data that was not synced.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from robust_dcp.on_demand import errors
from robust_dcp.storage.files.kernel import Alignment

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Disk", "OpenFile", "storage_error"]

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


def storage_error(operation: str, path: str, error: OSError) -> errors.StorageError:
    """The error for a failed call: the operation, the path, what the system says, and what to do if we know that."""
    advice = _ADVICE.get(error.errno or 0)
    message = f"{operation} {path}: {error.strerror or error}"
    if error.errno is not None:
        message += f" ({errno.errorcode.get(error.errno, error.errno)})"
    if advice:
        message += f"; {advice}"
    return errors.StorageError(message, path=path, errno=error.errno, operation=operation)


class OpenFile:
    """An open file: its path (for error messages), its descriptor, its alignment, and whether it was given up.

    ``alignment`` is what direct I/O on the file needs. It is ``None`` while bytes go through the page cache;
    ``why_buffered`` says why, if direct I/O was asked for.

    ``given_up`` is set by a failed fsync. The kernel may then have dropped the dirty pages and marked them clean. A
    second fsync would succeed although the data is not on disk. So such a file is only closed, and written anew.
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
    """The calls to a file system that the storage layer needs. Every method raises :class:`StorageError` and nothing
    else.

    Several threads may call methods at once, but not on the same byte range of one file.
    """

    # Whole calls, made of those below.

    @contextmanager
    def reading(self, path: str) -> Iterator[OpenFile]:
        """The file at ``path``, open for reading in the block."""
        file = self.open_read(path)
        try:
            yield file
        finally:
            self.close(file)

    def read(self, file: OpenFile, nbytes: int, offset: int) -> bytes:
        """These bytes of a file; fewer only at its end."""
        buffer = bytearray(nbytes)
        return bytes(memoryview(buffer)[: self.pread_into(file, buffer, offset)]) if nbytes else b""

    def read_file(self, path: str, at_most: int | None = None) -> bytes | None:
        """The bytes of the file at ``path``; ``None`` if there is none. No memory is taken for a file that is too long.

        Raises:
            CorruptCheckpoint: it has more than ``at_most`` bytes.
        """
        try:
            with self.reading(path) as file:
                nbytes = self.size(file)
                if at_most is None or nbytes <= at_most:
                    return self.read(file, nbytes, 0)
        except errors.StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None
        raise errors.CorruptCheckpoint(
            f"{path} cannot be used: expected at most {at_most} bytes, found {nbytes}; take another checkpoint, or "
            "restore the file",
            file=path,
            expected=f"at most {at_most} bytes",
            found=f"{nbytes} bytes",
        )

    def read_end(self, path: str, at_most: int) -> tuple[int, bytes]:
        """(the length of the file at ``path``, its last ``at_most`` bytes)."""
        with self.reading(path) as file:
            nbytes = self.size(file)
            length = min(at_most, nbytes)
            return nbytes, self.read(file, length, nbytes - length)

    def write_file(self, path: str, data: Buffer | Sequence[Buffer], *, durable: bool = True) -> None:
        """Make a new file with these bytes; ``durable``: wait until the device has them. After an error the file may be
        there, and the caller removes it.
        """
        file = self.open_new(path)
        try:
            self.pwrite(file, data, 0)
            if durable:
                self.fsync(file)
        finally:
            self.close(file)

    def replace_file(self, path: str, data: Buffer) -> None:
        """Put a file at ``path``, over an old one: wholly or not at all, and durably. After an error either file may be
        found later.
        """
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            with suppress(errors.StorageError):
                self.unlink(temporary)
            raise
        self.fsync_directory(os.path.dirname(path))

    # Each of these is one call to the system, or nearly so.

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        """Create ``path`` for writing; it must not exist.

        ``direct`` asks for O_DIRECT. If the file system does not have it, the file is opened all the same and has no
        ``alignment``.
        """

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        """Open an existing regular file for reading; ``direct`` as for :meth:`open_new`.

        A FIFO, a device or a directory is refused without waiting.
        """

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        """Go on without O_DIRECT. From here on, writes do not have to be aligned."""

    def close(self, file: OpenFile) -> None:
        """Close ``file``; a second close does nothing."""

    def pwrite(self, file: OpenFile, data: Buffer | Sequence[Buffer], offset: int) -> None:
        """Write all of ``data`` (one buffer, or several one after the other) at ``offset`` bytes."""

    def pread_into(self, file: OpenFile, buffer: Buffer | Sequence[Buffer], offset: int) -> int:
        """Fill ``buffer`` (or several, one after the other) from ``offset``. Returns how many bytes were read: fewer
        than asked for only at the end of the file.
        """

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        """How many of these bytes are in memory, so that the device need not read them. Nothing is read to find that
        out.

        If the system does not tell, this is all of them.
        """

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        """Reserve space for bytes 0 to ``nbytes``, and set the file's size. Returns ``False`` if the file system cannot
        do that.
        """

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        """Set the file's size."""

    def fsync(self, file: OpenFile) -> None:
        """Make the file's bytes durable. If this fails once, the file is given up, and every further call fails."""

    def fsync_directory(self, path: str) -> None:
        """Make the names in the directory ``path`` durable: files created, renamed and removed in it."""

    def rename(self, source: str, target: str) -> None:
        """Give ``source`` the name ``target`` in one step. If there is a file of that name, it is replaced."""

    def unlink(self, path: str) -> None:
        """Remove a file or a symbolic link (not its target)."""

    def mkdirs(self, path: str) -> list[str]:
        """Create the directory and its missing parents, durably. Directories that exist are left as they are.

        Returns:
            the directories that this call made, the outermost first. If it fails, none of them stays.
        """

    def rmdir(self, path: str) -> None:
        """Remove a directory, which must be empty."""

    def symlink(self, target: str, path: str) -> None:
        """Create the symbolic link ``path`` that points to ``target``; ``path`` must not exist."""

    def resolve(self, path: str) -> str:
        """The absolute path with every symbolic link followed. The file itself need not exist."""

    def list_directory(self, path: str) -> list[str]:
        """The sorted names in a directory."""

    def exists(self, path: str) -> bool:
        """Whether ``path`` exists. ``False`` for a symbolic link if its target is missing."""

    def size(self, file: OpenFile) -> int:
        """The size in bytes of an open file. At its path there may be another one meanwhile."""

    def room(self, path: str) -> tuple[int, int]:
        """The number of the file system that a directory lies in, and how many bytes are free there for this process.

        If the directory does not exist, its nearest parent counts. A file system that does not say how large it is has
        room for everything.
        """

    def modified_seconds(self, path: str) -> float:
        """When a file was last written, by the clock of its file system."""

    def fingerprint(self, path: str) -> tuple[int, int, int]:
        """Inode, size and time of the last write in nanoseconds: at least one changes when a file is written or
        replaced.
        """

    def is_at(self, file: OpenFile, path: str) -> bool:
        """Whether ``path`` is a name of the open ``file``."""

    def unlock(self, file: OpenFile) -> None:
        """Release the lock on ``file``, even if a forked process has the file open, too."""

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        """Lock ``file`` until it is closed or this process ends. Does not wait. A lock that we hold already is
        converted.

        Returns:
            ``True``: the file is locked. ``False``: somebody else holds a lock on it. ``None``: the file system has no
            locks.
        """

    def is_of_this_machine(self, path: str) -> bool:
        """Whether the file system of ``path`` belongs to this machine alone, so that no other machine can open its
        files.
        """
