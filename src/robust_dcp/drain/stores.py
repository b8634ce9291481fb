"""The two ends of a copy: a directory of a mounted file system, or a URL of an object store.

This module owns what a copy needs of a store, and how it is done in a directory. ``object_stores`` does the same by
fsspec. ``transfer`` and ``copy`` call both, and do not know which one they have.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from robust_dcp.drain.content import ContentSums, OpenSource
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.paths import is_data_file, locate
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.remote.calls import Calls

__all__ = ["DirectoryStore", "Store", "Upload", "check_small"]

T = TypeVar("T")

_MOST_METADATA_NBYTES: Final = 16 << 30
_UNFINISHED_SUFFIX: Final = ".copying"


class Upload(Protocol):
    """A file on its way to a store. Nobody sees it before ``finish``."""

    def write(self, number: int, data: bytes) -> None:
        """Send the next part."""

    def finish(self) -> None:
        """Make the file visible and durable under its name, in one step."""

    def abandon(self) -> None:
        """Remove what was sent. Never raises."""


class Store(Protocol):
    """One end of a copy. Names are relative to ``url``. Every method raises :class:`StorageError` and nothing else.

    Attributes:
        url: the place of the checkpoint, for errors and for people.
        repeats_parts: whether a part that failed is sent again by the store itself. If not, the whole file is.
        wants_md5: whether ``proves`` may need MD5s.
        mark: of the save that is sent here. It is in the names of files that are not finished.
    """

    url: str
    repeats_parts: bool
    wants_md5: bool
    mark: str

    def path_of(self, name: str) -> str: ...

    def files(self) -> dict[str, int]:
        """Names and sizes of all files. Nothing if the place does not exist."""

    def open(self, name: str) -> OpenSource: ...

    def read_whole(self, name: str) -> bytes:
        """The bytes of a small file, as it is at one moment: another copy may replace it meanwhile.

        Raises:
            CorruptCheckpoint: it is larger than any metadata.
        """

    def begin(self, name: str, nbytes: int, part_nbytes: int) -> Upload: ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in one step, over one that is there."""

    def remove(self, name: str) -> None:
        """Remove a file. One that is gone already is no error."""

    def proves(self, name: str, sums: ContentSums) -> bool:
        """Whether the store's own checksum shows that it holds just this content."""

    def make_durable(self) -> None:
        """Make the names of all files durable that were sent."""

    def remove_unfinished(self) -> None:
        """Remove what copies of this save have left that were killed. Called when the save is there."""


def check_small(path: str, nbytes: int) -> None:
    """Refuse to read a file as a whole that is larger than any metadata.

    Raises:
        CorruptCheckpoint: it is.
    """
    if nbytes > _MOST_METADATA_NBYTES:
        raise CorruptCheckpoint(
            f"{path} cannot be used: expected at most {_MOST_METADATA_NBYTES} bytes, found {nbytes}; take another "
            "checkpoint, or restore the file",
            file=path,
            expected=f"at most {_MOST_METADATA_NBYTES} bytes",
            found=f"{nbytes} bytes",
        )


class _OpenFile:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._file = disk.open_read(path)
        try:
            self.nbytes = disk.size(self._file)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        found = self._disk.pread_into(self._file, data, offset)
        if found != nbytes:
            raise StorageError(
                f"read {self._file.path}: expected {nbytes} bytes from byte {offset} on, found {found}: the file was "
                "cut off or replaced; copy the checkpoint again",
                path=self._file.path,
                errno=errno.EIO,
                operation="read",
            )
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(StorageError):
            self._disk.close(self._file)


