"""Finds chunks that are wanted exactly as they were saved, for thousands of tensors at once, without objects for them.

This module looks up names, their saved chunks and the places of these in columns. Chunks that it does not find are
looked up one by one by ``lazy``. ``plan.load_items`` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.storage.index.index_file import Column
from robust_dcp.storage.index.stored_index import StoredIndex

__all__ = ["ChunkKind", "WholeChunks", "find_whole_chunks"]

Int64 = npt.NDArray[np.int64]

_ROWS_AT_ONCE: Final = 1 << 13

_FEW: Final = 4
"""If fewer than one in this many names of the index are wanted, names are looked up one by one."""


class ChunkKind(NamedTuple):
    """A kind of chunk that is wanted: dtype and size of the whole tensor, and offsets and sizes of the chunk."""

    dtype: torch.dtype
    size: torch.Size
    offsets: torch.Size
    lengths: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's data."""
        return self.lengths.numel() * self.dtype.itemsize


class WholeChunks(NamedTuple):
    """Chunks that were found, in columns.

    Attributes:
        asked: for each chunk, the place of its name among the names that were asked for.
        chunk: the place of each among the chunks of its tensor.
        file: the number of its file in ``files``.
        start, nbytes: where it begins in that file, and its length there in bytes.
        files: relative paths of the files.
    """

    asked: Int64
    chunk: Int64
    file: Int64
    start: Int64
    nbytes: Int64
    files: Sequence[str]


def find_whole_chunks(
    index: StoredIndex, names: Sequence[str], kinds: Sequence[ChunkKind], kind_of: Sequence[int]
) -> WholeChunks:
    """Find those of ``names`` that have a saved chunk exactly like the wanted one.

    Args:
        kinds: the distinct kinds of wanted chunks.
        kind_of: for each name the number of its kind.

    Raises:
        DamagedIndex: something in the index refers to what does not exist.
        UnsafeCheckpoint: a file does not lie in the checkpoint's directory.
    """
    numbers = _numbers_of(index, names)
    asked = np.flatnonzero(numbers >= 0)
    numbers, kind = numbers[asked], np.array(kind_of, dtype=np.int64)[asked]
    column = index.file.column
    of_names = _Rows(numbers)
    end = of_names.of(column("name_chunks"))
    first = np.zeros_like(end)
    first[numbers > 0] = _Rows(numbers[numbers > 0] - 1).of(column("name_chunks"))
    if ((first < 0) | (first >= end) | (end > index.n_rows)).any():
        raise index.file.damaged("a name has rows that are not there")
    row = _likely_rows(kinds, kind, first, end)
    of_rows = _Rows(row)
    facts = [of_names.of(column("name_properties")), of_names.of(column("name_size"))]
    facts += [of_rows.of(column("chunk_offset")), of_rows.of(column("chunk_size"))]
    start, nbytes = of_rows.of(column("chunk_start")), of_rows.of(column("chunk_nbytes"))
    fits = _fit(index, kinds, numbers, row, [kind, *facts]) & (start >= 0) & (nbytes >= 0)
    files, file = np.unique(of_rows.of(column("chunk_file"))[fits], return_inverse=True)
    return WholeChunks(
        asked=asked[fits],
        chunk=(row - first)[fits],
        file=file.astype(np.int64),
        start=start[fits],
        nbytes=nbytes[fits],
        files=[index.file_name(number) for number in files.tolist()],
    )


def _numbers_of(index: StoredIndex, names: Sequence[str]) -> Int64:
    """The number of each name in the index; -1 if it is not there."""
    if _FEW * len(names) < len(index):
        number_of = index.names.find_all(names)
    else:
        number_of = {name: number for number, name in enumerate(index.names)}
    return np.array([number_of.get(name, -1) for name in names], dtype=np.int64)


def _likely_rows(kinds: Sequence[ChunkKind], kind: Int64, first: Int64, end: Int64) -> Int64:
    """For each name the row of the wanted chunk, on the guess that its chunks are equal parts along the first
    dimension.
    """
    offset = np.array([each.offsets[0] if each.offsets else 0 for each in kinds], dtype=np.int64)[kind]
    size = np.array([each.size[0] if each.size else 0 for each in kinds], dtype=np.int64)[kind]
    before = offset * (end - first) // np.maximum(size, 1)
    likely: Int64 = np.clip(first + before, first, end - 1)
    return likely


def _fit(
    index: StoredIndex, kinds: Sequence[ChunkKind], numbers: Int64, row: Int64, facts: Sequence[Int64]
) -> npt.NDArray[np.bool_]:
    """Whether each row is exactly the wanted chunk. Names with the same ``facts`` are compared once."""
    keys = list(zip(*(fact.tolist() for fact in facts), strict=True))
    place_of = dict(zip(keys, range(len(keys)), strict=True))
    fit = {key: _is_like(index, int(numbers[place]), int(row[place]), kinds[key[0]]) for key, place in place_of.items()}
    return np.array([fit[key] for key in keys], dtype=np.bool_)


def _is_like(index: StoredIndex, number: int, row: int, kind: ChunkKind) -> bool:
    stored = index.stored(number)
    if stored.size is None:
        return False
    found = (index.properties[stored.properties][0], stored.size, index.offsets(row), index.sizes(row))
    return found == tuple(kind)


class _Rows:
    """Rows of columns, read a stretch at a time. There may be most of an index between two of the rows."""

    def __init__(self, rows: Int64) -> None:
        self._rows = rows
        order = np.argsort(rows, kind="stable")
        self._parts = np.split(order, np.flatnonzero(np.diff(rows[order] // _ROWS_AT_ONCE)) + 1) if len(rows) else []

    def of(self, column: Column) -> Int64:
        """The column's number in each row."""
        found = np.empty(len(self._rows), dtype=np.int64)
        for part in self._parts:
            first = int(self._rows[part[0]]) // _ROWS_AT_ONCE * _ROWS_AT_ONCE
            numbers = column.rows(first, min(first + _ROWS_AT_ONCE, len(column)))
            found[part] = numbers[self._rows[part] - first]
        return found
