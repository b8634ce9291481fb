"""The contents of an index by name: names, chunks, and where each chunk lies; and DCP's ``Metadata`` on top of them.
Entries are decoded when somebody asks for them.

This module owns the meaning of the sections, and checks every number before it is used as a reference. That is needed
because checksums only prove that the file is as somebody wrote it. Other planners and readers see the same contents as
in ``.metadata``. Whatever asks for a part of the index that is damaged gets a
:class:`~robust_dcp.storage.index.form.DamagedIndex`.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from errno import ENOENT, ENOTDIR
from itertools import pairwise
from operator import ge
from typing import Any, Final, NamedTuple

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

from robust_dcp.decoding import from_json
from robust_dcp.errors import StorageError
from robust_dcp.items import Properties
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, check_relative_path
from robust_dcp.storage.index.form import BLOCKS_AT, MAX_NAME_NBYTES, Column, IndexFile, IndexMeta, fit_of_file
from robust_dcp.storage.layouts.places import Places
from robust_dcp.storage.metadata.metadata_file import StorageInfo, note_files_beside

logger = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]
Size = torch.Size

_MAX_DIMENSIONS: Final = 64
_MAX_PARTS: Final = 10_000  # in a path
_NAMES_AT_ONCE: Final = 1 << 12
_FEW: Final = 16
"""If fewer than one in this many names of the index are wanted, they are looked up by bisection."""


class Part(NamedTuple):
    """A part of a chunk, of ``lengths``, which begins at ``in_chunk`` of the chunk. It goes to ``in_box`` of the box
    that a rank holds, which begins at ``box`` of the tensor.
    """

    box: Size
    in_chunk: Size
    in_box: Size
    lengths: Size


class ChunkKind(NamedTuple):
    """A kind of chunk that is wanted: dtype and size of the whole tensor, offsets and sizes of the chunk, and the part
    of it that is wanted; ``None`` if all is.
    """

    dtype: torch.dtype
    size: Size
    offsets: Size
    lengths: Size
    part: Part | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the data that is wanted."""
        return (self.part or self).lengths.numel() * self.dtype.itemsize


def open_index(disk: Disk, directory: str, *, identity: bytes = b"") -> StoredIndex | None:
    """The index in ``directory``; ``None`` if there is none, or if it belongs to another ``.metadata``.

    Args:
        identity: of the index that another rank has found to belong to it. One with another identity is not opened.

    Raises:
        DamagedIndex: the parts of the index that are read at once are not what was written.
        StorageError: it cannot be read.
    """
    try:
        file = IndexFile(disk, os.path.join(directory, INDEX_NAME))
    except StorageError as error:
        if error.errno not in (ENOENT, ENOTDIR):
            raise
        return None
    if identity:
        return StoredIndex(file) if file.identity == identity else None
    try:
        fits = fit_of_file(disk, os.path.join(directory, METADATA_NAME)) == file.fit
    except StorageError:  # code that needs the .metadata will report what is wrong with it
        return None
    if not fits:
        logger.info("%s is not used: it belongs to another %s", file.path, METADATA_NAME)
    return StoredIndex(file) if fits else None


class _RowsOfRank:
    """What one rank has written.

    Attributes:
        names: int64 ``[n]``, the number of the name of each row, ascending.
        columns: int64 ``[5, n]``, see ``StoredIndex._columns``.
        has_several: whether it has several chunks of some name.
    """

    def __init__(self, names: Int64, columns: Int64) -> None:
        self.names, self.columns = names, columns
        self.has_several = bool((np.diff(names) == 0).any())


