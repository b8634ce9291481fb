"""In which order the items of a load are read, and which of them are read together.

The order is that of their places in the files. These are pure functions of the items and their places. ``plan_reader``
calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.layouts.footer import item_id
from robust_dcp.storage.layouts.read_head import FileHead, StoredTensor
from robust_dcp.storage.metadata.metadata_file import StorageInfo
from robust_dcp.storage.metadata.stored_pickle import without_garbage_collection
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.planned_items import WholeTensors

__all__ = ["SMALL_NBYTES", "PlacedReads", "Read", "ReadGroup", "check_end", "in_groups", "name_of", "reads_of"]

Int64 = npt.NDArray[np.int64]

SMALL_NBYTES: Final = 64 << 10
"""An item up to this length is read whole: that takes no longer than reading a part of it. A gap up to this length
between two items is read as well.
"""


class Read(NamedTuple):
    """One read item, and where it lies.

    Attributes:
        item: what the planner asked for.
        relative_path, offset, nbytes: where the stored item lies: its file, first byte and length.
        transforms: the names of the transforms that its bytes went through when they were saved.
        dtype, shape: those of the stored chunk according to the metadata; ``None`` where finding them takes a search.
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
        """The name of the item in errors."""
        return name_of(self.item)

    @property
    def item_id(self) -> int:
        """Which item it is (:func:`~robust_dcp.storage.layouts.footer.item_id`)."""
        return item_id(self.item.storage_index.fqn, self.item.storage_index.offset or ())

    @property
    def expected(self) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape, if both are known."""
        return None if self.dtype is None or self.shape is None else (self.dtype, tuple(self.shape))

    def in_head(self, head: FileHead | None, file: str) -> StoredTensor | None:
        """The item's entry in the head of its file; ``None`` in a file of records.

        Raises:
            CorruptCheckpoint: the file has a head, and it has no such entry.
        """
        if head is None:
            return None
        index = self.item.storage_index
        return head.find(index.fqn, index.offset or (), self.offset, self.nbytes, file)

    @property
    def is_whole(self) -> bool:
        """Whether all of the stored item is wanted."""
        return self.item.type == LoadItemType.BYTE_IO or self.item.lengths == self.shape


class PlacedReads(Sequence[Read]):
    """The reads of a load, ordered by file and by place in the file.

    Args:
        whole: the tensors that are read as they were saved. A :class:`Read` is made of one only if somebody asks for
            it.
        others: everything else.
    """

    def __init__(self, whole: WholeTensors, others: Sequence[Read]) -> None:
        self.whole = whole
        self._others = others
        self.paths = sorted({*whole.files, *(read.relative_path for read in others)})
        number_of = {path: number for number, path in enumerate(self.paths)}
        of_whole = np.array([number_of[path] for path in whole.files], dtype=np.int64)[whole.file_of]
        path_of = np.concatenate((of_whole, _column(number_of[read.relative_path] for read in others)))
        start = np.concatenate((whole.start, _column(read.offset for read in others)))
        nbytes = np.concatenate((whole.nbytes, _column(read.nbytes for read in others)))
        order = np.lexsort((start, path_of))
        self.item_ids: Int64 = np.concatenate((whole.items, _column(read.item_id for read in others)))[order]
        self.order: list[int] = order.tolist()
        self.path_of: list[int] = path_of[order].tolist()
        self.start: list[int] = start[order].tolist()
        self.nbytes: list[int] = nbytes[order].tolist()

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, place: int) -> Read: ...

    @overload
    def __getitem__(self, place: slice) -> list[Read]: ...

    def __getitem__(self, place: int | slice) -> Read | list[Read]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        number, whole = int(self.order[place]), self.whole
        if number >= len(whole):
            return self._others[number - len(whole)]
        kind = whole.kinds[int(whole.kind_of[number])]
        path, start, nbytes = self.paths[self.path_of[place]], self.start[place], self.nbytes[place]
        return Read(whole.item(number), path, start, nbytes, (), kind.dtype, kind.lengths)

    def alone(self, block_nbytes: int) -> npt.NDArray[np.bool_]:
        """Which items are read by themselves: large ones, those with transforms, and those that are wanted only in
        part.
        """
        n_whole = len(self.whole)
        is_alone = np.zeros(len(self), dtype=np.bool_)
        for number, read in enumerate(self._others, n_whole):
            is_alone[number] = bool(read.transforms) or (read.nbytes > SMALL_NBYTES and not read.is_whole)
        return is_alone[self.order] | (np.array(self.nbytes, dtype=np.int64) > block_nbytes)


class ReadGroup:
    """Items of one file that are read together: bytes ``start`` to ``end``.

    Args:
        reads: all reads of the load.
        places: which of them belong to this group.
    """

    def __init__(self, reads: PlacedReads, places: list[int], end: int) -> None:
        self._all = reads
        self.places = places
        self.relative_path = reads.paths[reads.path_of[places[0]]]
        self.start = reads.start[places[0]]
        self.end = end

    @cached_property
    def reads(self) -> list[Read]:
        """The items, one by one."""
        return [self._all[place] for place in self.places]

    def item_ids(self) -> tuple[Int64, Int64, Int64]:
        """For each item where it begins and ends in the file, and its identity."""
        begin = np.array([self._all.start[place] for place in self.places], dtype=np.int64)
        nbytes = np.array([self._all.nbytes[place] for place in self.places], dtype=np.int64)
        return begin, begin + nbytes, self._all.item_ids[self.places]

    def numbers(self) -> Int64:
        """For each item its number among the load's whole tensors. Other items have higher numbers."""
        return np.array([self._all.order[place] for place in self.places], dtype=np.int64)


