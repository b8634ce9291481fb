"""Places that are reached over a network by fsspec: which store a URL means, how calls to it are made, and a disk that
reads from one.

Each call ends within a time limit, and one that failed is repeated if that can help. This module decides which failures
can get better, how long to wait before the next try, and how a failure is told. It never knows what a call does.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.storage.files.disk import Disk, Fingerprint, OpenFile
from robust_dcp.storage.files.paths import is_data_file, local_path_of
from robust_dcp.threads import start_thread

if TYPE_CHECKING:
    from typing_extensions import Buffer


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it. The options of a store are those of fsspec's
    configuration.

    Raises:
        StorageError: fsspec, or the package for this kind of store, is not installed.
        ValueError: fsspec knows no such store.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _not_installed(url, "fsspec") from error
    try:
        # What is there may change while we look at it, so listings are never remembered.
        filesystem, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise _not_installed(url, str(error)) from error
    except ValueError as error:
        raise ValueError(f"{url!r} is a URL that cannot be used: {error}") from error
    if "local" in filesystem.protocol:  # fsspec takes a scheme of one letter for a drive
        raise ValueError(f"{url!r} is a URL that cannot be used: Protocol not known: {url.partition(':')[0]}")
    return filesystem, path


def _not_installed(url: str, what: str) -> StorageError:
    scheme = url.partition("://")[0]
    package = next((name for name, schemes in _PACKAGES.items() if scheme in schemes), "fsspec, and its package for it")
    return StorageError(
        f"{url} is in a store that needs another package ({what}): pip install {package}",
        path=url,
        operation="open",
    )


_PACKAGES: Final = {
    "s3fs": ("s3", "s3a"),
    "gcsfs": ("gs", "gcs"),
    "adlfs": ("az", "abfs", "abfss", "adl"),
    "huggingface_hub": ("hf",),
}
"""The packages of stores, each with the URLs that it is for. They bring fsspec along."""


# Calls.

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT_SECONDS: Final = 0.25
_LONGEST_WAIT_SECONDS: Final = 30.0

_PERMANENT: Final = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EINVAL,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOSYS,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
_MISTAKES: Final = (TypeError, ValueError, LookupError, AttributeError, ImportError, NotImplementedError, MemoryError)
_NO_CREDENTIALS: Final = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "RefreshError"}
)
_WORTH_A_RETRY: Final = frozenset({408, 425, 429})
"""Statuses of HTTP that blame the client, and go away by themselves."""

_BY_CLASS: Final = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (TimeoutError, errno.ETIMEDOUT),
)

_ADVICE: Final = {
    errno.EACCES: "check the credentials of this job and the policy of the bucket; this is not tried again",
    errno.ENOENT: "check the URL: the bucket, or the object in it, does not exist",
    errno.ENOSPC: "free space there, or copy elsewhere; then do the same again, and it goes on where it stopped",
    errno.EDQUOT: "free space there, or copy elsewhere; then do the same again, and it goes on where it stopped",
    errno.ETIMEDOUT: "the store does not answer in time: look at the network, or raise call_timeout_seconds",
}
_AGAIN: Final = "do the same again when the store answers, and it goes on where it stopped"


class Calls:
    """Makes calls to one store, from several threads.

    Args:
        retries: how often a call that failed is made once more.
        timeout_seconds: how long one try of a call may take.
        check_stop: called before each try. What it raises ends the work.

    Attributes:
        n_retries: how many tries were made beyond the first of each call.
    """

    def __init__(
        self,
        *,
        retries: int = 5,
        timeout_seconds: float = 120.0,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self._check_stop = check_stop
        self._lock = threading.Lock()
        self.n_retries = 0

    def run(self, operation: str, path: str, function: Callable[[], T], *, retries: int | None = None) -> T:
        """The result of ``function()``.

        Args:
            operation, path: for the error.
            function: makes the call. It may be running still in another thread after its time is up, so it must do no
                harm if it ends later.
            retries: instead of those of all calls. 0 for what must not be done twice.

        Raises:
            StorageError: it failed and was not worth another try, or all tries have failed.
        """
        allowed = self._retries if retries is None else retries
        for attempt in itertools.count():
            self._check_stop()
            try:
                return self._within_limit(function)
            except Exception as error:
                if attempt >= allowed or not can_get_better(error):
                    if isinstance(error, RobustCheckpointError):  # told by a disk, or by a call within this one
                        raise
                    raise _failure(operation, path, error, attempt + 1) from error
                self._wait_after(operation, path, error, attempt)
        raise RuntimeError("the loop returns or raises")

    def may_try_again(self, operation: str, path: str, error: StorageError, attempt: int) -> bool:
        """Whether to do something of several calls once more. If so, this waits first.

        Args:
            attempt: how often that was done before.
        """
        if attempt >= self._retries or not can_get_better(error):
            return False
        self._check_stop()
        self._wait_after(operation, path, error, attempt)
        return True

    def _wait_after(self, operation: str, path: str, error: Exception, attempt: int) -> None:
        with self._lock:
            self.n_retries += 1
        # Anything from none to all of a time that doubles: clients that failed together do not come back together.
        seconds = random.uniform(0, min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**attempt))
        logger.info("%s %s: %s; tried again in %.1f s", operation, path, _words_of(error), seconds)
        threading.Event().wait(seconds)

    def _within_limit(self, function: Callable[[], T]) -> T:
        """Run it in a thread that is left behind if the time is up: most clients have no limit for a whole call."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        thread = start_thread(run, name="robust_dcp-remote-call")
        thread.join(self._timeout_seconds)
        if not outcome.done():
            raise TimeoutError(f"no answer within {self._timeout_seconds:g} seconds")
        return outcome.result()


