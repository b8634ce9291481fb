"""The two ends of a copy: a directory of a mounted file system, or a URL of an object store (fsspec).

Both are read by a :class:`Disk`. This module owns how files are written: whole or not at all under their names. S3 gets
more than other stores: a part that failed is sent again, and not the whole file; and its ETag proves what has arrived.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.paths import is_data_file, locate
from robust_dcp.storage.remote import Calls, RemoteDisk, filesystem_of, local_path_of

__all__ = ["Parts", "Place", "PlaceFile", "open_place"]

Parts = Callable[[], Iterable[bytes]]
"""The content of a file in parts. It is asked again where a file is sent again."""

_MOST_METADATA_NBYTES: Final = 16 << 30
_UNFINISHED_SUFFIX: Final = ".copying"
_MD5_ETAG: Final = re.compile(r"[0-9a-f]{32}(-\d+)?")


def open_place(
    place: str, calls: Calls, *, options: Mapping[str, Any] | None = None, disk: Disk | None = None
) -> Place:
    """One end of a copy.

    Args:
        place: a path or a URL.
        options: for fsspec.
        disk: the file system of a path.

    Raises:
        StorageError, ValueError: as ``filesystem_of``.
    """
    path = local_path_of(place)
    if path is not None:
        return _Directory(path, disk or Disk(), calls)
    return _Store(place, options, calls)


class PlaceFile:
    """A file that is read."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk
        self._file = disk.open_read(path)
        try:
            self.nbytes = disk.size(self._file)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes.

        Raises:
            StorageError: they cannot be read, or the file is shorter.
        """
        data = bytearray(nbytes)
        n_read = self._disk.pread_into(self._file, data, offset)
        if n_read != nbytes:
            raise StorageError(
                f"read {self.path}: expected {nbytes} bytes from byte {offset} on, found {n_read}: the file was cut "
                "off or replaced; copy the checkpoint again",
                path=self.path,
                errno=errno.EIO,
                operation="read",
            )
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(StorageError):
            self._disk.close(self._file)


class Place(ABC):
    """One end of a copy. Names are relative to ``url``.

    Attributes:
        url: the place of the checkpoint, for errors and for people.
        gives_etags: whether :meth:`etag` can prove what a file holds.
        disk: reads it.
        mark: of the checkpoint that is sent here.
    """

    gives_etags = False

    def __init__(self, url: str, disk: Disk, calls: Calls) -> None:
        self.url = url
        self.mark = ""
        self.disk = disk
        self._calls = calls

    def path_of(self, name: str) -> str:
        return os.path.join(self.url, name)

    def open(self, name: str) -> PlaceFile:
        path = locate(self.disk, self.url, name, file=self.url)
        return self._calls.run("open", path, lambda: PlaceFile(self.disk, path))

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file; ``None`` if it does not exist."""
        return self.disk.read_file(self.path_of(name), _MOST_METADATA_NBYTES)

    def write(self, name: str, parts: Parts, nbytes: int, part_nbytes: int) -> None:
        """Write a file in parts of ``part_nbytes``. It gets its name when all of it is there."""
        n_tries = 0
        while True:
            try:
                return self._write(name, parts, nbytes, part_nbytes)
            except StorageError as error:  # noqa: PERF203 a try takes longer than that
                # Another copy of this checkpoint may have taken a file that was just made for a leftover.
                is_taken = n_tries == 0 and (error.errno, error.operation) == (errno.ENOENT, "rename")
                if not is_taken and not self._calls.may_try_again("send", self.path_of(name), error, n_tries):
                    raise
                n_tries += 1

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, durably."""
        self.write(name, lambda: [data], len(data), len(data))
        self.sync()

    def remove(self, name: str) -> None:
        """Remove a file. One that is gone already is no error."""
        try:
            self._calls.run("remove", self.path_of(name), lambda: self._remove(name))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

    def etag(self, name: str) -> str | None:
        """The ETag that the store gives a file if it is made of MD5s of its content; else ``None``."""
        return None

    def sync(self) -> None:  # noqa: B027 a store has nothing to do
        """Make the names of all files durable that were sent."""

    def remove_unfinished(self) -> None:  # noqa: B027 nobody sees an object that is not finished
        """Remove the files that killed copies have begun to write here. Called when the checkpoint has arrived."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Names and sizes of all files. Nothing if the place does not exist."""

    @abstractmethod
    def _write(self, name: str, parts: Parts, nbytes: int, part_nbytes: int) -> None: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...