def name_of(item: ReadItem) -> str:
    """The name of an item in errors."""
    index = item.storage_index
    return index.fqn if not index.offset else f"{index.fqn} at {list(index.offset)}"


def reads_of(items: Sequence[ReadItem], metadata: Metadata, directory: str) -> list[Read]:
    """Find where ``items`` lie.

    Raises:
        CorruptCheckpoint: ``metadata`` does not say where an item lies.
    """
    with without_garbage_collection():
        return [_read_of(item, metadata, directory) for item in items]


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


def in_groups(reads: PlacedReads, block_nbytes: int) -> list[Read | ReadGroup]:
    """Put items that lie next to each other into groups of up to ``block_nbytes`` bytes. Some items stay alone."""
    is_alone = reads.alone(block_nbytes)
    found: dict[int, Read | ReadGroup] = {place: reads[place] for place in np.flatnonzero(is_alone).tolist()}
    places = np.flatnonzero(~is_alone)
    path_of, start = np.array(reads.path_of, dtype=np.int64)[places], np.array(reads.start, dtype=np.int64)[places]
    end = start + np.array(reads.nbytes, dtype=np.int64)[places]
    for in_file in _cut(np.arange(len(places)), np.diff(path_of) != 0):
        end[in_file] = np.maximum.accumulate(end[in_file])
        for near in _cut(in_file, start[in_file][1:] - end[in_file][:-1] > SMALL_NBYTES):
            first, last = int(near[0]), int(near[-1]) + 1
            while first < last:
                fitting = int(np.searchsorted(end[first:last], start[first] + block_nbytes, side="right"))
                group = places[first : first + fitting].tolist()
                found[group[0]] = ReadGroup(reads, group, int(end[first + fitting - 1]))
                first += fitting
    return [found[place] for place in sorted(found)]


def _cut(rows: Int64, is_last: npt.NDArray[np.bool_]) -> list[Int64]:
    """Cut after each row for which ``is_last`` holds."""
    return np.split(rows, np.flatnonzero(is_last) + 1) if len(rows) else []


def check_end(read: Read, file: DataFile) -> None:
    """Make sure that the file holds all of the item. This is called before memory is allocated for the item.

    Raises:
        CorruptCheckpoint: the file ends before the item does.
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


def _column(values: Iterable[int]) -> Int64:
    return np.fromiter(values, dtype=np.int64)


def _not_written(item: ReadItem, info: Any, directory: str) -> CorruptCheckpoint:
    name = name_of(item)
    return CorruptCheckpoint(
        f"{METADATA_NAME} in {directory} lists {name!r} but not where its data lies: it was never written",
        file=METADATA_NAME,
        item=name,
        expected="storage info",
        found=type(info).__name__,
    )
