"""Writes the pickle of ``.metadata``. The part that a plan determines is written once, the rest for each save.

First come the values that others refer to; each gets a number in the pickle's memo. Then come the entries of DCP's
three dicts, with one record of fixed width for each row of the columns. ``plan.metadata`` keeps a
:class:`MetadataPickle` with the plan, and the commit writes the result of :meth:`MetadataPickle.encode`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION
from robust_dcp.storage.metadata.pickled.columns import MetadataColumns
from robust_dcp.storage.metadata.pickled.opcodes import (
    REMEMBER,
    Gap,
    frame_of,
    get,
    records,
    spliced,
    text,
    tuple_of,
)
from robust_dcp.storage.metadata.pickled.stock_records import properties_state, stock_records
from robust_dcp.storage.metadata.stored_pickle import trailer_of
from robust_dcp.storage.records.checksum import crc32, crc32_of_both

__all__ = ["SLAB_ROWS", "EncodedMetadata", "MetadataPickle"]

SLAB_ROWS = 1 << 14
"""About so many rows are written at a time. Then the cost of a NumPy call does not matter, and temporaries stay in a
cache.
"""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
Fragments = tuple[bytes | memoryview, ...]


@dataclass(frozen=True, eq=False)
class EncodedMetadata:
    """The bytes of a ``.metadata`` file, in fragments to write one after the other."""

    fragments: Fragments

    @cached_property
    def nbytes(self) -> int:
        """The length of the file."""
        return sum(map(len, self.fragments))


class MetadataPickle:
    """The common part of the pickles of all checkpoints that one plan writes. Several threads may use it at once.

    Args:
        columns: the columns that the plan determines. They are not kept.

    Raises:
        ValueError: the columns do not fit together.
        NotImplementedError: this torch pickles a class of the metadata in a way that we cannot write.
    """

    def __init__(self, columns: MetadataColumns) -> None:
        columns.check()
        memo = _Memo(columns)
        self._n_files = columns.n_files
        self._variable = _items(columns, memo, np.flatnonzero(columns.start < 0))
        known = np.flatnonzero(columns.start >= 0)
        attributes = b"".join(spliced(name) + spliced(value) for name, value in columns.attributes.items())
        state, planner, storage, *self._rest = stock_records().metadata
        self._constant: Fragments = (
            *memo.definitions,
            state + pickle.EMPTY_DICT,
            *_state_entries(columns, memo),
            attributes + planner + (pickle.NONE if columns.paths is None else pickle.EMPTY_DICT),
            *memo.planner,
            storage + pickle.EMPTY_DICT,
            *(_storage_entries(_items(columns, memo, known[slab])) for slab in _slabs(len(known))),
        )
        self._constant_nbytes = sum(map(len, self._constant))
        self._constant_crc = 0
        for part in self._constant:
            self._constant_crc = crc32(part, self._constant_crc)

    @property
    def variable_files(self) -> Int64:
        """int64 ``[V]``: the file of each item whose place is given for each checkpoint. Items of one file are in their
        order.
        """
        return self._variable["file_place"]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this object keeps, roughly."""
        return self._constant_nbytes + sum(column.nbytes for column in self._variable.values())

    def encode(
        self,
        file_names: Sequence[str],
        places: Int64,
        storage_meta: StorageMeta | None,
        *,
        version: str | None = FORMAT_VERSION,
    ) -> EncodedMetadata:
        """The ``.metadata`` of one checkpoint, with its trailer. Items with known places cost nothing here.

        Args:
            file_names: the data files, relative to the checkpoint.
            places: int64 ``[V, 2]``, start and length of each item of ``variable_files`` in its file, in bytes.
            storage_meta: written into the file as it is.
            version: the version of DCP's format.

        Raises:
            ValueError: the number of file names or places is not that of the columns, or a place is impossible.
        """
        n_variable = len(self.variable_files)
        if len(file_names) != self._n_files:
            raise ValueError(f"a .metadata of {self._n_files} data files was given {len(file_names)} file names")
        if places.shape != (n_variable, 2):
            raise ValueError(
                f"a .metadata with {n_variable} items of variable size was given places of shape {places.shape}: "
                "expected a start and a length for each"
            )
        if places.size and int(places.min()) < 0:
            raise ValueError(f"places in a .metadata: expected starts and lengths in bytes, found {int(places.min())}")
        before_meta, before_version, end = self._rest
        before: Fragments = (pickle.PROTO + b"\x04" + stock_records().constants, _remembered(map(text, file_names)))
        behind: Fragments = (
            _storage_entries({**self._variable, "start": places[:, 0], "nbytes": places[:, 1]}),
            before_meta + spliced(storage_meta) + before_version + spliced(version) + end + pickle.STOP,
        )
        # The checksum of the large constant part is kept, not computed anew. So if a bit flips in memory between two
        # saves, readers of the file notice it.
        crc = crc32_of_both(crc32(b"".join(before)), self._constant_crc, self._constant_nbytes)
        crc = crc32_of_both(crc, crc32(b"".join(behind)), sum(map(len, behind)))
        pickled = (*before, *self._constant, *behind)
        return EncodedMetadata((*pickled, trailer_of(sum(map(len, pickled)), crc)))


