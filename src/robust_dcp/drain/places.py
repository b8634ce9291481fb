"""The two ends of a copy: a directory of a mounted file system, or a URL of an object store (fsspec).

Both are read by a :class:`Disk`. This module owns how files are written: whole or not at all under their names.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.paths import READ_BY_NAME, is_behind_link, is_data_file, local_path_of, locate
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.remote import Calls, RemoteDisk, status_of

_MOST_METADATA_NBYTES: Final = 16 << 30
_UNFINISHED: Final = re.compile(r".*\.[0-9a-f]{8}\.copying", re.DOTALL)
_MOST_TAKEN: Final = 10
_MOST_PARTS: Final = 9_000
"""S3 takes at most 10,000 parts of a file."""

_PRECONDITION_FAILED, _NOT_IMPLEMENTED = 412, 501
"""What a store says of a file that is there already, and of a call that it does not know."""


def open_place(place: str, calls: Calls, disk: Disk | None = None) -> Place:
    """One end of a copy.

    Args:
        place: a path or a URL.
        disk: the file system of a path.

    Raises:
        StorageError, ValueError: as ``filesystem_of``.
    """
    path = local_path_of(place)
    return _Store(place, calls) if path is None else Place(path, disk or Disk(), calls)


class Content:
    """The content of a file, read in parts, and summed up on the way.

    Args:
        disk, file: the file, open for reading.
        part_nbytes: the size of a part. A file of very many parts gets larger ones.
        wants_md5: whether to compute MD5s too.

    Attributes:
        crc32: of what :meth:`parts` has given.
    """

    def __init__(self, disk: Disk, file: OpenFile, part_nbytes: int, *, wants_md5: bool = False) -> None:
        self.path = file.path
        self.nbytes = file.nbytes
        self.part_nbytes = max(part_nbytes, -(-self.nbytes // _MOST_PARTS))
        self.crc32 = 0
        self.disk, self.file = disk, file
        self._wants_md5 = wants_md5
        self._md5s: list[bytes] = []

    def parts(self) -> Iterator[bytes]:
        """The bytes in parts, from the start; one empty part if there are none.

        Raises:
            StorageError: they cannot be read, or the file has become shorter.
        """
        self.crc32, self._md5s = 0, []
        for offset in range(0, max(self.nbytes, 1), self.part_nbytes):
            expected = min(self.part_nbytes, self.nbytes - offset)
            data = self.disk.read(self.file, offset, expected)
            if len(data) != expected:
                raise StorageError(
                    f"read {self.path}: expected {expected} bytes from byte {offset} on, found {len(data)}: the file "
                    "was cut off or replaced; copy the checkpoint again",
                    path=self.path,
                    errno=errno.EIO,
                    operation="read",
                )
            self.crc32 = crc32(data, self.crc32)
            if self._wants_md5:
                self._md5s.append(hashlib.md5(data, usedforsecurity=False).digest())
            yield data

    def __str__(self) -> str:
        return f"{self.nbytes} bytes with CRC-32 {self.crc32:08x}"

    @property
    def etag(self) -> str:
        """The ETag that S3 gives: the MD5 of one part, or that of the MD5s of several, and their number."""
        if len(self._md5s) == 1:
            return self._md5s[0].hex()
        return f"{hashlib.md5(b''.join(self._md5s), usedforsecurity=False).hexdigest()}-{len(self._md5s)}"


def _may_be_a_link(name: str) -> bool:
    return is_data_file(name) or name in READ_BY_NAME


class Place:
    """One end of a copy: a directory. A file is written under another name, made durable, and renamed.

    Names are relative to ``url``.

    Attributes:
        url: the place of the checkpoint, for errors and for people.
        disk: reads it.
        gives_etags: whether it gives files checksums that are made of MD5s of their parts.
    """

    gives_etags = False

    def __init__(self, url: str, disk: Disk, calls: Calls) -> None:
        self.url = url
        self.disk = disk
        self._calls = calls
        # Two copies of one checkpoint at the same time do not write to the same file.
        self._token = secrets.token_hex(4)
        self._changed: set[str] = set()

    def path_of(self, name: str) -> str:
        return os.path.join(self.url, name)

    @contextmanager
    def reading(self, name: str, part_nbytes: int, *, wants_md5: bool = False) -> Iterator[Content]:
        """The content of a file of the checkpoint, to be read in the block."""
        path = locate(self.disk, self.url, name, file=self.url)
        file = self._calls.run("open", path, lambda: self.disk.open_read(path))
        try:
            yield Content(self.disk, file, part_nbytes, wants_md5=wants_md5)
        finally:
            with suppress(StorageError):
                self.disk.close(file)

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file; ``None`` if it does not exist."""
        return self.disk.read_file(self.path_of(name), _MOST_METADATA_NBYTES)

    def put(self, name: str, data: bytes, *, former: bytes | None = None, keeps_others: bool = False) -> None:
        """Write a small file, durably.

        Args:
            former: the content that was there; ``None`` if there was no such file.
            keeps_others: if something else is there by now, it stays, in a store that can do that in one call.
        """
        self.write(name, lambda: [data], len(data), len(data))
        self.sync()

    def write(self, name: str, parts: Callable[[], Iterable[bytes]], nbytes: int, part_nbytes: int) -> None:
        """Write a file in parts of ``part_nbytes``. It gets its name when all of it is there.

        Args:
            parts: gives the content. It is called again if the file is sent again.
        """
        n_tries = 0
        while True:
            try:
                return self._write(name, parts, nbytes, part_nbytes)
            except StorageError as error:  # noqa: PERF203 a try takes longer than that
                # Other copies of this checkpoint that are over may have taken the unfinished file for a leftover.
                is_taken = n_tries < _MOST_TAKEN and (error.errno, error.operation) == (errno.ENOENT, "rename")
                if not is_taken and not self._calls.may_try_again("send", self.path_of(name), error, n_tries):
                    raise
                n_tries += 1

    def remove(self, name: str) -> None:
        """Remove a file. One that is gone already is no error."""
        try:
            self._calls.run("remove", self.path_of(name), partial(self.disk.unlink, self.path_of(name)))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

    def sync(self) -> None:
        """Make the names of all files durable that were sent."""
        for directory in sorted(self._changed):  # a copy of those that other threads may add to
            self._calls.run("fsync directory", directory, partial(self.disk.fsync_directory, directory))

    def files(self) -> dict[str, int]:
        """Names and sizes of all files. Nothing if the place does not exist."""

        def refuse(error: OSError) -> None:
            if error.errno != errno.ENOENT:
                raise storage_error("list", error.filename or self.url, error) from error

        sizes: dict[str, int] = {}
        for directory, _, names in os.walk(self.url, onerror=refuse):
            for name in names:
                path = os.path.join(directory, name)
                # The files of a checkpoint may be links; any other link leads to what is not its own.
                if _UNFINISHED.fullmatch(name) or (os.path.islink(path) and not _may_be_a_link(name)):
                    continue
                try:
                    status = os.stat(path)
                except OSError as error:  # it was removed meanwhile, or the link leads nowhere
                    refuse(error)
                else:
                    if stat.S_ISREG(status.st_mode):
                        sizes[os.path.relpath(path, self.url)] = status.st_size
        return sizes

    def links_to_others(self) -> list[str]:
        """The names of links to files that :meth:`files` leaves out."""
        walk = ((directory, name) for directory, _, names in os.walk(self.url) for name in names)
        paths = [os.path.join(directory, name) for directory, name in walk if not _may_be_a_link(name)]
        return sorted(os.path.relpath(path, self.url) for path in paths if os.path.islink(path))

    def proves(self, name: str, content: Content) -> bool:
        """Whether the store's own checksum shows that a file has arrived. If not, it is to be read back."""
        return False

    def remove_unfinished(self) -> None:
        """Remove the files that copies have begun to write here. One that still runs sends such a file again."""
        for directory, _, names in os.walk(self.url):
            for name in filter(_UNFINISHED.fullmatch, names):
                with suppress(StorageError):
                    self.disk.unlink(os.path.join(directory, name))

    def _write(self, name: str, parts: Callable[[], Iterable[bytes]], nbytes: int, part_nbytes: int) -> None:
        path = self.path_of(name)
        if is_behind_link(self.disk, self.url, name):
            raise StorageError(
                f"{path} lies behind a symbolic link to another directory, and a copy writes through none: remove the "
                "link, or copy to another place",
                path=path,
                operation="copy",
            )
        unfinished = f"{path}.{self._token}.copying"
        self._changed.add(os.path.dirname(path))

        def create() -> OpenFile:
            self.disk.mkdirs(os.path.dirname(path))
            return self.disk.open_new(unfinished)

        file = self._calls.run("create", path, create)
        try:
            offset = 0
            for part in parts():
                self.disk.pwrite(file, part, offset)
                offset += len(part)
            self.disk.fsync(file)
            if hasattr(os, "posix_fadvise") and file.fd >= 0:
                with suppress(OSError):  # what is read back shall come from the device, not from memory
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._calls.run("rename", path, lambda: self.disk.rename(unfinished, path))
        except BaseException:
            with suppress(StorageError):
                self.disk.unlink(unfinished)
            raise
        finally:
            self.disk.close(file)


