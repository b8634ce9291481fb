"""The contents of an index by name. Names are found by bisection, and entries are decoded when somebody asks for them.

This module owns the meaning of the sections, and checks every number before it is used as a reference. That is needed
because checksums only prove that the file is as somebody wrote it. ``lazy`` and ``plan.plan`` call it.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.comm.wire import with_tuples
from robust_dcp.storage.files.paths import check_relative_path
from robust_dcp.storage.index.index_file import IndexFile
from robust_dcp.storage.index.messages import IndexMeta
from robust_dcp.storage.index.overlap import Overlap, overlap_of_few, overlap_of_many
from robust_dcp.storage.index.stored_names import StoredNames, text_of
from robust_dcp.storage.index.stored_sizes import StoredSizes

__all__ = ["StoredIndex", "StoredName"]

Int64 = npt.NDArray[np.int64]

_FEW: Final = 16
"""Up to so many chunks are compared one by one. For more, columns are faster."""


class StoredName(NamedTuple):
    """A name of the checkpoint.

    Attributes:
        number: its place among all names.
        properties: the number of its dtype, layout and ``requires_grad``; -1 for an object.
        size: the size of the whole tensor; ``None`` for an object.
        first, end: the rows of its chunks.
        reach: the length of its longest chunk along the first dimension.
    """

    number: int
    properties: int
    size: torch.Size | None
    first: int
    end: int
    reach: int


class StoredIndex:
    """An index that fits its ``.metadata``.

    Args:
        file: the open index.

    Attributes:
        file: the open index.
        names: all names, in order.
        meta: the fields of ``Metadata`` other than its items.
        properties: the distinct combinations of dtype, layout and ``requires_grad``.
        n_rows: number of chunks and objects.

    Raises:
        DamagedIndex: something refers to what does not exist. All methods raise it, too.
    """

    def __init__(self, file: IndexFile) -> None:
        self.file = file
        column = file.column
        self.names = StoredNames(file)
        self._sizes = StoredSizes(file)
        self._name_chunks = column("name_chunks")
        self._name_properties, self._name_size = column("name_properties"), column("name_size")
        self._name_reach = column("name_reach")
        self._chunk_offset, self._chunk_size = column("chunk_offset"), column("chunk_size")
        self._chunk_file, self._chunk_start = column("chunk_file"), column("chunk_start")
        self._chunk_nbytes = column("chunk_nbytes")
        self._variable_rows, self._variable_places = column("variable_rows"), column("variable_places")
        self._file_ends = column("file_ends")
        self.n_rows = len(self._chunk_offset)
        self.meta = self._decoded_meta()
        self.properties = self._decoded_properties()
        self._check_lengths()
        self._stored: dict[int, StoredName] = {}
        self._claimed = 0
        self._known_files: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __deepcopy__(self, memo: Any) -> StoredIndex:
        return self

    def stored(self, number: int) -> StoredName:
        """The entry of the name with this number."""
        known = self._stored.get(number)
        if known is None:
            known = self._stored[number] = self._read_name(number)
        return known

    def _read_name(self, number: int) -> StoredName:
        first, end = self._name_chunks[number - 1] if number else 0, self._name_chunks[number]
        properties = self._name_properties[number]
        is_object = properties == -1
        # No chunk belongs to two names. If many names claimed all chunks, a small hostile file could take any amount of
        # time.
        self._claimed += end - first
        if not 0 <= first < end <= self.n_rows or (is_object and end != first + 1) or self._claimed > self.n_rows:
            raise self.file.damaged(f"name {number} has rows {first} to {end} of {self.n_rows}")
        if is_object:
            return StoredName(number, -1, None, first, end, 0)
        if not 0 <= properties < len(self.properties):
            raise self.file.damaged(f"name {number} has properties {properties} of {len(self.properties)}")
        size = self._sizes[self._name_size[number]]
        return StoredName(number, properties, size, first, end, self._name_reach[number])

    def offsets(self, row: int) -> torch.Size:
        """Where a chunk begins in its tensor."""
        return self._sizes[self._chunk_offset[row]]

    def sizes(self, row: int) -> torch.Size:
        """The size of a chunk."""
        return self._sizes[self._chunk_size[row]]

    def find_chunk(self, tensor: StoredName, offsets: torch.Size) -> int | None:
        """The chunk of ``tensor`` that begins at ``offsets``: its place among the tensor's chunks."""
        at, end = tensor.first, tensor.end
        if tensor.size and tensor.size[0] > 0 and len(offsets):
            # Equal parts along the first dimension are the usual case.
            guess = min(at + offsets[0] * (end - at) // tensor.size[0], end - 1)
            if guess >= at and self.offsets(guess) == offsets:
                return guess - tensor.first
        while at < end:
            middle = (at + end) // 2
            if tuple(self.offsets(middle)) < tuple(offsets):
                at = middle + 1
            else:
                end = middle
        return at - tensor.first if at < tensor.end and self.offsets(at) == offsets else None

    def overlap(self, tensor: StoredName, offsets: torch.Size, sizes: torch.Size) -> Overlap:
        """The chunks of ``tensor`` that overlap with the box at ``offsets``, in their order.

        Raises:
            DamagedIndex: chunks lie outside of the tensor, or on each other. Our plans never have such chunks.
        """
        whole = tensor.size
        if whole is None or len(offsets) != len(whole) or len(sizes) != len(whole):
            raise self.file.damaged(f"chunks of {len(offsets)} dimensions are asked for")
        first, end = self._rows_near(tensor, offsets, sizes)
        if end - first <= _FEW:
            chunks = ((row - tensor.first, self.offsets(row), self.sizes(row)) for row in range(first, end))
            found = overlap_of_few(chunks, whole, offsets, sizes)
        else:
            chunk_offsets = self._sizes.rows(self._chunk_offset.rows(first, end), len(whole))
            chunk_sizes = self._sizes.rows(self._chunk_size.rows(first, end), len(whole))
            found = overlap_of_many(first - tensor.first, chunk_offsets, chunk_sizes, whole, offsets, sizes)
        if found is None:
            raise self.file.damaged(f"chunks of name {tensor.number} lie outside of their tensor")
        if found.numel > math.prod(sizes):
            raise self.file.damaged(f"chunks of name {tensor.number} overlap")
        return found

    def _rows_near(self, tensor: StoredName, offsets: torch.Size, sizes: torch.Size) -> tuple[int, int]:
        """The rows that may overlap with the box, judged by the first dimension alone."""
        if not len(offsets):
            return tensor.first, tensor.end
        return (
            self._first_row_from(tensor, offsets[0] - tensor.reach + 1),
            self._first_row_from(tensor, offsets[0] + sizes[0]),
        )

    def _first_row_from(self, tensor: StoredName, begin: int) -> int:
        at, end = tensor.first, tensor.end
        while at < end:
            middle = (at + end) // 2
            chunk = self.offsets(middle)
            if len(chunk) and chunk[0] < begin:
                at = middle + 1
            else:
                end = middle
        return at

    def place(self, row: int) -> tuple[str, int, int]:
        """The file of an item, where the item begins in it, and its length in bytes.

        Raises:
            UnsafeCheckpoint: the file does not lie in the checkpoint's directory.
        """
        start, nbytes = self._chunk_start[row], self._chunk_nbytes[row]
        if start < 0:
            start, nbytes = self._variable_place(row)
        if start < 0 or nbytes < 0:
            raise self.file.damaged(f"row {row} begins at {start} and has {nbytes} bytes")
        return self.file_name(self._chunk_file[row]), start, nbytes

    def _variable_place(self, row: int) -> tuple[int, int]:
        at, end = 0, len(self._variable_rows)
        while at < end:
            middle = (at + end) // 2
            if self._variable_rows[middle] < row:
                at = middle + 1
            else:
                end = middle
        if at == len(self._variable_rows) or self._variable_rows[at] != row:
            raise self.file.damaged(f"row {row} has no place")
        return self._variable_places[2 * at], self._variable_places[2 * at + 1]

    def file_name(self, number: int) -> str:
        """The path of a data file, relative to the checkpoint."""
        known = self._known_files.get(number)
        if known is None:
            start, end = self._file_ends[number - 1] if number else 0, self._file_ends[number]
            known = check_relative_path(text_of(self.file, self.file.read("files", start, end)), file=self.file.path)
            self._known_files[number] = known
        return known

    def order_in_files(self) -> Int64:
        """The place of each row when all are sorted by file and by where they begin in it."""
        files, starts = self._chunk_file.rows(0, self.n_rows), self._chunk_start.rows(0, self.n_rows).copy()
        variable = self._variable_rows.rows(0, len(self._variable_rows))
        if len(variable) and not 0 <= int(variable.min()) <= int(variable.max()) < self.n_rows:
            raise self.file.damaged("items of variable size are not among its rows")
        starts[variable] = self._variable_places.rows(0, len(self._variable_places))[::2]
        names = [self.file_name(number) for number in range(len(self._file_ends))]
        if len(files) and not 0 <= int(files.min()) <= int(files.max()) < len(names):
            raise self.file.damaged("items lie in files that it does not name")
        order_of_file: Int64 = np.empty(len(names), dtype=np.int64)
        order_of_file[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        places: Int64 = np.empty(self.n_rows, dtype=np.int64)
        places[np.lexsort((starts, order_of_file[files]))] = np.arange(self.n_rows)
        return places

    def _check_lengths(self) -> None:
        of_names = (self._name_chunks, self._name_properties, self._name_size, self._name_reach)
        of_rows = (self._chunk_size, self._chunk_file, self._chunk_start, self._chunk_nbytes)
        n_paths = len(self) if self.meta.has_paths else 0
        if {len(self), *map(len, of_names)} != {len(self)} or {self.n_rows, *map(len, of_rows)} != {self.n_rows}:
            raise self.file.damaged("its columns are not of one length")
        if self.names.n_paths != n_paths:
            raise self.file.damaged("its paths are not one for each name")
        if len(self._variable_places) != 2 * len(self._variable_rows):
            raise self.file.damaged("its items of variable size have no places")

    def _decoded_meta(self) -> IndexMeta:
        try:
            return msgspec.json.decode(self._all("meta"), type=IndexMeta)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.file.damaged(f"its section meta cannot be decoded: {error}") from None

    def _decoded_properties(self) -> list[tuple[torch.dtype, torch.layout, bool]]:
        try:
            told = msgspec.json.decode(self._all("properties") or b"[]", type=list[tuple[str, str, bool]])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.file.damaged(f"its section properties cannot be decoded: {error}") from None
        found = []
        for dtype_name, layout_name, requires_grad in told:
            dtype, layout = vars(torch).get(dtype_name), vars(torch).get(layout_name)
            if not isinstance(dtype, torch.dtype) or not isinstance(layout, torch.layout):
                raise self.file.damaged(f"{dtype_name[:60]!r} and {layout_name[:60]!r} are not a dtype and a layout")
            found.append((dtype, layout, requires_grad))
        return found

    def attributes(self) -> dict[str, dict[str, Any]]:
        """The attributes that a planner has added to ``Metadata``."""
        data = self._all("attributes")
        if not data:
            return {}
        try:
            told = msgspec.msgpack.decode(data, type=dict[str, dict[str, Any]])
            return {name: {key: with_tuples(fact) for key, fact in facts.items()} for name, facts in told.items()}
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise self.file.damaged(f"its section attributes cannot be decoded: {error}") from None

    def _all(self, section: str) -> bytes:
        return self.file.read(section, 0, self.file.nbytes(section))