class DirectoryStore:
    """A directory. Files get their names by ``rename``, when they are durable."""

    repeats_parts = False
    wants_md5 = False

    def __init__(self, path: str, calls: Calls, disk: Disk | None = None) -> None:
        self.url = path
        self.mark = ""
        self._calls = calls
        self._disk: Disk = disk or PosixDisk()
        self._token = secrets.token_hex(4)
        self._changed = {path}

    def path_of(self, name: str) -> str:
        return os.path.join(self.url, name)

    def files(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self._disk.exists(self.url):
            self._look("", found)
        return found

    def _look(self, directory: str, found: dict[str, int]) -> None:
        for name in self._disk.list_directory(os.path.join(self.url, directory)):
            relative = os.path.join(directory, name)
            path = os.path.join(self.url, relative)
            # The files of a checkpoint on other mounts are links; any other link leads to what is not its own.
            is_link = os.path.islink(path)
            if is_link and not is_data_file(name):
                continue
            try:
                status = os.stat(path)
            except FileNotFoundError:  # it was removed meanwhile, or the link leads nowhere
                continue
            except OSError as error:
                raise storage_error("look at", path, error) from error
            if stat.S_ISDIR(status.st_mode):
                if not is_link:  # it may lead to a directory around this one, and so on without end
                    self._look(relative, found)
            elif not name.endswith(_UNFINISHED_SUFFIX) and stat.S_ISREG(status.st_mode):
                found[relative] = status.st_size

    def open(self, name: str) -> OpenSource:
        path = locate(self._disk, self.url, name, file=self.url)
        return self._run("open", name, lambda: _OpenFile(self._disk, path))

    def read_whole(self, name: str) -> bytes:
        source = self.open(name)
        try:
            check_small(self.path_of(name), source.nbytes)
            return source.read(0, source.nbytes)
        finally:
            source.close()

    def begin(self, name: str, nbytes: int, part_nbytes: int) -> Upload:
        self._changed.add(os.path.dirname(self.path_of(name)))
        return self._run("create", name, lambda: _FileUpload(self._disk, self.path_of(name), self._unfinished))

    def put(self, name: str, data: bytes) -> None:
        def write() -> None:
            upload = _FileUpload(self._disk, self.path_of(name), self._unfinished)
            try:
                upload.write(0, data)
                upload.finish()
            except BaseException:
                upload.abandon()
                raise
            self._disk.fsync_directory(self.url)

        self._run("write", name, write)

    def remove(self, name: str) -> None:
        try:
            self._run("remove", name, lambda: self._disk.unlink(self.path_of(name)))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

    def proves(self, name: str, sums: ContentSums) -> bool:
        return False

    def make_durable(self) -> None:
        if not self._disk.exists(self.url):
            return
        for directory in sorted(self._changed):  # a copy of those that other threads may add to
            name = os.path.relpath(directory, self.url)
            self._run("fsync directory", name, lambda path=directory: self._disk.fsync_directory(path))  # type: ignore[misc]

    @property
    def _unfinished(self) -> str:
        # The token: two copies of one save at the same time do not write to the same file.
        return f".{self.mark}-{self._token}{_UNFINISHED_SUFFIX}"

    def remove_unfinished(self) -> None:
        for directory, _, names in os.walk(self.url):
            for name in names:
                if name.endswith(_UNFINISHED_SUFFIX) and f".{self.mark}-" in name:
                    with contextlib.suppress(StorageError):
                        self._disk.unlink(os.path.join(directory, name))

    def _run(self, operation: str, name: str, function: Callable[[], T]) -> T:
        return self._calls.run(operation, self.path_of(name), function)


class _FileUpload:
    def __init__(self, disk: Disk, path: str, suffix: str) -> None:
        self._disk = disk
        self._path = path
        self._unfinished = path + suffix
        self._offset = 0
        disk.mkdirs(os.path.dirname(path))
        with contextlib.suppress(StorageError):  # what the try before has left
            disk.unlink(self._unfinished)
        self._file: OpenFile = disk.open_new(self._unfinished)

    def write(self, number: int, data: bytes) -> None:
        self._disk.pwrite(self._file, data, self._offset)
        self._offset += len(data)

    def finish(self) -> None:
        self._disk.fsync(self._file)
        if hasattr(os, "posix_fadvise") and self._file.fd >= 0:
            # What is read back shall come from the device, not from memory.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._disk.close(self._file)
        self._disk.rename(self._unfinished, self._path)

    def abandon(self) -> None:
        with contextlib.suppress(StorageError):
            self._disk.close(self._file)
        with contextlib.suppress(StorageError):
            self._disk.unlink(self._unfinished)