class _Store(Place):
    """An object is seen when the call that made it has returned, and is durable then."""

    def __init__(self, url: str, calls: Calls) -> None:
        self._remote = RemoteDisk(url, calls)
        super().__init__(url, self._remote, calls)
        self._filesystem = self._remote.filesystem
        self.gives_etags = hasattr(self._filesystem, "call_s3")

    def put(self, name: str, data: bytes, *, former: bytes | None = None, keeps_others: bool = False) -> None:
        if not (keeps_others and self._put_in_place_of(former, name, data)):
            super().put(name, data)

    def _put_in_place_of(self, former: bytes | None, name: str, data: bytes) -> bool:
        """Write a file unless another one than ``former`` is there. Return whether the store can do that."""
        path, url = self._path(name), self.path_of(name)
        pipe_file = getattr(self._filesystem, "_pipe_file", self._filesystem.pipe_file)
        if "mode" not in inspect.signature(pipe_file).parameters:  # fsspec of 2024, and some stores
            return False
        condition = {"mode": "create"}
        if former is not None:
            if not self.gives_etags:
                return False
            condition = {"IfMatch": str(self._remote.info(url).get("ETag"))}
            if self.read(name) != former:
                return True
        try:
            self._calls.run("send", url, lambda: self._filesystem.pipe_file(path, data, **condition))
        except StorageError as error:
            cause = error.__cause__  # s3fs has an OSError for that of the client
            status = status_of(cause) or status_of(cause and cause.__cause__)
            if status == _NOT_IMPLEMENTED:
                return False
            if status != _PRECONDITION_FAILED and error.errno != errno.EEXIST:
                raise
        return True

    def sync(self) -> None:
        """Nothing is left to do."""

    def remove_unfinished(self) -> None:
        """Nobody sees an object that is not finished."""

    def links_to_others(self) -> list[str]:
        """A store has no links."""
        return []

    def files(self) -> dict[str, int]:
        sizes, directories = dict[str, int](), [""]
        for directory in directories:  # not by fsspec's find, to which one that cannot be listed is empty
            try:
                entries = self._remote.entries(self.path_of(directory).rstrip("/"))
            except StorageError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                continue
            for name, info in entries.items():
                path = os.path.join(directory, name)
                if info.get("type") == "directory":
                    directories.append(path)
                else:
                    sizes[path] = int(info.get("size") or 0)
        return sizes

    def proves(self, name: str, content: Content) -> bool:
        # Encryption by KMS gives ETags that are no MD5s.
        return self.gives_etags and content.etag == str(self._remote.info(self.path_of(name)).get("ETag")).strip('"')

    def _write(self, name: str, parts: Callable[[], Iterable[bytes]], nbytes: int, part_nbytes: int) -> None:
        path, url = self._path(name), self.path_of(name)
        if nbytes <= part_nbytes:
            (data,) = parts()
            self._calls.run("send", url, lambda: self._filesystem.pipe_file(path, data))
            return
        file = self._calls.run("create", url, lambda: self._filesystem.open(path, "wb", block_size=part_nbytes))
        try:
            for part in parts():
                # A part that fails cannot be sent again, so the whole file is.
                self._calls.run("send", url, partial(file.write, part), retries=0)
            self._calls.run("send", url, file.close, retries=0)
        except BaseException:
            with suppress(Exception):  # also where the copy was told to stop
                Calls(retries=0).run("abandon", self.url, file.discard)
            with suppress(AttributeError):  # some files do not let it be set
                file.closed = True  # else it would be finished when Python collects it
            raise

    def _path(self, name: str) -> str:
        return self._remote.path_in_store(self.path_of(name))
