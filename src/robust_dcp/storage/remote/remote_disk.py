"""A :class:`Disk` that reads from a remote store by ranges, and writes nothing.

This module turns the reading calls of ``Disk`` into calls of fsspec. ``RobustReader`` reads a checkpoint at a URL by
it, just as it reads a directory.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import is_data_file
from robust_dcp.storage.remote.store import Calls, filesystem_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RemoteDisk"]

_READ_AHEAD_NBYTES: Final = 1 << 20
"""A call takes some ten milliseconds. So an index is read in pieces of this size, although few bytes are wanted."""

_BLOCKS_KEPT: Final = 32
_WHAT_CHANGES: Final = ("ETag", "etag", "md5Hash", "md5", "generation", "mtime", "LastModified", "updated", "created")


class _RemoteFile(OpenFile):
    """An open file of a store.

    Attributes:
        nbytes: its size when it was opened.
        version: what the store said of its contents then.
        fetch: gives bytes ``start`` to ``end`` of it.
    """

    __slots__ = ("fetch", "nbytes", "version")

    def __init__(self, path: str, nbytes: int, version: int) -> None:
        super().__init__(path, -1)
        self.nbytes = nbytes
        self.version = version
        self.fetch: Callable[[int, int], bytes] = lambda start, end: b""


class RemoteDisk(Disk):
    """Reads files of a store. All paths are URLs below the one that it was made for.

    Args:
        url: of a checkpoint.
        storage_options: for fsspec.
        calls: how calls are made, and repeated.
    """

    def __init__(
        self, url: str, *, storage_options: Mapping[str, Any] | None = None, calls: Calls | None = None
    ) -> None:
        self._filesystem, _ = filesystem_of(url, storage_options)
        self._calls = calls or Calls()

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        info = self._info(path)
        if info.get("type") == "directory":
            raise StorageError(f"open {path}: it is a directory", path=path, errno=errno.EISDIR, operation="open")
        size = info.get("size")
        if not isinstance(size, int):
            why = "the store does not say how long it is"
            raise StorageError(f"open {path}: {why}", path=path, errno=errno.EINVAL, operation="open")
        file = _RemoteFile(path, size, _version_of(info))
        # The cache asks for whole blocks, also at the end of the file.
        file.fetch = lambda start, end: self._fetch(path, start, min(end, size))
        if not is_data_file(path.rpartition("/")[2]):
            from fsspec.caching import BlockCache  # fsspec is installed only where stores are used

            file.fetch = BlockCache(_READ_AHEAD_NBYTES, file.fetch, size, maxblocks=_BLOCKS_KEPT)._fetch
        if direct:
            file.why_buffered = "it is in a remote store"
        return file

    def close(self, file: OpenFile) -> None:
        return None

    def pread_into(self, file: OpenFile, buffer: Buffer | Sequence[Buffer], offset: int) -> int:
        opened = _opened_here(file)
        buffers: Sequence[Any] = buffer if isinstance(buffer, (list, tuple)) else [buffer]
        views = [memoryview(each).cast("B") for each in buffers]
        end = min(offset + sum(view.nbytes for view in views), opened.nbytes)
        if end <= offset:
            return 0
        is_large = end - offset > _BLOCKS_KEPT // 2 * _READ_AHEAD_NBYTES
        data = memoryview(self._fetch(opened.path, offset, end) if is_large else opened.fetch(offset, end))
        done = 0
        for view in views:
            part = data[done : done + view.nbytes]
            view[: part.nbytes] = part
            done += part.nbytes
        return done

    def _fetch(self, path: str, start: int, end: int) -> bytes:
        def fetch() -> bytes:
            data: bytes = self._filesystem.cat_file(self._path(path), start=start, end=end)
            if len(data) != end - start:  # a connection that was cut off, or a file that was replaced
                raise ConnectionError(f"expected {end - start} bytes from byte {start} on, got {len(data)}")
            return data

        return self._calls.run("read", path, fetch)

    def list_directory(self, path: str) -> list[str]:
        def look() -> list[str]:
            self._filesystem.invalidate_cache()
            directory = self._path(path).rstrip("/")
            names = [str(each["name"]).rstrip("/") for each in self._filesystem.ls(directory, detail=True)]
            return sorted({name.rpartition("/")[2] for name in names if name.strip("/") != directory.strip("/")})

        return self._calls.run("list", path, look)

    def exists(self, path: str) -> bool:
        try:
            self._info(path)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise
        return True

    def size(self, file: OpenFile) -> int:
        return _opened_here(file).nbytes

    def fingerprint(self, path: str) -> tuple[int, int, int]:
        info = self._info(path)
        return 0, int(info.get("size") or 0), _version_of(info)

    def room(self, path: str) -> tuple[int, int]:
        _refuse("look at", path)

    def modified_seconds(self, path: str) -> float:
        modified: Callable[[], float] = lambda: self._filesystem.modified(self._path(path)).timestamp()  # noqa: E731
        return self._calls.run("look at", path, modified)

    def resolve(self, path: str) -> str:
        return path  # a store has no links

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        return nbytes

    def is_at(self, file: OpenFile, path: str) -> bool:
        return isinstance(file, _RemoteFile) and self.exists(path) and _version_of(self._info(path)) == file.version

    def is_of_this_machine(self, path: str) -> bool:
        return False

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        return None

    def unlock(self, file: OpenFile) -> None:
        return None

    # A checkpoint in a store is written by robust_dcp.drain, not by a writer that needs renames and fsync.

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        _refuse("create", path)

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        return None

    def pwrite(self, file: OpenFile, data: Buffer | Sequence[Buffer], offset: int) -> None:
        _refuse("write", file.path)

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        _refuse("preallocate", file.path)

    def truncate(self, file: OpenFile, nbytes: int) -> None:
        _refuse("truncate", file.path)

    def fsync(self, file: OpenFile) -> None:
        _refuse("fsync", file.path)

    def fsync_directory(self, path: str) -> None:
        _refuse("fsync directory", path)

    def rename(self, source: str, target: str) -> None:
        _refuse("rename", target)

    def symlink(self, target: str, path: str) -> None:
        _refuse("link", path)

    def unlink(self, path: str) -> None:
        _refuse("remove", path)

    def mkdirs(self, path: str) -> list[str]:
        _refuse("create directory", path)

    def rmdir(self, path: str) -> None:
        _refuse("remove directory", path)

    def _info(self, path: str) -> Mapping[str, Any]:
        def look() -> Mapping[str, Any]:
            self._filesystem.invalidate_cache()
            info: Mapping[str, Any] = self._filesystem.info(self._path(path))
            return info

        return self._calls.run("look at", path, look)

    def _path(self, url: str) -> str:
        return str(self._filesystem._strip_protocol(url))


def _opened_here(file: OpenFile) -> _RemoteFile:
    if not isinstance(file, _RemoteFile):
        raise TypeError(f"{file!r} was not opened by this disk")
    return file


def _version_of(info: Mapping[str, Any]) -> int:
    """A number that differs if the contents do, as far as the store tells."""
    said = repr([(name, info[name]) for name in _WHAT_CHANGES if info.get(name) is not None])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "little")


def _refuse(operation: str, path: str) -> NoReturn:
    raise StorageError(
        f"{operation} {path}: robust_dcp only reads here; save to a directory with RobustWriter(path, drain_to=url)",
        path=path,
        errno=errno.EROFS,
        operation=operation,
    )