class _Memo:
    """The numbers, in the pickle's memo, of the values that entries refer to.

    The memo holds stock's constants, the file names, the strings of names and paths, properties and sizes.

    Args:
        columns: refer to these values.

    Attributes:
        name, properties, size, file: int64, the numbers of the values, by their places in the columns.
        planner: the entries of ``planner_data``.
        definitions: opcodes that put the values into the memo, without the file names, which come first.
    """

    def __init__(self, columns: MetadataColumns) -> None:
        self.file = stock_records().n_constants + np.arange(columns.n_files)
        texts = _Texts(stock_records().n_constants + columns.n_files)
        self.name = np.array([texts.number(name) for name in columns.names], dtype=np.int64)
        self.planner = tuple(self._planner_entries(columns, texts))
        strings = list(texts.numbers)
        self.properties = texts.end + np.arange(len(columns.properties))
        self.size = texts.end + len(columns.properties) + np.arange(len(columns.sizes))
        self.definitions = (
            *(_remembered(map(text, strings[slab])) for slab in _slabs(len(strings))),
            _remembered(properties_state(*each) for each in columns.properties),
            *(_sizes(columns.sizes[slab], columns.size_ndims[slab]) for slab in _slabs(len(columns.sizes))),
        )

    def _planner_entries(self, columns: MetadataColumns, texts: _Texts) -> Iterator[memoryview]:
        """Entries of ``planner_data``. Only these need Python code for each: paths are tuples of different lengths."""
        if columns.paths is None:
            return
        paths = list(columns.paths)
        for slab in _slabs(len(paths)):
            yield frame_of(
                b"".join((get(number), *tuple_of([*map(texts.__getitem__, path)]), pickle.SETITEM))
                for number, path in zip(self.name[slab].tolist(), paths[slab], strict=True)
            )


class _Texts(dict[str | int, bytes]):
    """The opcodes that push a part of a path. A string gets a number in the memo when it is first used."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}
        self._first = first

    @property
    def end(self) -> int:
        """The next number in the memo."""
        return self._first + len(self.numbers)

    def number(self, value: str) -> int:
        return self.numbers.setdefault(value, self.end)

    def __missing__(self, part: str | int) -> bytes:
        self[part] = pushed = get(self.number(part)) if isinstance(part, str) else spliced(part)
        return pushed


def _state_entries(columns: MetadataColumns, memo: _Memo) -> Iterator[memoryview]:
    """The entries of ``state_dict_metadata`` for whole names. A name is never divided, however many rows it has."""
    stock = stock_records()
    begin, chunk, end = stock.begin, stock.chunk, stock.end
    templates = (stock.object, chunk, (*begin, *chunk), (*chunk, *end), (*begin, *chunk, *end))
    n_rows = len(columns.name)
    starts = np.flatnonzero(np.diff(columns.name, prepend=-1))
    marks = np.searchsorted(starts, np.arange(0, n_rows, SLAB_ROWS))
    for first, behind in pairwise(np.unique(np.append(np.append(starts, n_rows)[marks], n_rows)).tolist()):
        some = slice(first, behind)
        name = columns.name[some]
        properties = columns.name_properties[name]
        values = {
            "name": memo.name[name],
            "properties": _numbers_at(memo.properties, properties),
            "whole": _numbers_at(memo.size, columns.name_size[name]),
            "offset": _numbers_at(memo.size, columns.offset[some]),
            "size": _numbers_at(memo.size, columns.size[some]),
        }
        is_first, is_last = np.diff(name, prepend=-1) != 0, np.diff(name, append=-1) != 0
        which = np.where(properties < 0, 0, 1 + is_first + 2 * is_last)
        yield records(templates, which, values)


def _items(columns: MetadataColumns, memo: _Memo, rows: Rows) -> dict[str, Int64]:
    """The values in the entries of ``storage_data`` for ``rows``."""
    return {
        "name": memo.name[columns.name[rows]],
        "offset": _numbers_at(memo.size, columns.offset[rows]),
        "file": memo.file[columns.file[rows]],
        "start": columns.start[rows],
        "nbytes": columns.nbytes[rows],
        "is_object": (columns.offset[rows] < 0).astype(np.int64),
        "file_place": columns.file[rows].astype(np.int64),
    }


def _storage_entries(items: Mapping[str, Int64]) -> memoryview:
    stock = stock_records()
    return records((stock.tensor_item, stock.object_item), items["is_object"], items)


def _sizes(sizes: Int64, ndims: npt.NDArray[np.uint8]) -> memoryview:
    """Opcodes that put each ``torch.Size`` into the memo, with one record for each number of dimensions."""
    gaps = [Gap(str(dim), is_number=True) for dim in range(sizes.shape[1])]
    templates = [
        (stock_records().size, *tuple_of(gaps[:ndim]), pickle.TUPLE1 + pickle.REDUCE + REMEMBER)
        for ndim in range(len(gaps) + 1)
    ]
    return records(templates, ndims, {gap.name: sizes[:, dim] for dim, gap in enumerate(gaps)})


def _remembered(pushed: Iterable[bytes]) -> memoryview:
    """Opcodes that give each pushed value the next number in the memo."""
    return frame_of(each + REMEMBER for each in pushed)


def _numbers_at(numbers: Int64, places: npt.NDArray[np.int32]) -> Int64:
    """``numbers[places]``. Where a place is -1, as it is for objects, the result means nothing."""
    return numbers[places] if len(numbers) else np.zeros(len(places), dtype=np.int64)


def _slabs(count: int) -> list[slice]:
    return [slice(at, at + SLAB_ROWS) for at in range(0, count, SLAB_ROWS)]