def can_get_better(error: BaseException) -> bool:
    """Whether the same call may succeed if it is made once more. One that was repeated in vain is not repeated again by
    the call around it.
    """
    if isinstance(error, RobustCheckpointError):
        return error.__cause__ is not None and not error.was_repeated and can_get_better(error.__cause__)
    status = status_of(error)
    if status is not None and 400 <= status < 500:
        return status in _WORTH_A_RETRY
    if _errno_of(error) in _PERMANENT or type(error).__name__ in _NO_CREDENTIALS:
        return False
    return not isinstance(error, _MISTAKES)


def status_of(error: BaseException | None) -> int | None:
    """The status of HTTP that an error of botocore, gcsfs, adlfs, aiohttp, requests or httpx tells."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code", "code")
        status = next(
            (getattr(each, name) for each in (error, response) for name in names if hasattr(each, name)), None
        )
    if isinstance(status, str) and status.isdecimal():
        status = int(status)
    return status if isinstance(status, int) else None


def _errno_of(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((number for kind, number in _BY_CLASS if isinstance(error, kind)), None)


def _words_of(error: BaseException) -> str:
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{words or 'no reason was given'} ({type(error).__name__})"


def _failure(operation: str, path: str, error: Exception, attempts: int) -> StorageError:
    number = errno.EACCES if type(error).__name__ in _NO_CREDENTIALS else _errno_of(error)
    tries = f" after {attempts} tries" if attempts > 1 else ""
    advice = _ADVICE.get(number or 0, _AGAIN)
    message = f"{operation} {path}: {_words_of(error)}{tries}; {advice}"
    failure = StorageError(message, path=path, errno=number, operation=operation)
    failure.was_repeated = attempts > 1
    return failure


# Copies.


_MIB: Final = 1 << 20
_LEAST_PART_NBYTES: Final = 5 * _MIB  # S3 takes no smaller parts


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """How a checkpoint is copied.

    Args:
        threads: how many files are sent at once.
        part_bytes: how much is sent in one call. A file of more than 9,000 parts gets larger ones, since S3 takes at
            most 10,000.
        limit_bytes_per_second: how much is sent in a second at most, by all threads of this process together. ``None``
            sets no limit.
        retries: how often a call that failed is made once more, if that can help.
        call_timeout_seconds: how long one call may take.

    Raises:
        ValueError: an option is out of range.
    """

    threads: int = 8
    part_bytes: int = 16 * _MIB
    limit_bytes_per_second: float | None = None
    retries: int = 5
    call_timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        least = {"threads": 1, "part_bytes": _LEAST_PART_NBYTES, "retries": 0}
        for name, at_least in least.items():
            if getattr(self, name) < at_least:
                raise ValueError(f"{name} must be at least {at_least}, got {getattr(self, name)}")
        for name in ("limit_bytes_per_second", "call_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


DEFAULT_COPY_OPTIONS: Final = CopyOptions()


# A disk that reads.


def disk_at(place: str) -> Disk:
    """The file system that a place, a path or a URL, is in.

    Raises:
        StorageError, ValueError: as :func:`filesystem_of`.
    """
    return Disk() if local_path_of(place) is not None else RemoteDisk(place)


_READ_AHEAD_NBYTES: Final = 1 << 20
"""A call takes some ten milliseconds. So an index is read in pieces of this size, although few bytes are wanted."""

_BLOCKS_KEPT: Final = 32
_WHAT_CHANGES: Final = ("ETag", "etag", "md5Hash", "md5", "generation", "mtime", "LastModified", "updated", "created")


class _RemoteFile(OpenFile):
    """An open file of a store.

    Attributes:
        fetch: gives bytes ``start`` to ``end`` of it.
    """

    fetch: Callable[[int, int], bytes] = lambda start, end: b""


def _refuse(self: RemoteDisk, place: OpenFile | str, *arguments: Any, **options: Any) -> Any:
    """A method in place of each that a store does not have. A checkpoint in a store is written by robust_dcp.drain, not
    by a writer that needs renames and fsync. What a store can do is to put a small file as a whole, and to remove one.
    """
    path = place if isinstance(place, str) else place.path
    raise StorageError(
        f"write {path}: robust_dcp only reads here; save to a directory with RobustWriter(path, drain_to=url)",
        path=path,
        errno=errno.EROFS,
        operation="write",
    )


_READ_ONLY: Final[Any] = _refuse


class RemoteDisk(Disk):
    """Reads files of a store, puts small ones there, and removes files. All paths are URLs below the one that it was
    made for.

    Args:
        url: of a checkpoint.
        calls: how calls are made, and repeated.

    Attributes:
        filesystem: that of fsspec.
    """

    def __init__(self, url: str, calls: Calls | None = None) -> None:
        self.filesystem, _ = filesystem_of(url)
        self._calls = calls or Calls()

    def open_read(self, path: str, *, direct: bool | None = False, flags: int = os.O_RDONLY) -> OpenFile:
        info = self.info(path)
        if info.get("type") == "directory":
            raise StorageError(f"open {path}: it is a directory", path=path, errno=errno.EISDIR, operation="open")
        size = info.get("size")
        if not isinstance(size, int):
            why = "the store does not say how long it is"
            raise StorageError(f"open {path}: {why}", path=path, errno=errno.EINVAL, operation="open")
        file = _RemoteFile(path, -1, nbytes=size)
        # The cache asks for whole blocks, also at the end of the file.
        file.fetch = lambda start, end: self._fetch(path, start, min(end, size))
        if not is_data_file(path.rpartition("/")[2]):
            from fsspec.caching import BlockCache  # fsspec is installed only where stores are used

            file.fetch = BlockCache(_READ_AHEAD_NBYTES, file.fetch, size, maxblocks=_BLOCKS_KEPT)._fetch
        if direct is not False:
            file.why_buffered = "it is in a remote store"
        return file

    def close(self, file: OpenFile) -> None:
        return None

    def pread_into(self, file: OpenFile, buffer: Buffer | Sequence[Buffer], offset: int) -> int:
        file = cast("_RemoteFile", file)
        buffers: Sequence[Any] = buffer if isinstance(buffer, (list, tuple)) else [buffer]
        views = [memoryview(each).cast("B") for each in buffers]
        end = min(offset + sum(view.nbytes for view in views), file.nbytes)
        if end <= offset:
            return 0
        is_large = end - offset > _BLOCKS_KEPT // 2 * _READ_AHEAD_NBYTES
        data = memoryview(self._fetch(file.path, offset, end) if is_large else file.fetch(offset, end))
        done = 0
        for view in views:
            part = data[done : done + view.nbytes]
            view[: part.nbytes] = part
            done += part.nbytes
        return done

    def _fetch(self, path: str, start: int, end: int) -> bytes:
        def fetch() -> bytes:
            data: bytes = self.filesystem.cat_file(self.path_in_store(path), start=start, end=end)
            if len(data) != end - start:  # a connection that was cut off, or a file that was replaced
                raise ConnectionError(f"expected {end - start} bytes from byte {start} on, got {len(data)}")
            return data

        return self._calls.run("read", path, fetch)

    def list_directory(self, path: str) -> list[str]:
        return sorted(self.entries(path))

    def entries(self, path: str) -> dict[str, Mapping[str, Any]]:
        """What the store tells of each file and directory in a directory, by name.

        Raises:
            StorageError: it is not there, or cannot be listed.
        """

        def look() -> dict[str, Mapping[str, Any]]:
            self.filesystem.invalidate_cache()
            directory = self.path_in_store(path).rstrip("/")
            by_path = {str(info["name"]).strip("/"): info for info in self.filesystem.ls(directory, detail=True)}
            by_path.pop(directory.strip("/"), None)  # the marker of an empty directory, or a file
            return {name.rpartition("/")[2]: info for name, info in by_path.items()}

        return self._calls.run("list", path, look)

    def directories_in(self, path: str) -> list[str]:
        return sorted(name for name, info in self.entries(path).items() if info.get("type") == "directory")

    def files_below(self, path: str) -> Iterator[tuple[int, float]]:
        for name, info in self.entries(path).items():
            if info.get("type") == "directory":
                yield from self.files_below(f"{path}/{name}")
            else:
                yield int(info.get("size") or 0), 0.0  # no store tells it in the way of another

    def exists(self, path: str) -> bool:
        return self.fingerprint(path) is not None

    def replace_file(self, path: str, data: Buffer, *, mark: str | None = None, durable: bool = True) -> None:
        """Put a file there, over an old one. Whoever looks finds one of them, and it is durable."""
        content = bytes(data)
        self._calls.run("send", path, lambda: self.filesystem.pipe_file(self.path_in_store(path), content))

    def write_file(self, path: str, data: Buffer | Sequence[Buffer], *, durable: bool = True) -> Fingerprint:
        parts = data if isinstance(data, (list, tuple)) else [data]
        content = b"".join(bytes(cast("bytes", part)) for part in parts)
        self.replace_file(path, content)
        return 0, len(content), 0

    def unlink(self, path: str) -> None:
        self._calls.run("remove", path, lambda: self.filesystem.rm_file(self.path_in_store(path)))

    def fingerprint(self, path: str) -> Fingerprint | None:
        try:
            info = self.info(path)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
        return 0, int(info.get("size") or 0), _version_of(info)

    def modified_seconds(self, path: str) -> float:
        modified: Callable[[], float] = lambda: self.filesystem.modified(self.path_in_store(path)).timestamp()  # noqa: E731
        return self._calls.run("look at", path, modified)

    def resolve(self, path: str) -> str:
        return path  # a store has no links

    def cached_nbytes(self, file: OpenFile, offset: int, nbytes: int) -> int:
        return nbytes

    def is_of_this_machine(self, path: str) -> bool:
        return False

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        return None

    def use_page_cache(self, file: OpenFile, why: str) -> None:
        return None

    open_new = pwrite = preallocate = truncate = fsync = fsync_directory = rename = _READ_ONLY
    mkdirs = rmdir = room = _READ_ONLY

    def info(self, path: str) -> Mapping[str, Any]:
        """What the store tells of a file or directory.

        Raises:
            StorageError: it is not there, or the store does not answer.
        """

        def look() -> Mapping[str, Any]:
            self.filesystem.invalidate_cache()
            info: Mapping[str, Any] = self.filesystem.info(self.path_in_store(path))
            return info

        return self._calls.run("look at", path, look)

    def path_in_store(self, url: str) -> str:
        """The path of a file in the file system."""
        return str(self.filesystem._strip_protocol(url))


def _version_of(info: Mapping[str, Any]) -> int:
    """A number that differs if the contents do, as far as the store tells."""
    versions = repr([(name, info[name]) for name in _WHAT_CHANGES if info.get(name) is not None])
    return int.from_bytes(hashlib.blake2b(versions.encode(), digest_size=7).digest(), "little")
