"""DCP's ``Metadata`` on top of an index. Its mappings decode an entry when somebody asks for it.

Other planners and readers see the same contents as in ``.metadata``. If a part of the index turns out to be damaged,
the index is put aside, ``.metadata`` is decoded, and everything goes on. ``reader`` calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.storage.index.form import DamagedIndex
from robust_dcp.storage.index.index_or_metadata import IndexOrMetadata, or_decoded
from robust_dcp.storage.index.overlap import Overlap
from robust_dcp.storage.index.stored_index import StoredIndex, StoredName
from robust_dcp.storage.index.stored_items import StoredItems

__all__ = ["StoredChunks", "ask_index", "lazy_metadata", "look_up"]

_Answer = TypeVar("_Answer")


def lazy_metadata(index: StoredIndex, decode: Callable[[], Metadata]) -> Metadata:
    """A ``Metadata`` that decodes entries of the index when somebody asks for them.

    Args:
        decode: reads the ``.metadata`` that the index belongs to. It is called once, if the index is damaged.

    Raises:
        DamagedIndex: a part that has to be decoded at once is not what was written.
    """
    source = IndexOrMetadata(index, decode)
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
    return entries._source.ask(question) if isinstance(entries, _Entries) else None


class _ByName(Mapping[str, Any]):
    """A mapping from names to what the index has for them."""

    def __init__(self, source: IndexOrMetadata) -> None:
        self._source = source

    @or_decoded
    def __contains__(self, name: object) -> bool:
        return self._source.number(name) is not None

    @or_decoded
    def __len__(self) -> int:
        return len(self._source.index)

    @or_decoded
    def __iter__(self) -> Iterator[str]:
        return iter(list(self._source.index.names))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Entries(_ByName):
    """``Metadata.state_dict_metadata``. It remembers entries, so that it returns the same object each time, as a dict
    does.
    """

    def __init__(self, source: IndexOrMetadata) -> None:
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
        self._source.ask(lambda _: self._source.look_up(names))

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

    def __init__(self, source: IndexOrMetadata, name: str, stored: StoredName) -> None:
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

    @or_decoded
    def __getitem__(self, place: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if self._all is not None:
            return self._all[place]
        if isinstance(place, slice):
            return [self._chunk(each) for each in range(len(self))[place]]
        return self._chunk(range(len(self))[place])

    @or_decoded
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
        return self._source.ask(lambda index: index.find_chunk(self._stored, offsets))

    def overlap(self, offsets: torch.Size, sizes: torch.Size) -> Overlap | None:
        """The chunks that overlap with a box; ``None`` if the index is damaged. Then the caller looks at chunks one by
        one.
        """
        return self._source.ask(lambda index: index.overlap(self._stored, offsets, sizes))

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

    @or_decoded
    def __getitem__(self, name: str) -> tuple[str | int, ...]:
        number = self._source.number(name)
        if number is None:
            raise KeyError(name)
        return self._source.index.names.path(number)
