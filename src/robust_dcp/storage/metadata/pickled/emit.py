"""Writes the pickle of ``.metadata``. The part that a plan determines is written once, the rest for each save.

First come the values that others refer to; each gets a number in the pickle's memo. Then come the entries of DCP's
three dicts, with one record of fixed width for each row of the columns. All are kept in frames. A patch cuts the frames
where it replaces entries. ``plan.metadata`` keeps a :class:`MetadataPickle` with the plan, and the commit writes the
result of :meth:`MetadataPickle.encode`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION
from robust_dcp.storage.metadata.pickled.columns import MetadataColumns
from robust_dcp.storage.metadata.pickled.opcodes import (
    REMEMBER,
    Frame,
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
Mask = npt.NDArray[np.bool_]
Frames = tuple[Frame, ...]
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
        max_files: how many files there may be after patches.

    Raises:
        ValueError: the columns do not fit together.
        NotImplementedError: this torch pickles a class of the metadata in a way that we cannot write.
    """

    def __init__(self, columns: MetadataColumns, max_files: int = 0) -> None:
        self._max_files = max(max_files, columns.n_files)
        self._numbers: dict[str, int] = {}
        self._end = stock_records().n_constants + self._max_files
        self._definitions: Frames = ()
        self._state: Frames = ()
        self._planner: Frames = ()
        self._storage: Frames = ()
        self._has_paths = columns.paths is not None
        self._attributes = b"".join(spliced(name) + spliced(value) for name, value in columns.attributes.items())
        self._add(columns, np.ones(len(columns.names), dtype=np.bool_), np.ones(columns.n_files, dtype=np.bool_), {})

    def patched(self, columns: MetadataColumns, is_new: Mask, is_stale: Mask, removed: Iterable[str]) -> MetadataPickle:
        """The pickle of a plan that differs in some names and some files. The cost is that of these, and one pass over
        all bytes.

        Args:
            columns: the written items of these names, and all items in these files. There are at least as many files as
                before, and at most ``max_files``. The attributes are the same as before, and there are paths only if
                there were before.
            is_new: bool, for each name of ``columns`` whether it was added or has changed.
            is_stale: bool, for each file whether ``columns`` replace all its items.
            removed: the names that do not exist any more.
        """
        new = copy(self)
        new._numbers = dict(self._numbers)
        told = (name for name, is_told in zip(columns.names, is_new.tolist(), strict=True) if is_told)
        is_gone = np.zeros(self._end, dtype=np.bool_)
        is_gone[[self._numbers[name] for name in (*told, *removed) if name in self._numbers]] = True
        new._state = tuple(frame.without(is_gone) for frame in self._state)
        new._planner = tuple(frame.without(is_gone) for frame in self._planner)
        new._storage = tuple(frame.without(is_stale) for frame in self._storage)
        stays = ~is_stale[self.variable_files]
        new._add(columns, is_new, is_stale, {name: column[stays] for name, column in self._variable.items()})
        return new

    def _add(self, columns: MetadataColumns, is_new: Mask, is_stale: Mask, variable: Mapping[str, Int64]) -> None:
        """Write the entries of new names, and of all items in stale files."""
        columns.check()
        self._n_files = columns.n_files
        memo = _Memo(columns, is_new, self._numbers, self._end)
        self._end = memo.end
        self._definitions += memo.definitions
        self._planner += memo.planner
        self._state += tuple(_state_entries(columns, memo, np.flatnonzero(is_new[columns.name])))
        is_told = is_stale[columns.file]
        added = _items(columns, memo, np.flatnonzero(is_told & (columns.start < 0)))
        self._variable = {name: np.append(variable.get(name, column[:0]), column) for name, column in added.items()}
        known = np.flatnonzero(is_told & (columns.start >= 0))
        file = columns.file[known]
        known = known[np.argsort(file.astype(np.uint16) if columns.n_files < 1 << 16 else file, kind="stable")]
        self._storage += tuple(_storage_entries(_items(columns, memo, known[slab])) for slab in _slabs(len(known)))
        state, planner, storage, *self._rest = stock_records().metadata
        parts: tuple[bytes | Frame, ...] = (
            *self._definitions,
            state + pickle.EMPTY_DICT,
            *self._state,
            self._attributes + planner + (pickle.EMPTY_DICT if self._has_paths else pickle.NONE),
            *self._planner,
            storage + pickle.EMPTY_DICT,
            *self._storage,
        )
        self._constant: Fragments = tuple(part if isinstance(part, bytes) else part.data for part in parts)
        self._constant_nbytes = sum(map(len, self._constant))
        self._constant_crc = 0
        for part, data in zip(parts, self._constant, strict=True):
            crc = crc32(part) if isinstance(part, bytes) else part.crc
            self._constant_crc = crc32_of_both(self._constant_crc, crc, len(data))

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
        file_names: Sequence[str | None],
        places: Int64,
        storage_meta: StorageMeta | None,
        *,
        version: str | None = FORMAT_VERSION,
    ) -> EncodedMetadata:
        """The ``.metadata`` of one checkpoint, with its trailer. Items with known places cost nothing here.

        Args:
            file_names: the data files, relative to the checkpoint; ``None`` for a file that holds no items any more.
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
        files = [pickle.NONE if name is None else text(name) for name in file_names]
        files += [pickle.NONE] * (self._max_files - self._n_files)
        before: Fragments = (pickle.PROTO + b"\x04" + stock_records().constants, _remembered(files).data)
        behind: Fragments = (
            _storage_entries({**self._variable, "start": places[:, 0], "nbytes": places[:, 1]}).data,
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

    Args:
        columns: refer to these values.
        is_new: for each name whether it will get an entry of ``planner_data``.
        numbers: the numbers of strings that are in the memo already: names and parts of paths. New ones are added.
        end: the next number.

    Attributes:
        name, properties, size, file: int64, the numbers of the values, by their places in the columns.
        planner: the entries of ``planner_data``.
        definitions: opcodes that put the new values into the memo, without the file names, which come first.
        end: the next number.
    """

    def __init__(self, columns: MetadataColumns, is_new: Mask, numbers: dict[str, int], end: int) -> None:
        known = len(numbers)
        texts = _Texts(numbers, end - known)
        self.file = stock_records().n_constants + np.arange(columns.n_files)
        self.name = np.array([texts.number(name) for name in columns.names], dtype=np.int64)
        self.planner = tuple(self._planner_entries(columns, np.flatnonzero(is_new), texts))
        new = list(islice(numbers, known, None))
        self.properties = end + len(new) + np.arange(len(columns.properties))
        self.size = end + len(new) + len(columns.properties) + np.arange(len(columns.sizes))
        self.end = end + len(new) + len(columns.properties) + len(columns.sizes)
        self.definitions = (
            *(_remembered(map(text, new[slab])) for slab in _slabs(len(new))),
            _remembered(properties_state(*each) for each in columns.properties),
            *(_sizes(columns.sizes[slab], columns.size_ndims[slab]) for slab in _slabs(len(columns.sizes))),
        )

    def _planner_entries(self, columns: MetadataColumns, names: Rows, texts: _Texts) -> Iterator[Frame]:
        """Entries of ``planner_data``. Only these need Python code for each: paths are tuples of different lengths."""
        if columns.paths is None:
            return
        paths = list(columns.paths)
        for slab in _slabs(len(names)):
            number = self.name[names[slab]]
            yield frame_of(
                (
                    b"".join((get(name), *tuple_of([*map(texts.__getitem__, paths[place])]), pickle.SETITEM))
                    for name, place in zip(number.tolist(), names[slab].tolist(), strict=True)
                ),
                number,
            )


