"""The pickle of ``.metadata``: what a plan determines is emitted once, what a save determines at each emission.

Owns the order of what is emitted: first the values that others refer to, each of which gets a number in the pickle's
memo, then the entries of DCP's three dicts, a record of fixed width for each row of the columns. They are kept in
frames, which a patch cuts where it replaces entries. ``plan.metadata`` keeps a :class:`MetadataPickle` with the plan,
the commit writes what :meth:`MetadataPickle.encode` gives.
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

from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, trailer_of
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
from robust_dcp.storage.records.checksum import crc32, crc32_of_both

__all__ = ["SLAB_ROWS", "EncodedMetadata", "MetadataPickle"]

SLAB_ROWS = 1 << 14
"""About so many rows are emitted at once: a call of NumPy costs nothing for each, and temporaries stay in a cache."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Frames = tuple[Frame, ...]
Fragments = tuple[bytes | memoryview, ...]


@dataclass(frozen=True, eq=False)
class EncodedMetadata:
    """The bytes of a ``.metadata`` file, to be written one fragment after the other."""

    fragments: Fragments

    @cached_property
    def nbytes(self) -> int:
        """The length of the file."""
        return sum(map(len, self.fragments))


class MetadataPickle:
    """The pickle of all checkpoints that are written by one plan. Any number of threads may use it at once.

    Args:
        columns: what the plan determines; not kept.
        max_files: how many files there may be after patches.

    Raises:
        ValueError: the columns do not fit together.
        NotImplementedError: this torch pickles a class of metadata in a way that cannot be emitted.
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
        """The pickle of a plan that differs in some names and some files. Costs what these cost, and a pass over bytes.

        Args:
            columns: the written items of these names, and all items that lie in these files. There are at least as
                many files as before, and at most ``max_files``. Attributes, and whether there are paths, are as before.
            is_new: bool, for each name of ``columns`` whether it was added or has changed.
            is_stale: bool, for each file whether all that lies in it is told anew.
            removed: the names that are no longer there.
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
        """Emit the entries of the names that are new, and of all that lies in files that are stale."""
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
        """int64 ``[V]``: the file of each item whose place is told at each emission; those of a file in their order."""
        return self._variable["file_place"]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept, about."""
        return self._constant_nbytes + sum(column.nbytes for column in self._variable.values())

    def encode(
        self,
        file_names: Sequence[str | None],
        places: Int64,
        storage_meta: StorageMeta | None,
        *,
        version: str | None = FORMAT_VERSION,
    ) -> EncodedMetadata:
        """The ``.metadata`` of one checkpoint, trailer included. Costs nothing for items whose places are known.

        Args:
            file_names: the data files, relative to the checkpoint; ``None`` for a file in which nothing lies any more.
            places: int64 ``[V, 2]``, start and length in its file of each of ``variable_files``, in bytes.
            storage_meta: goes into the file as it is.
            version: that of DCP's format.

        Raises:
            ValueError: other numbers of file names or places than the columns have, or a place that cannot be.
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
        # The bulk's checksum is kept, so a bit that flips in memory between two saves is noticed when the file is read.
        crc = crc32_of_both(crc32(b"".join(before)), self._constant_crc, self._constant_nbytes)
        crc = crc32_of_both(crc, crc32(b"".join(behind)), sum(map(len, behind)))
        pickled = (*before, *self._constant, *behind)
        return EncodedMetadata((*pickled, trailer_of(sum(map(len, pickled)), crc)))


class _Memo:
    """The numbers in the pickle's memo of what the entries refer to.

    Args:
        columns: what they refer to.
        is_new: for each name whether it has an entry of ``planner_data`` to come.
        numbers: of the strings that are there already, names and parts of paths; those that are not are added.
        end: the next number.

    Attributes:
        name, properties, size, file: int64, the numbers of the values that the columns have places for.
        planner: the entries of ``planner_data``.
        definitions: puts the values into the memo that are not there, but for the file names, which come first.
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
        """The only entries that cost a turn of a loop each, because paths are ragged and come as tuples."""
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
    """The opcodes that push a part of a path; a string gets a number in the memo when it is first asked for."""

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
    """The entries of ``state_dict_metadata`` of whole names. A name is never cut in two, whatever its rows."""
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
            "properties": _taken(memo.properties, properties),
            "whole": _taken(memo.size, columns.name_size[name]),
            "offset": _taken(memo.size, columns.offset[some]),
            "size": _taken(memo.size, columns.size[some]),
        }
        is_first, is_last = np.diff(name, prepend=-1) != 0, np.diff(name, append=-1) != 0
        which = np.where(properties < 0, 0, 1 + is_first + 2 * is_last)
        yield records(templates, which, values, keys=values["name"])


def _items(columns: MetadataColumns, memo: _Memo, rows: Rows) -> dict[str, Int64]:
    """What the entries of ``storage_data`` of ``rows`` consist of."""
    return {
        "name": memo.name[columns.name[rows]],
        "offset": _taken(memo.size, columns.offset[rows]),
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
    """Puts each ``torch.Size`` into the memo; there is a record for each number of dimensions."""
    gaps = [Gap(str(dim), is_number=True) for dim in range(sizes.shape[1])]
    templates = [
        (stock_records().size, *tuple_of(gaps[:ndim]), pickle.TUPLE1 + pickle.REDUCE + REMEMBER)
        for ndim in range(len(gaps) + 1)
    ]
    return records(templates, ndims, {gap.name: sizes[:, dim] for dim, gap in enumerate(gaps)})


def _remembered(pushed: Iterable[bytes]) -> Frame:
    """Gives each value that is pushed the next number in the memo."""
    return frame_of(each + REMEMBER for each in pushed)


def _taken(numbers: Int64, places: npt.NDArray[np.int32]) -> Int64:
    """``numbers[places]``. Where a place is -1, as for objects, the number means nothing."""
    return numbers[places] if len(numbers) else np.zeros(len(places), dtype=np.int64)


def _slabs(count: int) -> list[slice]:
    return [slice(at, at + SLAB_ROWS) for at in range(0, count, SLAB_ROWS)]
