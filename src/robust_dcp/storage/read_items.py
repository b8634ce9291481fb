"""One load's reads: many items from many files at once, handed to the planner one by one.

Owns the order of reads, their number in flight, and the calls to the planner, which all come from the calling thread.
Never decodes an item itself (``stored_item``, ``objects``). Called by ``reader``.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from errno import ENOENT
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.disk import Disk, OpenFile
from robust_dcp.storage.metadata_file import StorageInfo
from robust_dcp.storage.objects import check_object
from robust_dcp.storage.paths import METADATA_NAME, locate
from robust_dcp.storage.stored_item import ItemBytes, ItemInFile, ItemInMemory, check_members, read_tensor, takes_bytes

__all__ = ["ReadOptions", "read_items"]

# Reads submitted ahead, for each thread: enough to keep it busy while the calling thread copies.
_AHEAD_PER_THREAD: Final = 4


@dataclass(frozen=True)
class ReadOptions:
    """The options of ``RobustReader`` that concern its items; see there."""

    threads: int
    verify_checksums: bool
    trusted: bool
    buffer_bytes: int
    extension_registry: Any


def read_items(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    metadata: Metadata,
    directory: str,
    disk: Disk,
    options: ReadOptions,
) -> None:
    """Read ``items`` from the files in ``directory`` and hand them to ``planner``.

    The first error, of whichever thread, ends all reads and is raised when no thread is left that could still write
    into a target. Targets may hold parts of the data then. Every file has been closed in any case.
    """
    reads = [_read_of(item, metadata, directory) for item in items]
    reads.sort(key=lambda read: (read.relative_path, read.offset))
    _Load(reads, planner, directory, disk, options).run()


@dataclass(frozen=True)
class _Read:
    """One read item, and where it lies."""

    item: ReadItem
    name: str
    relative_path: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]
    expected: tuple[torch.dtype, tuple[int, ...]] | None


class _Pending(NamedTuple):
    read: _Read
    target: torch.Tensor | None
    result: Future[Any]


class _Stopped(Exception):
    """Ends a read because another one failed."""


class _Load:
    """The state of one :func:`read_items`."""

    def __init__(
        self, reads: list[_Read], planner: LoadPlanner, directory: str, disk: Disk, options: ReadOptions
    ) -> None:
        self._reads = reads
        self._planner = planner
        self._directory = directory
        self._disk = disk
        self._options = options
        # A planner whose commit_tensor does nothing cannot depend on when it is called: its targets are asked for
        # first, and read into. From any other (Megatron-Core's) a target is taken only once the data is there, and
        # committed at once.
        self._targets_first = getattr(type(planner), "commit_tensor", None) is DefaultLoadPlanner.commit_tensor
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="robust_dcp-read")
        self._pending: deque[_Pending] = deque()
        self._pending_nbytes = 0
        self._files: dict[str, OpenFile] = {}
        self._reads_left = Counter(read.relative_path for read in reads)
        self._errors: list[BaseException] = []  # in the order in which they happened

    def run(self) -> None:
        try:
            for read in self._reads:
                while self._pending and self._is_full(read.nbytes):
                    self._finish_first()
                self._start(read)
            while self._pending:
                self._finish_first()
        except _Stopped:
            raise self._errors[0] from None
        except BaseException as error:
            self._errors.append(error)  # for the reads that still run
            raise
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            for relative_path in list(self._files):
                self._close(relative_path)

    def _is_full(self, nbytes: int) -> bool:
        return (
            len(self._pending) >= self._options.threads * _AHEAD_PER_THREAD
            or self._pending_nbytes + nbytes > self._options.buffer_bytes
        )

    def _start(self, read: _Read) -> None:
        target = None
        if self._targets_first and read.item.type != LoadItemType.BYTE_IO:
            target = self._resolve(read.item)
        file = self._open(read)
        self._pending.append(_Pending(read, target, self._pool.submit(self._run, read, target, file)))
        self._pending_nbytes += read.nbytes

    def _finish_first(self) -> None:
        """Wait for the oldest read and give the planner what it read."""
        read, target, future = self._pending.popleft()
        result = future.result()
        self._pending_nbytes -= read.nbytes
        self._reads_left[read.relative_path] -= 1
        if self._reads_left[read.relative_path] == 0:
            self._close(read.relative_path)
        if read.item.type == LoadItemType.BYTE_IO:
            self._planner.load_bytes(read.item, io.BytesIO(result))
            return
        if target is None:
            target = self._resolve(read.item)
        if result is not None:  # else it was read straight into the target
            target.copy_(result)
        self._planner.commit_tensor(read.item, target)

    def _resolve(self, item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self._planner.resolve_tensor(item).detach()
        if target.size() != torch.Size(item.lengths):
            raise ValueError(
                f"the planner asked for {list(item.lengths)} elements of {item.storage_index}, and gave a tensor of "
                f"size {list(target.size())} for them"
            )
        return target

    def _open(self, read: _Read) -> OpenFile:
        if read.relative_path not in self._files:
            path = locate(self._disk, self._directory, read.relative_path, file=self._directory)
            try:
                self._files[read.relative_path] = self._disk.open_read(path)
            except StorageError as error:
                if error.errno != ENOENT:
                    raise
                raise CorruptCheckpoint(
                    f"{path}, which holds item {read.name!r}, is missing",
                    file=path,
                    item=read.name,
                    expected="a file",
                    found="none",
                ) from error
        return self._files[read.relative_path]

    def _close(self, relative_path: str) -> None:
        # That closing a file failed says nothing about what was read from it, and must not keep others open.
        with contextlib.suppress(StorageError):
            self._disk.close(self._files.pop(relative_path))

    def _check_stop(self) -> None:
        if self._errors:
            raise _Stopped

    def _run(self, read: _Read, target: torch.Tensor | None, file: OpenFile) -> Any:
        """Read one item, on a thread of the pool: bytes, a tensor, or ``None`` where ``target`` has been filled."""
        try:
            stored: ItemBytes = ItemInFile(self._disk, file, read.name, read.offset, read.nbytes, self._check_stop)
            if read.transforms:
                stored = _transformed(stored, read.transforms, self._options.extension_registry)
            if read.item.type == LoadItemType.BYTE_IO:
                data = stored.read(0, stored.nbytes)
                if self._options.verify_checksums:
                    check_members(stored, data)
                if not self._options.trusted:
                    check_object(data, file=stored.file, item=stored.item)
                return data
            return read_tensor(
                stored,
                read.item.storage_offsets,
                read.item.lengths,
                into=target if target is not None and takes_bytes(target) else None,
                expected=read.expected,
                verify_checksum=self._options.verify_checksums,
                trusted=self._options.trusted,
            )
        except _Stopped:
            raise
        except BaseException as error:
            self._errors.append(error)
            raise


def _read_of(item: ReadItem, metadata: Metadata, directory: str) -> _Read:
    index = item.storage_index
    name = index.fqn if not index.offset else f"{index.fqn} at {list(index.offset)}"
    info: Any = metadata.storage_data.get(index)
    if not isinstance(info, StorageInfo):
        raise CorruptCheckpoint(
            f"{METADATA_NAME} in {directory} lists {name!r} but not where its data lies: it was never written",
            file=METADATA_NAME,
            item=name,
            expected="storage info",
            found=type(info).__name__,
        )
    return _Read(
        item=item,
        name=name,
        relative_path=info.relative_path,
        offset=info.offset,
        nbytes=info.length,
        transforms=tuple(getattr(info, "transform_descriptors", None) or ()),
        expected=_expected(metadata, item),
    )


def _expected(metadata: Metadata, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and shape of the stored chunk according to the metadata; ``None`` if it takes a search to know."""
    entry = metadata.state_dict_metadata.get(item.storage_index.fqn)
    number = item.storage_index.index
    if not isinstance(entry, TensorStorageMetadata) or number is None or not 0 <= number < len(entry.chunks):
        return None
    chunk = entry.chunks[number]
    if chunk.offsets != item.storage_index.offset:
        return None
    return entry.properties.dtype, tuple(chunk.sizes)


def _transformed(stored: ItemBytes, transforms: Sequence[str], registry: Any) -> ItemInMemory:
    """Undo what stock's extensions (compression, say) did to the item's bytes."""
    if registry is None:
        from torch.distributed.checkpoint._extension import ExtensionRegistry  # private, and rarely needed

        registry = ExtensionRegistry()
    extensions = registry.from_descriptor_list(transforms)
    stream: Any = io.BytesIO(stored.read(0, stored.nbytes))
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        return ItemInMemory(stored.file, stored.item, stream.read(-1))
    except Exception as error:  # the extension's own kinds
        raise CorruptCheckpoint(
            f"item {stored.item!r} in {stored.file} cannot be decoded by {list(transforms)}: {error}",
            file=stored.file,
            item=stored.item,
            expected=f"bytes encoded by {list(transforms)}",
            found=str(error),
        ) from error
