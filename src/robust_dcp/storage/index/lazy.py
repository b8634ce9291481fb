"""DCP's ``Metadata`` on top of an index. Its mappings decode an entry when somebody asks for it.

Other planners and readers see the same contents as in ``.metadata``. If a part of the index turns out to be damaged,
the index is put aside, ``.metadata`` is decoded, and everything goes on. ``reader`` calls this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, Protocol, TypeVar, overload

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

from robust_dcp.storage.index.form import DamagedIndex
from robust_dcp.storage.index.overlap import Overlap
from robust_dcp.storage.index.stored_index import StoredIndex, StoredName
from robust_dcp.storage.metadata.metadata_classes import StorageInfo

__all__ = ["StoredChunks", "StoredItems", "ask_index", "lazy_metadata", "look_up", "stored_items_of"]

logger = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Answer = TypeVar("_Answer")


def lazy_metadata(index: StoredIndex, decode: Callable[[], Metadata]) -> Metadata:
    """A ``Metadata`` that decodes entries of the index when somebody asks for them.

    Args:
        decode: reads the ``.metadata`` that the index belongs to. It is called once, if the index is damaged.

    Raises:
        DamagedIndex: a part that has to be decoded at once is not what was written.
    """
    source = _Source(index, decode)
    meta = index.meta.storage_meta
    metadata = Metadata(
        state_dict_metadata=_Entries(source),  # type: ignore[arg-type]
        planner_data=_Paths(source) if index.meta.has_paths else None,
        storage_data=StoredItems(source),
        storage_meta=None if meta is None else _storage_meta(meta),
    )
    metadata.version = index.meta.version  # torch 2.7 has no such argument
    vars(metadata).update(index.attributes())
    return metadata


def _storage_meta(meta: Any) -> StorageMeta:
    return StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(meta.modules))


def look_up(metadata: Metadata, names: Iterable[str]) -> bool:
    """Find many names at once. That is faster than finding each when it is asked for.

    Returns:
        whether ``metadata`` comes from an index. If it does not, nothing was done.
    """
    entries = metadata.state_dict_metadata
    if not isinstance(entries, _Entries):
        return False
    entries.look_up(names)
    return True


def ask_index(metadata: Metadata, question: Callable[[StoredIndex], _Answer]) -> _Answer | None:
    """Put a question to the index that ``metadata`` comes from; ``None`` if there is no index, or it is damaged."""
    entries = metadata.state_dict_metadata
    source = entries._source if isinstance(entries, _Entries) else None
    if source is not None and source.decoded is None:
        try:
            return question(source.index)
        except DamagedIndex as error:
            source.put_aside(error)
    return None


def stored_items_of(metadata: Metadata) -> StoredItems | None:
    """The items of ``metadata`` if it comes from an index; else ``None``."""
    return metadata.storage_data if isinstance(metadata.storage_data, StoredItems) else None


class _Source:
    """The index, or the decoded ``.metadata`` after the index has turned out to be damaged."""

    def __init__(self, index: StoredIndex, decode: Callable[[], Metadata]) -> None:
        self.index = index
        self.decoded: Metadata | None = None
        self._decode = decode
        self._numbers: dict[str, int | None] = {}

    def put_aside(self, error: DamagedIndex) -> Metadata:
        """Go on with ``.metadata``."""
        if self.decoded is None:
            logger.warning("%s; .metadata is read instead", error.message)
            self.decoded = self._decode()
        return self.decoded

    def look_up(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._numbers]
        found = self.index.names.find_all(new)
        self._numbers.update((name, found.get(name)) for name in new)

    def number(self, name: Any) -> int | None:
        """The number of a stored name. Answers are remembered."""
        if not isinstance(name, str):
            return None
        if name not in self._numbers:
            self.look_up([name])
        return self._numbers[name]


class _FromIndex(Protocol):
    _source: _Source

    def _decoded(self, metadata: Metadata) -> Any: ...


def _or_decoded(method: _Method) -> _Method:
    """Make a method ask the index, and if that is damaged, ask the decoded ``.metadata``."""

    @wraps(method)
    def ask(self: _FromIndex, *args: Any) -> Any:
        decoded = self._source.decoded
        if decoded is None:
            try:
                return method(self, *args)
            except DamagedIndex as error:
                decoded = self._source.put_aside(error)
        return getattr(self._decoded(decoded), method.__name__)(*args)

    return ask  # type: ignore[return-value]


class _ByName(Mapping[str, Any]):
    """A mapping from names to what the index has for them."""

    def __init__(self, source: _Source) -> None:
        self._source = source

    @_or_decoded
    def __contains__(self, name: object) -> bool:
        return self._source.number(name) is not None

    @_or_decoded
    def __len__(self) -> int:
        return len(self._source.index)

    @_or_decoded
    def __iter__(self) -> Iterator[str]:
        return iter(list(self._source.index.names))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Entries(_ByName):
    """``Metadata.state_dict_metadata``. It remembers entries, so that it returns the same object each time, as a dict
    does.
    """

    def __init__(self, source: _Source) -> None:
        super().__init__(source)
        self._known: dict[str, Any] = {}

    def _decoded(self, metadata: Metadata) -> Mapping[str, Any]:
        return metadata.state_dict_metadata

    def __getitem__(self, name: str) -> Any:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._entry(name)
        return known

    def get(self, name: str, default: Any = None) -> Any:
        """The ``get`` of a dict. A load calls it for each tensor, so it avoids raising and catching an exception."""
        known = self._known.get(name)
        return super().get(name, default) if known is None else known

    def look_up(self, names: Iterable[str]) -> None:
        if self._source.decoded is None:
            try:
                self._source.look_up(names)
            except DamagedIndex as error:
                self._source.put_aside(error)

    def _entry(self, name: str) -> Any:
        if self._source.decoded is not None:
            return self._source.decoded.state_dict_metadata[name]
        try:
            return self._stored_entry(name)
        except DamagedIndex as error:
            return self._source.put_aside(error).state_dict_metadata[name]

    def _stored_entry(self, name: str) -> Any:
        number, index = self._source.number(name), self._source.index
        if number is None:
            raise KeyError(name)
        stored = index.stored(number)
        if stored.size is None:
            return BytesStorageMetadata()
        dtype, layout, requires_grad = index.properties[stored.properties]
        properties = TensorProperties(dtype=dtype, layout=layout, requires_grad=requires_grad)
        chunks: Any = StoredChunks(self._source, name, stored)
        return TensorStorageMetadata(properties=properties, size=stored.size, chunks=chunks)

    def __repr__(self) -> str:
        return f"<{len(self)} names of {self._source.index.file.path}>"


class StoredChunks(Sequence[ChunkStorageMetadata]):
    """``TensorStorageMetadata.chunks``: a list that makes its elements when they are asked for.

    DCP's planner walks through all of them several times. It gets the same list each time.
    """

    __slots__ = ("_all", "_name", "_source", "_stored")

    def __init__(self, source: _Source, name: str, stored: StoredName) -> None:
        self._source = source
        self._name = name
        self._stored = stored
        self._all: list[ChunkStorageMetadata] | None = None

    def _decoded(self, metadata: Metadata) -> Sequence[ChunkStorageMetadata]:
        entry: Any = metadata.state_dict_metadata[self._name]
        chunks: Sequence[ChunkStorageMetadata] = entry.chunks
        return chunks

    def __len__(self) -> int:
        return self._stored.end - self._stored.first

    @overload
    def __getitem__(self, place: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, place: slice) -> list[ChunkStorageMetadata]: ...

    @_or_decoded
    def __getitem__(self, place: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if self._all is not None:
            return self._all[place]
        if isinstance(place, slice):
            return [self._chunk(each) for each in range(len(self))[place]]
        return self._chunk(range(len(self))[place])

    @_or_decoded
    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        if self._all is None:
            self._all = [self._chunk(place) for place in range(len(self))]
        return iter(self._all)

    def _chunk(self, place: int) -> ChunkStorageMetadata:
        index, row = self._source.index, self._stored.first + place
        return ChunkStorageMetadata(offsets=index.offsets(row), sizes=index.sizes(row))

    def find(self, offsets: torch.Size) -> int | None:
        """The place of the chunk that begins at ``offsets``; ``None`` if there is no such chunk, or the index is
        damaged.
        """
        return self._asked(lambda: self._source.index.find_chunk(self._stored, offsets))

    def overlap(self, offsets: torch.Size, sizes: torch.Size) -> Overlap | None:
        """The chunks that overlap with a box; ``None`` if the index is damaged. Then the caller looks at chunks one by
        one.
        """
        return self._asked(lambda: self._source.index.overlap(self._stored, offsets, sizes))

    def _asked(self, question: Callable[[], _Answer]) -> _Answer | None:
        if self._source.decoded is None:
            try:
                return question()
            except DamagedIndex as error:
                self._source.put_aside(error)
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)


class _Paths(_ByName):
    """``Metadata.planner_data``."""

    def _decoded(self, metadata: Metadata) -> Any:
        return metadata.planner_data

    @_or_decoded
    def __getitem__(self, name: str) -> tuple[str | int, ...]:
        number = self._source.number(name)
        if number is None:
            raise KeyError(name)
        return self._source.index.names.path(number)


class StoredItems(Mapping[MetadataIndex, Any]):
    """``Metadata.storage_data``. It remembers places, because a load asks for them again when it reads."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._known: dict[MetadataIndex, Any] = {}

    def _decoded(self, metadata: Metadata) -> Any:
        return metadata.storage_data

    def __getitem__(self, index: MetadataIndex) -> Any:
        known = self._known.get(index)
        if known is None:
            known = self._known[index] = self._info(index)
        return known

    def _info(self, index: MetadataIndex) -> Any:
        if self._source.decoded is not None:
            return self._source.decoded.storage_data[index]
        try:
            row = self._row(index)
            if row is not None:
                return StorageInfo(*self._source.index.place(row))
        except DamagedIndex as error:
            return self._source.put_aside(error).storage_data[index]
        raise KeyError(index)

    @_or_decoded
    def __contains__(self, index: object) -> bool:
        return isinstance(index, MetadataIndex) and self._row(index) is not None

    @_or_decoded
    def __len__(self) -> int:
        return self._source.index.n_rows

    @_or_decoded
    def __iter__(self) -> Iterator[MetadataIndex]:
        index = self._source.index
        found = []
        for number, name in enumerate(index.names):
            stored = index.stored(number)
            if stored.size is None:
                found.append(MetadataIndex(name))
                continue
            offsets = [index.offsets(row) for row in range(stored.first, stored.end)]
            if any(tuple(before) >= tuple(behind) for before, behind in pairwise(offsets)):
                raise index.file.damaged(f"the chunks of name {number} do not ascend")
            found += [MetadataIndex(name, each) for each in offsets]
        return iter(found)

    def _row(self, index: MetadataIndex) -> int | None:
        number = self._source.number(index.fqn)
        if number is None:
            return None
        stored = self._source.index.stored(number)
        offsets, hint = index.offset, index.index
        if stored.size is None or offsets is None:
            return stored.first if stored.size is None and offsets is None else None
        if hint is not None and 0 <= hint < stored.end - stored.first:
            row = stored.first + hint
            if self._source.index.offsets(row) == offsets:
                return row
        place = self._source.index.find_chunk(stored, offsets)
        return None if place is None else stored.first + place

    # Ranks that read for each other name an item by its place among all items, sorted by name and offsets. A rank that
    # had to put the index aside counts in the same way.

    def rows(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, int]:
        """The place of each of ``indices`` among all items. All of them must exist."""
        indices = list(indices)
        if self._source.decoded is None:
            try:
                return {index: row for index in indices if (row := self._row(index)) is not None}
            except DamagedIndex as error:
                self._source.put_aside(error)
        place_of = {index: place for place, index in enumerate(self._in_order())}
        return {index: place_of[index] for index in indices}

    def order_in_files(self) -> npt.NDArray[np.int64]:
        """The place of each item when all are sorted by file and by where they begin in it: int64 ``[n]``."""
        if self._source.decoded is None:
            try:
                return self._source.index.order_in_files()
            except DamagedIndex as error:
                self._source.put_aside(error)
        infos = [self[index] for index in self._in_order()]
        order = sorted(range(len(infos)), key=lambda number: (infos[number].relative_path, infos[number].offset))
        places: npt.NDArray[np.int64] = np.empty(len(infos), dtype=np.int64)
        places[order] = np.arange(len(infos))
        return places

    def _in_order(self) -> list[MetadataIndex]:
        return sorted(self, key=lambda index: (index.fqn, tuple(index.offset or ())))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