class StoredIndex:
    """What an index says.

    Args:
        file: the open index.

    Attributes:
        file: the open index.
        meta: the fields of ``Metadata`` other than its items.
        properties: the distinct combinations of dtype, layout and ``requires_grad``.
        n_names, n_ranks, n_rows: the numbers of names, of ranks that have saved, and of chunks and objects.

    Raises:
        DamagedIndex: something is not what was written, or refers to what does not exist. All methods raise it, too.
    """

    def __init__(self, file: IndexFile) -> None:
        self.file = file
        self._names, self._files = Column(file, "names"), Column(file, "files")
        self._name_ends, self._name_chunks = Column(file, "name_ends"), Column(file, "name_chunks")
        self._name_properties, self._name_size = Column(file, "name_properties"), Column(file, "name_size")
        self._name_reach = Column(file, "name_reach")
        self._path_parts, self._path_ends = Column(file, "path_parts"), Column(file, "path_ends")
        self._name_writers, self._writers = Column(file, "name_writers"), Column(file, "writers")
        self._sizes = Column(file, "sizes")
        self._file_ends, self._rank_files = Column(file, "file_ends"), Column(file, "rank_files")
        self._block_ends = Column(file, "block_ends")
        self.n_names, self.n_ranks = len(self._name_ends), len(self._block_ends)
        self.n_rows = self._name_chunks[self.n_names - 1] if self.n_names else 0
        if self.n_rows > len(file.data):  # each has more than a byte in the block of its rank
            raise file.damaged(f"it has {self.n_rows} chunks in {len(file.data)} bytes")
        meta, properties = Column(file, "meta").rows().tobytes(), Column(file, "properties").rows().tobytes()
        self.properties: list[tuple[torch.dtype, torch.layout, bool]] = []
        try:
            self.meta = from_json(meta, IndexMeta)
            distinct = from_json(properties or b"[]", list[Properties])
            for dtype_name, layout_name, requires_grad in distinct:
                dtype, layout = vars(torch).get(dtype_name), vars(torch).get(layout_name)
                if not isinstance(dtype, torch.dtype) or not isinstance(layout, torch.layout):
                    raise ValueError(f"{dtype_name[:60]!r} and {layout_name[:60]!r} are not a dtype and a layout")
                self.properties.append((dtype, layout, requires_grad))
        except (ValueError, TypeError) as error:
            raise file.damaged(f"its sections meta and properties cannot be decoded: {error}") from None
        # For each number of dimensions, the number of the first such size, and where it lies among the values.
        self._first_of_ndim, self._at_of_ndim = [0], [0]
        counts = Column(file, "size_counts")
        if len(counts) > _MAX_DIMENSIONS + 1:
            raise file.damaged(f"it has sizes of {len(counts) - 1} dimensions")
        for ndim, count in enumerate(counts.rows().tolist()):
            self._first_of_ndim.append(self._first_of_ndim[-1] + count)
            self._at_of_ndim.append(self._at_of_ndim[-1] + count * ndim)
        if self._at_of_ndim.pop() != len(self._sizes):
            raise file.damaged(f"it has {len(self._sizes)} numbers in its sizes, and says otherwise")
        of_names = self._name_chunks, self._name_properties, self._name_size, self._name_reach, self._name_writers
        if {*map(len, of_names)} != {self.n_names} or len(self._rank_files) != self.n_ranks:
            raise file.damaged("its columns are not of one length")
        if len(self._path_ends) != (self.n_names if self.meta.has_paths else 0):
            raise file.damaged("its paths are not one for each name")
        self._numbers: dict[str, int] = {}  # -1 for a name that is not there
        self._stored: dict[int, tuple[int, Size | None, int, int, int]] = {}
        self._claimed = 0
        self._known_wholes: dict[int, Size] = {}
        self._blocks: dict[int, _RowsOfRank] = {}
        self._sizes_of_chunks: dict[Size, int] = {}  # and their numbers, as they come
        self._sizes_by_number: list[Size] = []
        self._all_rows: Int64 | None = None
        self._known_files: dict[int, str] = {}
        self.known_parts: dict[Any, tuple[Int64, list[ChunkKind]]] = {}

    def number(self, name: Any) -> int | None:
        """The number of a stored name."""
        if name not in self._numbers and isinstance(name, str):
            self.find_all([name])
        number = self._numbers.get(name, -1)
        return None if number < 0 else number

    def find_all(self, names: Collection[str]) -> Int64:
        """int64 ``[n]``: the number of each of ``names``; -1 for one that is not in the checkpoint. Answers are
        remembered.

        To find many at once is faster than to find each when it is asked for.
        """
        known = self._numbers
        wanted = set(names).difference(known)
        known.update(dict.fromkeys(wanted, -1))
        if _FEW * len(wanted) >= self.n_names:
            for number, name in enumerate(self.names()):
                if name in wanted:
                    known[name] = number
        else:
            at = 0
            for name in sorted(wanted):
                encoded = name.encode("utf-8", "surrogatepass")
                at = bisect_left(range(self.n_names), encoded, at, key=self._name_bytes)
                if at < self.n_names and self._name_bytes(at) == encoded:
                    known[name] = at
        return np.fromiter(map(known.__getitem__, names), dtype=np.int64, count=len(names))

    def names(self) -> Iterator[str]:
        """All names, ascending."""
        before = [""]
        for first in range(0, self.n_names, _NAMES_AT_ONCE):
            start = self._name_ends[first - 1] if first else 0
            ends = [start, *self._name_ends.rows(first, min(first + _NAMES_AT_ONCE, self.n_names)).tolist()]
            if ends != sorted(ends):
                raise self.file.damaged("its names do not ascend")
            data = self._names.rows(start, ends[-1]).tobytes()
            if data.isascii():
                text = data.decode("ascii")
                names = [text[begin - start : end - start] for begin, end in pairwise(ends)]
            else:
                names = [self._text(data[begin - start : end - start]) for begin, end in pairwise(ends)]
            # Comparing texts gives the same order as comparing their bytes in UTF-8.
            if any(map(ge, [*before, *names] if first else names, names if first else names[1:])):
                raise self.file.damaged("its names do not ascend")
            before = names[-1:]
            yield from names

    def _name_bytes(self, number: int) -> bytes:
        start, end = self._name_ends[number - 1] if number else 0, self._name_ends[number]
        if end - start > MAX_NAME_NBYTES:
            raise self.file.damaged(f"name {number} has {end - start} bytes")
        return self._names.rows(start, end).tobytes()

    def path(self, name: Any) -> tuple[str | int, ...] | None:
        """The keys that lead to a stored name in the nested state dict."""
        number, at = self.number(name), 0
        if number is None:
            return None
        start, end = self._path_ends[number - 1] if number else 0, self._path_ends[number]
        if not 0 < end - start <= _MAX_PARTS:
            raise self.file.damaged(f"the path of {name[:60]!r} has {end - start} parts")
        parts: list[str | int] = []
        for length in self._path_parts.rows(start, end).tolist():
            text = name[at : at + abs(length)]
            is_index = length < 0
            if len(text) != abs(length) or (is_index and not (text.isascii() and text.isdigit() and len(text) < 19)):
                raise self.file.damaged(f"the path of {name[:60]!r} does not spell it")
            parts.append(int(text) if is_index else text)
            at += abs(length) + 1
        return tuple(parts)

    def _text(self, encoded: bytes) -> str:
        try:
            return encoded.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.file.damaged(f"{encoded[:40]!r} is not a text in UTF-8") from None

    # --- sizes of whole tensors: each distinct one is stored once; those with fewer dimensions come first

    def _whole(self, number: int) -> Size:
        known = self._known_wholes.get(number)
        if known is not None:
            return known
        ndim = bisect_right(self._first_of_ndim, number) - 1
        if not 0 <= ndim < len(self._at_of_ndim):
            raise self.file.damaged(f"size {number} of {self._first_of_ndim[-1]} is referred to")
        at = self._at_of_ndim[ndim] + (number - self._first_of_ndim[ndim]) * ndim
        values = self._sizes.rows(at, at + ndim).tolist()
        if min(values, default=0) < 0:
            raise self.file.damaged(f"size {number} is {values}")
        known = self._known_wholes[number] = Size(values)
        return known

    # --- the rows of all ranks: a row is a chunk or an object, and lies in the block of the rank that has written it

    def _block(self, rank: int) -> _RowsOfRank:
        """What a rank has written, after a look at every number."""
        known = self._blocks.get(rank)
        if known is not None:
            return known
        if not 0 <= rank < self.n_ranks:
            raise self.file.damaged(f"rank {rank} of {self.n_ranks} is referred to")
        begin, end = self._block_ends[rank - 1] if rank else BLOCKS_AT, self._block_ends[rank]
        block = self.file.block(begin, end)
        first_file, end_file = self._rank_files[rank - 1] if rank else 0, self._rank_files[rank]
        n_rows, ndim, (places, jumps) = len(block.start), block.ndim, block.jumps.T
        lengths = np.diff(places, append=n_rows)
        fits = not n_rows or (len(places) and places[0] == 0 and (lengths > 0).all())
        fits = fits and ((ndim >= 0) & (ndim <= _MAX_DIMENSIONS)).all() and int(ndim.sum()) == len(block.values)
        for column, end_of_column in (
            (block.offset, len(ndim)), (block.size, len(ndim)), (block.file, end_file - first_file)
        ):  # fmt: skip
            fits = fits and ((column >= -1) & (column < end_of_column)).all()
        fits = fits and ((block.offset < 0) == (block.size < 0)).all() and (block.file >= 0).all()
        fits = fits and all((column >= 0).all() for column in (block.start, block.nbytes, block.values))
        names = np.repeat(jumps.astype(np.int64) - places, lengths) + np.arange(n_rows) if fits else places
        if not fits or (np.diff(names) < 0).any() or (n_rows and not 0 <= names[0] <= names[-1] < self.n_names):
            raise self.file.damaged(f"the block of rank {rank} refers to what is not there")
        sizes = [Size(each.tolist()) for each in np.split(block.values, np.cumsum(ndim)[:-1])] if len(ndim) else []
        numbers = np.array([*map(self._number_of_size, sizes), -1], dtype=np.int64)
        file = block.file + np.int64(first_file)
        columns = np.stack([numbers[block.offset], numbers[block.size], file, block.start, block.nbytes])
        known = self._blocks[rank] = _RowsOfRank(names, columns)
        return known

    def _number_of_size(self, size: Size) -> int:
        number = self._sizes_of_chunks.setdefault(size, len(self._sizes_of_chunks))
        if number == len(self._sizes_by_number):
            self._sizes_by_number.append(size)
        return number

    def _columns(self, rows: Int64) -> Int64:
        """int64 ``[5, n]`` for n rows: the numbers of the offsets and sizes of chunks, -1 for objects; the number of
        the file, where in it the row begins, and its length in bytes.
        """
        if self._all_rows is not None:
            return self._all_rows[:, rows]
        ends: Int64 = self._name_chunks.rows().view(np.int64)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.n_rows:
            raise self.file.damaged(f"rows {int(rows.min())} to {int(rows.max())} of {self.n_rows} are referred to")
        numbers = np.searchsorted(ends, rows, side="right")
        in_name = rows - np.where(numbers > 0, ends[numbers - 1], 0)
        at = self._name_writers.at(numbers)
        ranks = self._writers.at(at + in_name)
        order = np.argsort(ranks, kind="stable")
        cuts = np.flatnonzero(np.diff(ranks[order])) + 1
        groups = [here for here in np.split(order, cuts) if len(here)]
        needed = {int(ranks[here[0]]) for here in groups}
        if 2 * len(needed.union(self._blocks)) > self.n_ranks:  # then the rest takes no longer than going on so
            return self._of_all(ends)[:, rows]
        found = np.empty((5, len(rows)), dtype=np.int64)
        for here in groups:
            rank = int(ranks[here[0]])
            block = self._block(rank)
            places = np.searchsorted(block.names, numbers[here])
            if block.has_several:
                places += [
                    int((self._writers.rows(first, first + n) == rank).sum())
                    for first, n in zip(at[here].tolist(), in_name[here].tolist(), strict=True)
                ]
            if (places >= len(block.names)).any() or (block.names[places] != numbers[here]).any():
                raise self.file.damaged(f"the block of rank {rank} lacks a name of which it has a chunk")
            found[:, here] = block.columns[:, places]
        return found

    def _of_all(self, ends: Int64) -> Int64:
        """The columns of all rows."""
        counts: Int64 = np.diff(ends, prepend=np.int64(0))
        blocks = [self._block(rank) for rank in range(self.n_ranks) if self._has_block(rank)]
        n_rows = [len(block.names) for block in blocks]
        if (counts < 0).any() or sum(n_rows) != self.n_rows:
            raise self.file.damaged(f"its ranks have {sum(n_rows)} chunks, and its names {self.n_rows}")
        numbers = np.repeat(np.arange(self.n_names), counts)
        at = np.repeat(self._name_writers.rows().astype(np.int64) - (ends - counts), counts)
        order = np.argsort(self._writers.at(at + np.arange(self.n_rows)), kind="stable")
        if (np.concatenate([block.names for block in blocks]) != numbers[order]).any():
            raise self.file.damaged("its ranks do not have the chunks that its names have")
        self._all_rows = np.empty((5, self.n_rows), dtype=np.int64)
        self._all_rows[:, order] = np.concatenate([block.columns for block in blocks], axis=1)
        return self._all_rows

    def _has_block(self, rank: int) -> bool:
        return self._block_ends[rank] != (self._block_ends[rank - 1] if rank else BLOCKS_AT)

    def _row(self, row: int) -> list[int]:
        """The same for one row: 8 us, where columns of one row take 46 us."""
        if self._all_rows is None and 0 <= row < self.n_rows:
            number = bisect_right(range(self.n_names), row, key=self._name_chunks.__getitem__)
            in_name = row - (self._name_chunks[number - 1] if number else 0)
            at = self._name_writers[number]
            rank = self._writers[at + in_name]
            block = self._block(rank)
            place = bisect_left(range(len(block.names)), number, key=block.names.item)
            if block.has_several:
                place += int((self._writers.rows(at, at + in_name) == rank).sum())
            if place < len(block.names) and block.names[place] == number:
                return list(map(int, block.columns[:, place]))
        return list(map(int, self._columns(np.array([row])).ravel()))

    # --- the chunks of a name

    def entry(self, name: Any) -> BytesStorageMetadata | TensorStorageMetadata | None:
        """What ``.metadata`` says of a stored name."""
        number = self.number(name)
        if number is None:
            return None
        stored = self.stored(number)
        if stored.size is None:
            return BytesStorageMetadata()
        dtype, layout, requires_grad = self.properties[stored.properties]
        properties = TensorProperties(dtype=dtype, layout=layout, requires_grad=requires_grad)
        return TensorStorageMetadata(properties, stored.size, stored)  # type: ignore[arg-type]  # no list, but as good

    def stored(self, number: int) -> StoredChunks:
        """The entry of the name with this number."""
        known = self._stored.get(number)
        if known is None:
            first, end = self._name_chunks[number - 1] if number else 0, self._name_chunks[number]
            properties = self._name_properties[number]
            is_object = properties == -1
            # No chunk belongs to two names. If many names claimed all chunks, a small hostile file could take any
            # amount of time.
            self._claimed += end - first
            if not 0 <= first < end <= self.n_rows or (is_object and end != first + 1) or self._claimed > self.n_rows:
                raise self.file.damaged(f"name {number} has rows {first} to {end} of {self.n_rows}")
            size, reach = None, 0
            if not is_object:
                if not 0 <= properties < len(self.properties):
                    raise self.file.damaged(f"name {number} has properties {properties} of {len(self.properties)}")
                size, reach = self._whole(self._name_size[number]), self._name_reach[number]
            known = self._stored[number] = properties, size, first, end, reach
        return StoredChunks(self, number, *known)  # not kept: it would keep this index, and its file open

    def offsets(self, row: int) -> Size:
        """Where a chunk begins in its tensor."""
        return self._size_of_chunk(self._row(row)[0])

    def chunk(self, row: int) -> ChunkStorageMetadata:
        """Where a chunk begins in its tensor, and its size."""
        return ChunkStorageMetadata(*map(self._size_of_chunk, self._row(row)[:2]))

    def chunks(self, rows: range) -> list[ChunkStorageMetadata]:
        """The same for several."""
        offsets, sizes = self._columns(np.array(rows, dtype=np.int64))[:2].tolist()
        return [ChunkStorageMetadata(*map(self._size_of_chunk, pair)) for pair in zip(offsets, sizes, strict=True)]

    def _size_of_chunk(self, number: int) -> Size:
        if number < 0:
            raise self.file.damaged("an object lies where a chunk is referred to")
        return self._sizes_by_number[number]

    def numbers(self, first: int, end: int) -> Int64:
        """int64 ``[2, n]``: numbers of the offsets and of the sizes of the chunks in rows ``first`` to ``end``."""
        return self._columns(np.arange(first, end))[:2]

    def extents(self, numbers: Int64, ndim: int) -> Int64:
        """int64 ``[2, n, ndim]``: what these numbers stand for.

        Raises:
            DamagedIndex: one has another number of dimensions.
        """
        used, which = np.unique(numbers, return_inverse=True)
        sizes = list(map(self._size_of_chunk, used.tolist()))
        if any(len(size) != ndim for size in sizes):
            raise self.file.damaged(f"chunks of other than {ndim} dimensions are among those of a tensor with so many")
        found: Int64 = np.array(sizes, dtype=np.int64).reshape(len(used), ndim)
        return found[which.reshape(numbers.shape)]

    def find_whole(
        self, names: Sequence[str], kinds: Sequence[ChunkKind], kind_of: Sequence[int]
    ) -> tuple[Int64, Int64, Places]:
        """Find those of ``names`` that have a saved chunk exactly like the wanted one, without objects for them.

        Args:
            kinds: the distinct kinds of wanted chunks.
            kind_of: for each name the number of its kind.

        Returns:
            For each chunk that was found the place of its name among ``names``; its place among the chunks of its
            tensor; and where it lies.

        Raises:
            UnsafeCheckpoint: a file does not lie in the checkpoint's directory.
        """
        numbers = self.find_all(names)
        asked = np.flatnonzero(numbers >= 0)
        numbers, kind = numbers[asked], np.array(kind_of, dtype=np.int64)[asked]
        end, first = self._name_chunks.at(numbers), np.zeros_like(numbers)
        first[numbers > 0] = self._name_chunks.at(numbers[numbers > 0] - 1)
        if ((first < 0) | (first >= end) | (end > self.n_rows)).any():
            raise self.file.damaged("a name has rows that are not there")
        # The wanted chunk's row, on the guess that chunks are equal parts along the first dimension.
        equal_parts = [(each.offsets[0], max(each.size[0], 1)) if each.size else (0, 1) for each in kinds]
        offset, size = np.array(equal_parts, dtype=np.int64).reshape(-1, 2)[kind].T
        row = np.clip(first + offset * (end - first) // size, first, end - 1)
        # Names that are alike in these columns are compared once.
        of_names = self._name_properties.at(numbers).tolist(), self._name_size.at(numbers).tolist()
        columns = self._columns(row)
        of_chunks = columns[:2].tolist()
        keys = list(zip(kind.tolist(), *of_names, *of_chunks, strict=True))
        place_of = dict(zip(keys, range(len(keys)), strict=True))
        fits_of = {}
        for key, place in place_of.items():
            stored = self.stored(int(numbers[place]))
            if stored.size is not None:  # objects have no offsets
                dtype, sizes = self.properties[stored.properties][0], map(self._size_of_chunk, key[-2:])
                fits_of[key] = kinds[key[0]][:4] == (dtype, stored.size, *sizes)
        fits = np.array([fits_of.get(key, False) for key in keys], dtype=np.bool_)
        return asked[fits], (row - first)[fits], self._places(columns[:, fits])

    # --- where chunks lie

    def places(self, rows: Int64) -> Places:
        """Where these rows lie.

        Raises:
            UnsafeCheckpoint: a file does not lie in the checkpoint's directory.
        """
        return self._places(self._columns(rows))

    def _places(self, columns: Int64) -> Places:
        files, file = np.unique(columns[2], return_inverse=True)
        return Places(list(map(self.file_name, files.tolist())), file.astype(np.int64), columns[3], columns[4])

    def info(self, item: Any) -> Any:
        """DCP's ``_StorageInfo`` of a stored item: its file, where it begins there, and its length in bytes.

        Raises:
            UnsafeCheckpoint: the file does not lie in the checkpoint's directory.
        """
        row = self.row(item) if isinstance(item, MetadataIndex) else None
        if row is None:
            return None
        _, _, file, start, nbytes = self._row(row)
        return StorageInfo(self.file_name(file), start, nbytes)

    def row(self, item: MetadataIndex) -> int | None:
        """The place of an item among all items, which are sorted by name and offsets. So all ranks call it the same."""
        number = self.number(item.fqn)
        if number is None:
            return None
        stored = self.stored(number)
        if stored.size is None or item.offset is None:
            return stored.first if stored.size is None and item.offset is None else None
        first, end, row = stored.first, stored.end, stored.first + (item.index or 0)
        if not first <= row < end or self.offsets(row) != item.offset:
            row = bisect_left(range(end), tuple(item.offset), first, end, key=lambda row: tuple(self.offsets(row)))
        return row if row < end and self.offsets(row) == item.offset else None

    def items(self) -> Iterator[MetadataIndex]:
        """All items, sorted by name and offsets."""
        for number, name in enumerate(self.names()):
            stored = self.stored(number)
            if stored.size is None:
                yield MetadataIndex(name)
                continue
            offsets = [chunk.offsets for chunk in self.chunks(range(stored.first, stored.end))]
            if any(tuple(before) >= tuple(behind) for before, behind in pairwise(offsets)):
                raise self.file.damaged(f"the chunks of name {number} do not ascend")
            yield from (MetadataIndex(name, each) for each in offsets)

    def file_name(self, number: int) -> str:
        """The path of a data file, relative to the checkpoint."""
        known = self._known_files.get(number)
        if known is None:
            start, end = self._file_ends[number - 1] if number else 0, self._file_ends[number]
            known = check_relative_path(self._text(self._files.rows(start, end).tobytes()), file=self.file.path)
            self._known_files[number] = known
        return known


# --- DCP's Metadata on top of an index


def lazy_metadata(index: StoredIndex) -> Metadata:
    """A ``Metadata`` that decodes entries of the index when somebody asks for them.

    Raises:
        DamagedIndex: a part that has to be decoded at once is not what was written.
    """
    stored, meta = index.meta.storage_meta, None
    if stored is not None:
        meta = StorageMeta(stored.checkpoint_id, stored.save_id, stored.load_id, list(stored.modules))
        note_files_beside(meta, index.meta.files_beside)
    metadata = Metadata(
        state_dict_metadata=_OnDemand(index, index.entry, index.names, index.n_names),  # type: ignore[arg-type]
        planner_data=_OnDemand(index, index.path, index.names, index.n_names) if index.meta.has_paths else None,
        storage_data=_OnDemand(index, index.info, index.items, index.n_rows),
        storage_meta=meta,
    )
    metadata.version = index.meta.version  # torch 2.7 has no such argument
    return metadata


def index_of(metadata: Metadata) -> StoredIndex | None:
    """The index that ``metadata`` comes from, if there is one."""
    entries = metadata.state_dict_metadata
    return entries.index if isinstance(entries, _OnDemand) else None


@dataclass(eq=False, repr=False)
class _OnDemand(Mapping[Any, Any]):
    """A mapping that looks up a value in the index when somebody asks for it. It remembers values, so that it returns
    the same object each time, as a dict does.

    Args:
        _find: the value of a key; ``None`` if there is no such key.
        _keys: gives all keys.
    """

    index: StoredIndex
    _find: Callable[[Any], Any]
    _keys: Callable[[], Iterator[Any]]
    _n_keys: int
    _known: dict[Any, Any] = field(default_factory=dict, init=False)

    def get(self, key: Any, default: Any = None) -> Any:
        """The ``get`` of a dict. A load calls it for each tensor, so it avoids raising and catching an exception."""
        known = self._known.get(key)
        if known is None:
            known = self._find(key)
            if known is None:
                return default
            self._known[key] = known
        return known

    def __getitem__(self, key: Any) -> Any:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __len__(self) -> int:
        return self._n_keys

    def __iter__(self) -> Iterator[Any]:
        return self._keys()

    def __repr__(self) -> str:
        return f"<{len(self)} keys of {self.index.file.path}>"

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclass(slots=True, eq=False, repr=False)
class StoredChunks(Sequence[ChunkStorageMetadata]):
    """A name of the checkpoint, and its chunks: ``TensorStorageMetadata.chunks``, a list that makes its elements when
    they are asked for.

    DCP's planner walks through all of them several times. It gets the same list each time.

    Attributes:
        number: the place of the name among all names.
        properties: the number of its dtype, layout and ``requires_grad``; -1 for an object.
        size: the size of the whole tensor; ``None`` for an object.
        first, end: the rows of its chunks.
        reach: the length of its longest chunk along the first dimension.
    """

    _index: StoredIndex
    number: int
    properties: int
    size: Size | None
    first: int
    end: int
    reach: int
    _all: list[ChunkStorageMetadata] | None = None

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, place: Any) -> Any:
        if self._all is not None:
            return self._all[place]
        rows = range(self.first, self.end)[place]
        return self._index.chunk(rows) if isinstance(rows, int) else self._index.chunks(rows)

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        if self._all is None:
            self._all = self[:]
        return iter(self._all)

    def overlap(self, box: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Int64, list[ChunkKind]]:
        """The chunks that overlap with a box of ``lengths`` at ``box``.

        Returns:
            For each, ascending, its row, and its kind. Names whose chunks lie alike get one and the same list of kinds.

        Raises:
            DamagedIndex: chunks lie outside of the tensor, or on each other. Our plans never have such chunks.
        """
        index, whole, first, end = self._index, self.size, self.first, self.end
        if whole is None or len(box) != len(whole) or len(lengths) != len(whole):
            raise index.file.damaged(f"chunks of {len(box)} dimensions are asked for")
        if len(box):  # the first dimension alone tells which rows may overlap
            reach = max(self.reach, 1)  # there may be only empty chunks

            def begin_of(row: int) -> int:
                return next(iter(index.offsets(row)), 0)

            def first_at(bound: int) -> int:
                guess = self.first - -bound // reach  # chunks are equal parts most of the time
                if self.first < guess < self.end and begin_of(guess - 1) < bound <= begin_of(guess):
                    return guess
                return bisect_left(range(self.end), bound, self.first, self.end, key=begin_of)

            first, end = first_at(box[0] - reach + 1), first_at(box[0] + lengths[0])
        numbers = index.numbers(first, end)
        key = (self.properties, whole, box, lengths, numbers.tobytes())
        if key not in index.known_parts:  # then in columns: a rank may need a part of each of thousands of chunks
            offsets, sizes = index.extents(numbers, len(whole))
            if (sizes > np.array(whole, dtype=np.int64) - offsets).any():
                raise index.file.damaged(f"chunks of name {self.number} lie outside of their tensor")
            begins = np.maximum(offsets, box)
            parts = np.minimum(offsets + sizes, np.add(box, lengths)) - begins
            rows = np.flatnonzero((parts > 0).all(axis=1))
            columns = [each[rows].tolist() for each in (offsets, sizes, begins - offsets, begins - box, parts)]
            if sum(map(math.prod, columns[-1])) > math.prod(lengths):
                raise index.file.damaged(f"chunks of name {self.number} overlap")
            dtype = index.properties[self.properties][0]
            of_rows = zip(*(map(Size, each) for each in columns), strict=True)
            kinds = [ChunkKind(dtype, whole, at, size, Part(Size(box), *part)) for at, size, *part in of_rows]
            index.known_parts[key] = rows, kinds
        rows, kinds = index.known_parts[key]
        return first + rows, kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)