class _Texts(dict[str | int, bytes]):
    """The opcodes that push a part of a path. A string gets a number in the memo when it is first used."""

    def __init__(self, numbers: dict[str, int], first: int) -> None:
        super().__init__()
        self._numbers = numbers
        self._first = first

    def number(self, value: str) -> int:
        return self._numbers.setdefault(value, self._first + len(self._numbers))

    def __missing__(self, part: str | int) -> bytes:
        self[part] = pushed = get(self.number(part)) if isinstance(part, str) else spliced(part)
        return pushed


def _state_entries(columns: MetadataColumns, memo: _Memo, rows: Rows) -> Iterator[Frame]:
    """The entries of ``state_dict_metadata`` for whole names. A name is never divided, however many rows it has."""
    stock = stock_records()
    begin, chunk, end = stock.begin, stock.chunk, stock.end
    templates = (stock.object, chunk, (*begin, *chunk), (*chunk, *end), (*begin, *chunk, *end))
    starts = np.flatnonzero(np.diff(columns.name[rows], prepend=-1))
    marks = np.searchsorted(starts, np.arange(0, len(rows), SLAB_ROWS))
    for first, behind in pairwise(np.unique(np.append(np.append(starts, len(rows))[marks], len(rows))).tolist()):
        some = rows[first:behind]
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
        yield records(templates, which, values, keys=values["name"])


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


def _storage_entries(items: Mapping[str, Int64]) -> Frame:
    stock = stock_records()
    return records((stock.tensor_item, stock.object_item), items["is_object"], items, keys=items["file_place"])


def _sizes(sizes: Int64, ndims: npt.NDArray[np.uint8]) -> Frame:
    """Opcodes that put each ``torch.Size`` into the memo, with one record for each number of dimensions."""
    gaps = [Gap(str(dim), is_number=True) for dim in range(sizes.shape[1])]
    templates = [
        (stock_records().size, *tuple_of(gaps[:ndim]), pickle.TUPLE1 + pickle.REDUCE + REMEMBER)
        for ndim in range(len(gaps) + 1)
    ]
    return records(templates, ndims, {gap.name: sizes[:, dim] for dim, gap in enumerate(gaps)})


def _remembered(pushed: Iterable[bytes]) -> Frame:
    """Opcodes that give each pushed value the next number in the memo."""
    return frame_of(each + REMEMBER for each in pushed)


def _numbers_at(numbers: Int64, places: npt.NDArray[np.int32]) -> Int64:
    """``numbers[places]``. Where a place is -1, as it is for objects, the result means nothing."""
    return numbers[places] if len(numbers) else np.zeros(len(places), dtype=np.int64)


def _slabs(count: int) -> list[slice]:
    return [slice(at, at + SLAB_ROWS) for at in range(0, count, SLAB_ROWS)]
