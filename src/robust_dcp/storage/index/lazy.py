"""DCP's ``Metadata`` on top of an index. Its mappings decode an entry when somebody asks for it.

Other planners and readers see the same contents as in ``.metadata``. Whatever asks for a part of the index that is
damaged gets a :class:`~robust_dcp.storage.index.form.DamagedIndex`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.storage.index.stored_index import Overlap, StoredIndex, StoredName
from robust_dcp.storage.metadata.metadata_file import StorageInfo

__all__ = ["StoredChunks", "StoredItems", "index_of", "lazy_metadata", "look_up", "stored_items_of"]


def lazy_metadata(index: StoredIndex) -> Metadata:
    """A ``Metadata`` that decodes entries of the index when somebody asks for them.

    Raises:
        DamagedIndex: a part that has to be decoded at once is not what was written.
    """
    meta = index.meta.storage_meta
    metadata = Metadata(
        state_dict_metadata=_Entries(index),  # type: ignore[arg-type]
        planner_data=_Paths(index) if index.meta.has_paths else None,
        storage_data=StoredItems(index),
        storage_meta=meta and StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(meta.modules)),
    )
    metadata.version = index.meta.version  # torch 2.7 has no such argument
    return metadata


def index_of(metadata: Metadata) -> StoredIndex | None:
    """The index that ``metadata`` comes from, if there is one."""
    entries = metadata.state_dict_metadata
    return entries._index if isinstance(entries, _Entries) else None


def stored_items_of(metadata: Metadata) -> StoredItems | None:
    """The items of ``metadata`` if it comes from an index; else ``None``."""
    return metadata.storage_data if isinstance(metadata.storage_data, StoredItems) else None


def look_up(metadata: Metadata, names: Iterable[str]) -> bool:
    """Find many names at once. That is faster than finding each when it is asked for.

    Returns:
        whether ``metadata`` comes from an index. If it does not, nothing was done.
    """
    index = index_of(metadata)
    if index is not None:
        index.look_up(names)
    return index is not None


class _ByName(Mapping[str, Any]):
    """A mapping from names to what the index has for them."""

    def __init__(self, index: StoredIndex) -> None:
        self._index = index

    def __contains__(self, name: object) -> bool:
        return self._index.number(name) is not None

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return self._index.names()

    def _number(self, name: str) -> int:
        number = self._index.number(name)
        if number is None:
            raise KeyError(name)
        return number

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Paths(_ByName):
    """``Metadata.planner_data``."""

    def __getitem__(self, name: str) -> tuple[str | int, ...]:
        return self._index.path(self._number(name))


class _Entries(_ByName):
    """``Metadata.state_dict_metadata``. It remembers entries, so that it returns the same object each time, as a dict
    does.
    """

    def __init__(self, index: StoredIndex) -> None:
        super().__init__(index)
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._entry(name)
        return known

    def get(self, name: str, default: Any = None) -> Any:
        """The ``get`` of a dict. A load calls it for each tensor, so it avoids raising and catching an exception."""
        known = self._known.get(name)
        return super().get(name, default) if known is None else known

    def _entry(self, name: str) -> Any:
        stored = self._index.stored(self._number(name))
        if stored.size is None:
            return BytesStorageMetadata()
        dtype, layout, requires_grad = self._index.properties[stored.properties]
        properties = TensorProperties(dtype=dtype, layout=layout, requires_grad=requires_grad)
        chunks: Any = StoredChunks(self._index, stored)
        return TensorStorageMetadata(properties=properties, size=stored.size, chunks=chunks)

    def __repr__(self) -> str:
        return f"<{len(self)} names of {self._index.file.path}>"


class StoredChunks(Sequence[ChunkStorageMetadata]):
    """``TensorStorageMetadata.chunks``: a list that makes its elements when they are asked for.

    DCP's planner walks through all of them several times. It gets the same list each time.
    """

    __slots__ = ("_all", "_index", "_stored")

    def __init__(self, index: StoredIndex, stored: StoredName) -> None:
        self._index = index
        self._stored = stored
        self._all: list[ChunkStorageMetadata] | None = None

    def __len__(self) -> int:
        return self._stored.end - self._stored.first

    @overload
    def __getitem__(self, place: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, place: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, place: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if self._all is not None:
            return self._all[place]
        rows = range(self._stored.first, self._stored.end)[place]
        return self._chunk(rows) if isinstance(rows, int) else list(map(self._chunk, rows))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        if self._all is None:
            self._all = self[:]
        return iter(self._all)

    def _chunk(self, row: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self._index.offsets(row), sizes=self._index.sizes(row))

    def find(self, offsets: torch.Size) -> int | None:
        """The place of the chunk that begins at ``offsets``; ``None`` if there is no such chunk."""
        return self._index.find_chunk(self._stored, offsets)

    def overlap(self, offsets: torch.Size, sizes: torch.Size) -> Overlap:
        """The chunks that overlap with a box."""
        return self._index.overlap(self._stored, offsets, sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)


class StoredItems(Mapping[MetadataIndex, Any]):
    """``Metadata.storage_data``. It remembers places, because a load asks for them again when it reads."""

    def __init__(self, index: StoredIndex) -> None:
        self._index = index
        self._known: dict[MetadataIndex, Any] = {}

    def __getitem__(self, item: MetadataIndex) -> Any:
        known = self._known.get(item)
        if known is None:
            row = self.row(item)
            if row is None:
                raise KeyError(item)
            known = self._known[item] = StorageInfo(*self._index.place(row))
        return known

    def __contains__(self, item: object) -> bool:
        return isinstance(item, MetadataIndex) and self.row(item) is not None

    def __len__(self) -> int:
        return self._index.n_rows

    def __iter__(self) -> Iterator[MetadataIndex]:
        index = self._index
        for number, name in enumerate(index.names()):
            stored = index.stored(number)
            if stored.size is None:
                yield MetadataIndex(name)
                continue
            offsets = list(map(index.offsets, range(stored.first, stored.end)))
            if any(tuple(before) >= tuple(behind) for before, behind in pairwise(offsets)):
                raise index.file.damaged(f"the chunks of name {number} do not ascend")
            yield from (MetadataIndex(name, each) for each in offsets)

    def row(self, item: MetadataIndex) -> int | None:
        """The place of an item among all items, which are sorted by name and offsets. So all ranks call it the same."""
        number = self._index.number(item.fqn)
        if number is None:
            return None
        stored = self._index.stored(number)
        offsets, hint = item.offset, item.index
        if stored.size is None or offsets is None:
            return stored.first if stored.size is None and offsets is None else None
        if hint is not None and 0 <= hint < stored.end - stored.first:
            row = stored.first + hint
            if self._index.offsets(row) == offsets:
                return row
        place = self._index.find_chunk(stored, offsets)
        return None if place is None else stored.first + place

    def order_in_files(self) -> npt.NDArray[np.int64]:
        """The place of each item when all are sorted by file and by where they begin in it: int64 ``[n]``."""
        return self._index.order_in_files()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
