"""In which reads the items of a load come from their files.

Owns the order by place, and which items are read together. A pure function of the items and their places. Called by
``read_items``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.garbage import without_garbage_collection
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.layouts.read_head import FileHead, StoredTensor
from robust_dcp.storage.metadata.metadata_file import StorageInfo
from robust_dcp.storage.reading.read_file import ReadFile

__all__ = ["SMALL_NBYTES", "Read", "ReadGroup", "check_end", "in_groups", "name_of", "reads_of"]

SMALL_NBYTES: Final = 64 << 10
"""Reading all of an item of this length takes no longer than reading a part of it; and a gap of it is read over."""


class Read(NamedTuple):
    """One read item, and where it lies.

    Attributes:
        item: what the planner asked for.
        relative_path, offset, nbytes: of the stored item.
        transforms: what its bytes went through, by name.
        dtype, shape: of the stored chunk according to the metadata; ``None`` where it takes a search to know.
    """

    item: ReadItem
    relative_path: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]
    dtype: torch.dtype | None
    shape: torch.Size | None

    @property
    def name(self) -> str:
        """What the item is called in errors."""
        return name_of(self.item)

    @property
    def expected(self) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape, if they are known."""
        return None if self.dtype is None or self.shape is None else (self.dtype, tuple(self.shape))

    def in_head(self, head: FileHead | None, file: str) -> StoredTensor | None:
        """What the head of its file says of it, or :class:`CorruptCheckpoint`; ``None`` in a file of records."""
        return None if head is None else head.find(self.item.storage_index.fqn, self.offset, self.nbytes, file)

    @property
    def is_whole(self) -> bool:
        """Whether all of the stored item is wanted."""
        return self.item.type == LoadItemType.BYTE_IO or self.item.lengths == self.shape


class ReadGroup(NamedTuple):
    """Items of one file that are read together: bytes ``start`` to ``end``."""

    reads: Sequence[Read]
    relative_path: str
    start: int
    end: int


def name_of(item: ReadItem) -> str:
    """What an item is called in errors."""
    index = item.storage_index
    return index.fqn if not index.offset else f"{index.fqn} at {list(index.offset)}"


def reads_of(items: Sequence[ReadItem], metadata: Metadata, directory: str, *, in_order: bool = True) -> list[Read]:
    """Where ``items`` lie, in the order of the files and of their places, or else in the order of ``items``.

    Raises:
        CorruptCheckpoint: ``metadata`` does not say where an item lies.
    """
    with without_garbage_collection():
        reads = [_read_of(item, metadata, directory) for item in items]
    if in_order:
        reads.sort(key=_place)
    return reads


def _read_of(item: ReadItem, metadata: Metadata, directory: str) -> Read:
    index = item.storage_index
    info: Any = metadata.storage_data.get(index)
    if not isinstance(info, StorageInfo):
        raise _not_written(item, info, directory)
    dtype = shape = None
    entry = metadata.state_dict_metadata.get(index.fqn)
    number = index.index
    if isinstance(entry, TensorStorageMetadata) and number is not None and 0 <= number < len(entry.chunks):
        chunk = entry.chunks[number]
        if chunk.offsets == index.offset:
            dtype, shape = entry.properties.dtype, torch.Size(chunk.sizes)
    transforms = tuple(getattr(info, "transform_descriptors", None) or ())
    return Read(item, info.relative_path, info.offset, info.length, transforms, dtype, shape)


def in_groups(reads: Sequence[Read], block_nbytes: int) -> Iterator[Read | ReadGroup]:
    """Put items that lie next to each other together, up to ``block_nbytes`` bytes.

    A large item, one of which only a part is wanted, and one with transforms stand alone.

    Args:
        reads: in the order of their places.
    """
    group: list[Read] = []
    path, start, end = "", 0, 0
    for read in reads:
        read_start, read_end = read.offset, read.offset + read.nbytes
        is_small = read.nbytes <= SMALL_NBYTES or (read.nbytes <= block_nbytes and read.is_whole)
        if not is_small or read.transforms or read.nbytes > block_nbytes:
            yield read
            continue
        fits = read.relative_path == path and read_start - end <= SMALL_NBYTES and read_end - start <= block_nbytes
        if group and not fits:
            yield ReadGroup(group, path, start, end)
            group = []
        if not group:
            path, start, end = read.relative_path, read_start, read_start
        group.append(read)
        end = max(end, read_end)
    if group:
        yield ReadGroup(group, path, start, end)


def check_end(read: Read, file: ReadFile) -> None:
    """Before anything is allocated for it: the file must hold all of the item.

    Raises:
        CorruptCheckpoint: it ends before.
    """
    if read.offset + read.nbytes > file.nbytes:
        raise CorruptCheckpoint(
            f"item {read.name!r} in {file.path} is damaged: expected {read.nbytes} bytes at offset {read.offset}, "
            f"found a file of {file.nbytes} bytes; take another checkpoint, or restore the file",
            file=file.path,
            item=read.name,
            expected=f"{read.nbytes} bytes at offset {read.offset}",
            found=f"a file of {file.nbytes} bytes",
        )


def _place(read: Read) -> tuple[str, int]:
    return read.relative_path, read.offset


def _not_written(item: ReadItem, info: Any, directory: str) -> CorruptCheckpoint:
    name = name_of(item)
    return CorruptCheckpoint(
        f"{METADATA_NAME} in {directory} lists {name!r} but not where its data lies: it was never written",
        file=METADATA_NAME,
        item=name,
        expected="storage info",
        found=type(info).__name__,
    )
