"""A place in an object store, by fsspec. S3 gets more: parts that are sent again, and uploads that go on.

This module turns the calls of ``Store`` into calls of fsspec. ``open_store`` chooses the kind of store for a place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from robust_dcp.drain.content import ContentSums, OpenSource
from robust_dcp.drain.stores import DirectoryStore, Store, Upload, check_small
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.remote.calls import Calls
from robust_dcp.storage.remote.filesystem import filesystem_of, local_path_of

__all__ = ["open_store"]

T = TypeVar("T")

_ETAG: Final = re.compile(r"[0-9a-f]{32}(-\d+)?")


def open_store(
    place: str, calls: Calls, *, options: Mapping[str, Any] | None = None, disk: Disk | None = None
) -> Store:
    """The store for a place.

    Args:
        place: a path or a URL.
        options: for fsspec.
        disk: the file system of a path.

    Raises:
        StorageError, ValueError: as ``filesystem_of``.
    """
    path = local_path_of(place)
    if path is not None:
        return DirectoryStore(path, calls, disk)
    filesystem, root = filesystem_of(place, options)
    is_s3 = all(hasattr(filesystem, name) for name in ("call_s3", "split_path"))
    return (_S3Store if is_s3 else _FsspecStore)(place, filesystem, root, calls)


class _RemoteSource:
    def __init__(self, store: _FsspecStore, name: str, nbytes: int) -> None:
        self._store = store
        self._name = name
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._store.read(self._name, offset, nbytes) if nbytes else b""

    def close(self) -> None:
        return None


class _FsspecStore:
    repeats_parts = False
    wants_md5 = False

    def __init__(self, url: str, filesystem: Any, root: str, calls: Calls) -> None:
        self.url = url
        self.mark = ""
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._calls = calls

    def path_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def files(self) -> dict[str, int]:
        def look() -> dict[str, int]:
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            root = self._root.strip("/") + "/"
            names = {str(path).strip("/"): info for path, info in found.items()}
            return {
                path[len(root) :]: int(info.get("size") or 0) for path, info in names.items() if path.startswith(root)
            }

        return self._run("list", "", look)

    def open(self, name: str) -> OpenSource:
        info = self._info(name)
        return _RemoteSource(self, name, int(info.get("size") or 0))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        def fetch() -> bytes:
            data: bytes = self._filesystem.cat_file(self._path(name), start=offset, end=offset + nbytes)
            if len(data) != nbytes:
                raise ConnectionError(f"expected {nbytes} bytes from byte {offset} on, got {len(data)}")
            return data

        return self._run("read", name, fetch)

    def read_whole(self, name: str) -> bytes:
        check_small(self.path_of(name), int(self._info(name).get("size") or 0))

        def fetch() -> bytes:
            data: bytes = self._filesystem.cat_file(self._path(name))
            return data

        return self._run("read", name, fetch)

    def begin(self, name: str, nbytes: int, part_nbytes: int) -> Upload:
        return _FsspecUpload(self, name, nbytes, part_nbytes)

    def put(self, name: str, data: bytes) -> None:
        self._run("write", name, lambda: self._filesystem.pipe_file(self._path(name), data))

    def remove(self, name: str) -> None:
        try:
            self._run("remove", name, lambda: self._filesystem.rm_file(self._path(name)))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

    def proves(self, name: str, sums: ContentSums) -> bool:
        return False

    def make_durable(self) -> None:
        return None  # an object is durable when the call that made it has returned

    def remove_unfinished(self) -> None:
        return None  # nobody sees an object that is not finished; a later copy goes on with it

    def _info(self, name: str) -> Mapping[str, Any]:
        def look() -> Mapping[str, Any]:
            self._filesystem.invalidate_cache()
            info: Mapping[str, Any] = self._filesystem.info(self._path(name))
            return info

        return self._run("look at", name, look)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _run(self, operation: str, name: str, function: Callable[[], T], *, retries: int | None = None) -> T:
        return self._calls.run(operation, self.path_of(name), function, retries=retries)


class _FsspecUpload:
    """By a file that fsspec opens for writing. A part that fails cannot be sent again, so the whole file is."""

    def __init__(self, store: _FsspecStore, name: str, nbytes: int, part_nbytes: int) -> None:
        self._store = store
        self._name = name
        self._file: Any = None
        self._data = b"" if nbytes <= part_nbytes else None
        if self._data is None:
            filesystem, path = store._filesystem, store._path(name)
            self._file = store._run("create", name, lambda: filesystem.open(path, "wb", block_size=part_nbytes))

    def write(self, number: int, data: bytes) -> None:
        if self._file is None:
            self._data = data
            return
        self._store._run("send", self._name, lambda: self._file.write(data), retries=0)

    def finish(self) -> None:
        if self._file is None:
            self._store.put(self._name, self._data or b"")
            return
        self._store._run("send", self._name, self._file.close, retries=0)

    def abandon(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(Exception):
            self._store._calls.run("abandon", self._name, self._file.discard, retries=0)
        with contextlib.suppress(AttributeError):  # some files do not let it be set
            self._file.closed = True  # else it would be finished when Python collects it


class _S3Store(_FsspecStore):
    repeats_parts = True
    wants_md5 = True

    def begin(self, name: str, nbytes: int, part_nbytes: int) -> Upload:
        if nbytes <= part_nbytes:
            return _FsspecUpload(self, name, nbytes, part_nbytes)
        return _S3Upload(self, name)

    def put(self, name: str, data: bytes) -> None:
        self.call(name, "put_object", Body=data)

    def proves(self, name: str, sums: ContentSums) -> bool:
        info = self._info(name)
        etag = str(info.get("ETag", "")).strip('"')
        # An ETag of another form (encrypted by KMS, other sizes of parts) says nothing.
        return bool(_ETAG.fullmatch(etag)) and info.get("size") == sums.nbytes and etag == sums.etag

    def call(self, name: str, method: str, **arguments: Any) -> Any:
        """Make one call of the API of S3 for an object."""
        bucket, key, _ = self._filesystem.split_path(self._path(name))
        operation = method.replace("_", " ")
        return self._run(operation, name, lambda: self._filesystem.call_s3(method, Bucket=bucket, Key=key, **arguments))

    def unfinished(self, name: str) -> list[str]:
        """The ids of uploads of this object that were not finished, the newest first."""
        bucket, key, _ = self._filesystem.split_path(self._path(name))
        listed = self._run(
            "list uploads of",
            name,
            lambda: self._filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key),
        )
        uploads = [each for each in listed.get("Uploads") or () if each.get("Key") == key]
        uploads.sort(key=lambda each: str(each.get("Initiated", "")), reverse=True)
        return [str(each["UploadId"]) for each in uploads]


class _S3Upload:
    """An upload in parts. One that was cut off goes on: a part that S3 has already, by its MD5, is not sent again."""

    def __init__(self, store: _S3Store, name: str) -> None:
        self._store = store
        self._name = name
        self._parts: dict[int, str] = {}
        self._there: dict[int, tuple[int, str]] = {}
        self._id = ""
        with contextlib.suppress(StorageError):  # who may send may not always list
            newest, *others = store.unfinished(name) or [""]
            if newest:
                self._take_over(newest)
            for upload in others:
                store.call(name, "abort_multipart_upload", UploadId=upload)
        if not self._id:
            self._id = store.call(name, "create_multipart_upload")["UploadId"]

    def _take_over(self, upload: str) -> None:
        marker, there = 0, {}
        while True:
            listed = self._store.call(self._name, "list_parts", UploadId=upload, PartNumberMarker=marker)
            for part in listed.get("Parts") or ():
                there[int(part["PartNumber"])] = (int(part["Size"]), str(part["ETag"]))
            if not listed.get("IsTruncated"):
                break
            marker = int(listed["NextPartNumberMarker"])
        self._id, self._there = upload, there

    def write(self, number: int, data: bytes) -> None:
        size, etag = self._there.get(number + 1, (-1, ""))
        if size != len(data) or etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            sent = self._store.call(self._name, "upload_part", UploadId=self._id, PartNumber=number + 1, Body=data)
            etag = str(sent["ETag"])
        self._parts[number + 1] = etag

    def finish(self) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._parts.items())]
        self._store.call(self._name, "complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})

    def abandon(self) -> None:
        """Leave it: the next try goes on with the parts that are there."""