class _Directory(Place):
    """A file is written under another name, made durable, and renamed."""

    def __init__(self, path: str, disk: Disk, calls: Calls) -> None:
        super().__init__(path, disk, calls)
        # Two copies of one checkpoint at the same time do not write to the same file.
        self._token = secrets.token_hex(4)
        self._changed = {path}

    def files(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        directories = [""] if self.disk.exists(self.url) else []
        for directory in directories:  # grows
            for name in self.disk.list_directory(self.path_of(directory)):
                path = self.path_of(os.path.join(directory, name))
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
                if stat.S_ISDIR(status.st_mode) and not is_link:
                    directories.append(os.path.join(directory, name))
                elif stat.S_ISREG(status.st_mode) and not _is_unfinished(name):
                    sizes[os.path.join(directory, name)] = status.st_size
        return sizes

    def _write(self, name: str, parts: Parts, nbytes: int, part_nbytes: int) -> None:
        path = self.path_of(name)
        unfinished = f"{path}.{self.mark}-{self._token}{_UNFINISHED_SUFFIX}"
        self._changed.add(os.path.dirname(path))

        def create() -> OpenFile:
            self.disk.mkdirs(os.path.dirname(path))
            return self.disk.open_new(unfinished)

        file = self._calls.run("create", path, create)
        try:
            self.disk.lock(file)  # so that another copy of this checkpoint does not take it for a leftover
            offset = 0
            for part in parts():
                self.disk.pwrite(file, part, offset)
                offset += len(part)
            self.disk.fsync(file)
            if hasattr(os, "posix_fadvise") and file.fd >= 0:
                with contextlib.suppress(OSError):  # what is read back shall come from the device, not from memory
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._calls.run("rename", path, lambda: self.disk.rename(unfinished, path))
        except BaseException:
            with contextlib.suppress(StorageError):
                self.disk.unlink(unfinished)
            raise
        finally:
            self.disk.close(file)

    def _remove(self, name: str) -> None:
        self.disk.unlink(self.path_of(name))

    def sync(self) -> None:
        for directory in sorted(self._changed):  # a copy of those that other threads may add to
            if self.disk.exists(directory):
                self._calls.run("fsync directory", directory, lambda path=directory: self.disk.fsync_directory(path))  # type: ignore[misc]

    def remove_unfinished(self) -> None:
        for directory, _, names in os.walk(self.url):
            for path in (os.path.join(directory, name) for name in names if _is_unfinished(name)):
                with contextlib.suppress(StorageError):
                    file = self.disk.open_read(path)
                    try:
                        is_free = self.disk.lock(file)  # None: the file system has no locks
                        if is_free or (is_free is None and f".{self.mark}-" in path):
                            self.disk.unlink(path)
                    finally:
                        self.disk.close(file)


def _is_unfinished(name: str) -> bool:
    return name.endswith(_UNFINISHED_SUFFIX)


class _Store(Place):
    """An object is seen when the call that made it has returned, and is durable then."""

    def __init__(self, url: str, options: Mapping[str, Any] | None, calls: Calls) -> None:
        self._filesystem, root = filesystem_of(url, options)
        super().__init__(url, RemoteDisk(url, storage_options=options, calls=calls), calls)
        self._root = root.rstrip("/")
        self.gives_etags = all(hasattr(self._filesystem, name) for name in ("call_s3", "split_path"))

    def files(self) -> dict[str, int]:
        def look() -> dict[str, int]:
            self._filesystem.invalidate_cache()
            try:
                listed = self._filesystem.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            root = self._root.strip("/") + "/"
            by_path = {str(path).strip("/"): int(info.get("size") or 0) for path, info in listed.items()}
            return {path[len(root) :]: nbytes for path, nbytes in by_path.items() if path.startswith(root)}

        return self._calls.run("list", self.url, look)

    def etag(self, name: str) -> str | None:
        if not self.gives_etags:
            return None

        def look() -> str:
            self._filesystem.invalidate_cache()
            return str(self._filesystem.info(self._path(name)).get("ETag", "")).strip('"')

        found = self._calls.run("look at", self.path_of(name), look)
        return found if _MD5_ETAG.fullmatch(found) else None  # encryption by KMS gives others

    def _write(self, name: str, parts: Parts, nbytes: int, part_nbytes: int) -> None:
        if nbytes <= part_nbytes:
            (data,) = parts()
            self._calls.run("send", self.path_of(name), lambda: self._filesystem.pipe_file(self._path(name), data))
        elif self.gives_etags:
            self._write_to_s3(name, parts)
        else:
            self._write_by_fsspec(name, parts, part_nbytes)

    def _write_to_s3(self, name: str, parts: Parts) -> None:
        bucket, key, _ = self._filesystem.split_path(self._path(name))

        def call(method: str, **arguments: Any) -> Any:
            operation = method.replace("_", " ")
            request: Callable[[], Any] = lambda: self._filesystem.call_s3(method, Bucket=bucket, Key=key, **arguments)  # noqa: E731
            return self._calls.run(operation, self.path_of(name), request)

        upload = call("create_multipart_upload")["UploadId"]
        try:
            tags = [
                {
                    "PartNumber": number,
                    "ETag": call("upload_part", UploadId=upload, PartNumber=number, Body=part)["ETag"],
                }
                for number, part in enumerate(parts(), start=1)
            ]
            call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": tags})
        except BaseException:
            with contextlib.suppress(Exception):  # else its parts stay, unseen, and cost money
                self._last_call(
                    lambda: self._filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
                )
            raise

    def _write_by_fsspec(self, name: str, parts: Parts, part_nbytes: int) -> None:
        path = self._path(name)
        file = self._calls.run(
            "create", self.path_of(name), lambda: self._filesystem.open(path, "wb", block_size=part_nbytes)
        )
        try:
            for part in parts():
                # A part that fails cannot be sent again, so the whole file is.
                self._calls.run("send", self.path_of(name), lambda part=part: file.write(part), retries=0)  # type: ignore[misc]
            self._calls.run("send", self.path_of(name), file.close, retries=0)
        except BaseException:
            with contextlib.suppress(Exception):
                self._last_call(file.discard)
            with contextlib.suppress(AttributeError):  # some files do not let it be set
                file.closed = True  # else it would be finished when Python collects it
            raise

    def _last_call(self, function: Callable[[], Any]) -> None:
        """A call that is made although the copy was told to stop."""
        Calls(retries=0).run("abandon", self.url, function)

    def _remove(self, name: str) -> None:
        self._filesystem.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
