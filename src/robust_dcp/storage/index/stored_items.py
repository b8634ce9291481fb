"""``Metadata.storage_data`` on top of an index: where each item lies, and the number of each item among all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from robust_dcp.storage.index.form import DamagedIndex
from robust_dcp.storage.index.index_or_metadata import IndexOrMetadata, or_decoded
from robust_dcp.storage.metadata.metadata_file import StorageInfo

__all__ = ["StoredItems", "stored_items_of"]


def stored_items_of(metadata: Metadata) -> StoredItems | None:
    """The items of ``metadata`` if it comes from an index; else ``None``."""
    return metadata.storage_data if isinstance(metadata.storage_data, StoredItems) else None


class StoredItems(Mapping[MetadataIndex, Any]):
    """``Metadata.storage_data``. It remembers places, because a load asks for them again when it reads."""

    def __init__(self, source: IndexOrMetadata) -> None:
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

    @or_decoded
    def __contains__(self, index: object) -> bool:
        return isinstance(index, MetadataIndex) and self._row(index) is not None

    @or_decoded
    def __len__(self) -> int:
        return self._source.index.n_rows

    @or_decoded
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
        rows = self._source.ask(lambda _: {index: row for index in indices if (row := self._row(index)) is not None})
        if rows is not None:
            return rows
        place_of = {index: place for place, index in enumerate(self._in_order())}
        return {index: place_of[index] for index in indices}

    def order_in_files(self) -> npt.NDArray[np.int64]:
        """The place of each item when all are sorted by file and by where they begin in it: int64 ``[n]``."""
        in_files = self._source.ask(lambda index: index.order_in_files())
        if in_files is not None:
            return in_files
        infos = [self[index] for index in self._in_order()]
        order = sorted(range(len(infos)), key=lambda number: (infos[number].relative_path, infos[number].offset))
        places: npt.NDArray[np.int64] = np.empty(len(infos), dtype=np.int64)
        places[order] = np.arange(len(infos))
        return places

    def _in_order(self) -> list[MetadataIndex]:
        return sorted(self, key=lambda index: (index.fqn, tuple(index.offset or ())))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
