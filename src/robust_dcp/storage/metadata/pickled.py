"""The pickle of ``.metadata``, made from columns without a Python object for each item.

Nothing here knows how torch pickles its classes. One object of each is pickled, with a mark in place of all that
differs from item to item, and is cut at the marks. NumPy then repeats the opcodes between them for a million rows::

    example    {<name>: TensorStorageMetadata(<properties>, <whole>, [ChunkStorageMetadata(<offset>, <size>)])}
    record     GET name | opcodes | GET properties | opcodes | GET whole | opcodes | GET offset | opcodes …

What marks stand for is in the pickle's memo, where everything is written once, or is a number. What a plan determines
is encoded once, and shared by all checkpoints that the plan writes: see :class:`MetadataPickle`.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
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

from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, StorageInfo, reduce_tensor_properties
from robust_dcp.storage.metadata.stored_pickle import trailer_of
from robust_dcp.storage.records.checksum import crc32, crc32_of_both

SLAB_ROWS: Final = 1 << 14
"""About so many rows are written at a time. Then the cost of a NumPy call does not matter, and temporaries stay in a
cache.
"""

Path = tuple[str | int, ...]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Ints = npt.NDArray[np.integer[Any]]
Rows = npt.NDArray[np.intp]
Fragments = tuple[bytes | memoryview, ...]
Parts = Sequence[bytes | str]
"""Opcodes, and between them the names of columns."""

_PROTOCOL: Final = 3
"""Its opcodes are valid in protocol 4, and it has no frames that would have to be removed."""

_NUMBERS: Final = frozenset({"start", "nbytes"})
"""Columns of numbers. All others hold places in the memo."""


class MetadataColumns(msgspec.Struct, frozen=True, eq=False):
    """N names, and K items that are written for them. Each item is a row; rows are sorted by (name, offsets).

    Attributes:
        names: the distinct names, sorted: the order of ``state_dict_metadata``.
        paths: for each name its place in the nested state dict (DCP's ``planner_data``), or ``None``. The parts of a
            path, joined by dots, are the name.
        properties: the P distinct ``(dtype, layout, requires_grad)``.
        name_properties: int32 ``[N]``, place in ``properties``; -1 for an object (``BytesStorageMetadata``).
        name_size: int32 ``[N]``, place in ``sizes`` of the tensor's global size; -1 for objects.
        sizes: the S distinct sizes and offsets, those of fewer dimensions first.
        name: int32 ``[K]``, place in ``names``; ascending. Each name has at least one row, an object exactly one.
        offset, size: int32 ``[K]``, places in ``sizes`` of the chunk's offsets and sizes; -1 for objects.
        file: int32 ``[K]``, place among the file names. These are given for each checkpoint.
        start: int64 ``[K]``, where in its file the item begins, in bytes; -1 if this is given for each checkpoint.
        nbytes: int64 ``[K]``, its length there in bytes; -1 where ``start`` is -1.
        n_files: how many file names there will be.
    """

    names: Sequence[str]
    paths: Sequence[Path] | None
    properties: Sequence[tuple[torch.dtype, torch.layout, bool]]
    name_properties: Int32
    name_size: Int32
    sizes: Sequence[tuple[int, ...]]
    name: Int32
    offset: Int32
    size: Int32
    file: Int32
    start: Int64
    nbytes: Int64
    n_files: int


class MetadataPickle:
    """The common part of the pickles of all checkpoints that one plan writes. Several threads may use it at once.

    Args:
        columns: the columns that the plan determines. They are not kept.

    Attributes:
        nbytes: bytes of memory that this object keeps, roughly.

    Raises:
        NotImplementedError: this torch pickles a class of the metadata in a way that we cannot repeat.
    """

    def __init__(self, columns: MetadataColumns) -> None:
        texts = {name: name for name in columns.names}
        paths: dict[str, Path] | None = None
        if columns.paths is not None:
            paths = {  # with the strings that are in the memo, and not other objects with the same letters
                name: tuple(texts.setdefault(part, part) if isinstance(part, str) else part for part in path)
                for name, path in zip(columns.names, columns.paths, strict=True)
            }
        properties = [TensorProperties(*each) for each in columns.properties]
        sizes = list(map(torch.Size, columns.sizes))
        files = [f"file {number}" for number in range(columns.n_files)]
        # One pickler puts all that records refer to into its memo: the names of files, which each checkpoint has for
        # itself, then classes and the names of their attributes, and values.
        with io.BytesIO() as stream:
            pickler = pickle.Pickler(stream, _PROTOCOL)
            pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce_tensor_properties}
            pickler.dump(files)
            stream.seek(0)
            stream.truncate()
            pickler.dump([_examples(), list(texts), properties, sizes])
            definitions = _without_ends(stream.getvalue()) + pickle.POP
        memo = pickler.memo.copy()
        of_names, of_properties, of_sizes, of_files = (
            np.array([memo[id(value)][0] for value in values] or [0], dtype=np.uint32)  # 0, as objects have no size
            for values in (columns.names, properties, sizes, files)
        )
        # What the record of each row is filled with. For objects, most of it means nothing.
        filling: dict[str, Ints] = {
            "name": of_names[columns.name],
            "properties": of_properties[columns.name_properties][columns.name],
            "whole": of_sizes[columns.name_size][columns.name],
            "offset": of_sizes[columns.offset],
            "size": of_sizes[columns.size],
            "file": of_files[columns.file],
            "start": columns.start,
            "nbytes": columns.nbytes,
            "which": (columns.offset < 0).astype(np.intp),
        }
        paths_of_names = _opcodes(paths, memo)
        whole, tensor, an_object, *self._stored = (_cut(*example, memo) for example in _examples())
        state, planner, storage, *self._rest = (part for part in whole if isinstance(part, bytes))
        variable = np.flatnonzero(columns.start < 0)
        self._variable = {name: column[variable] for name, column in filling.items()}
        known = np.flatnonzero(columns.start >= 0)
        slabs = (known[at : at + SLAB_ROWS] for at in range(0, len(known), SLAB_ROWS))
        self._constant: Fragments = (
            _frame_head(len(definitions)) + definitions,
            state + pickle.EMPTY_DICT,
            *_state_entries(tensor, an_object, columns.name, filling),
            planner,
            _frame_head(len(paths_of_names)) + paths_of_names,
            storage + pickle.EMPTY_DICT,
            *(_records(self._stored, {name: column[rows] for name, column in filling.items()}) for rows in slabs),
        )
        self._constant_nbytes = sum(map(len, self._constant))
        self.nbytes = self._constant_nbytes + sum(column.nbytes for column in self._variable.values())
        self._constant_crc = 0
        for part in self._constant:
            self._constant_crc = crc32(part, self._constant_crc)

    def encode(
        self,
        file_names: Sequence[str],
        places: Int64,
        storage_meta: StorageMeta | None,
        *,
        version: str | None = FORMAT_VERSION,
    ) -> Fragments:
        """The ``.metadata`` of one checkpoint with its trailer, in fragments to write one after the other. Items with
        known places cost nothing here.

        Args:
            file_names: the data files, relative to the checkpoint.
            places: int64 ``[V, 2]``, start and length in its file, in bytes, of each item whose place is given for each
                checkpoint, in the order of the columns.
            storage_meta: written into the file as it is.
            version: the version of DCP's format.
        """
        before_meta, before_version, end = self._rest
        names = _without_ends(pickle.dumps(list(file_names), _PROTOCOL)) + pickle.POP
        before: Fragments = (pickle.PROTO + b"\x04", _frame_head(len(names)) + names)
        behind: Fragments = (
            before_meta + _opcodes(storage_meta) + before_version + _opcodes(version) + end + pickle.STOP,
        )
        if len(places):
            variable = {**self._variable, "start": places[:, 0], "nbytes": places[:, 1]}
            behind = (_records(self._stored, variable), *behind)
        # The checksum of the large constant part is kept, not computed anew. So if a bit flips in memory between two
        # saves, readers of the file notice it.
        crc = crc32_of_both(crc32(b"".join(before)), self._constant_crc, self._constant_nbytes)
        crc = crc32_of_both(crc, crc32(b"".join(behind)), sum(map(len, behind)))
        pickled = (*before, *self._constant, *behind)
        return (*pickled, trailer_of(sum(map(len, pickled)), crc))


def _opcodes(value: Any, memo: dict[int, tuple[int, Any]] | None = None) -> bytes:
    """Opcodes that push ``value`` and do not change the memo. No value may contain itself."""
    with io.BytesIO() as stream:
        pickler = pickle.Pickler(stream, _PROTOCOL)
        pickler.fast = True
        pickler.memo = memo or {}
        pickler.dump(value)
        return _without_ends(stream.getvalue())


def _without_ends(pickled: bytes) -> bytes:
    return pickled[len(pickle.PROTO) + 1 : -len(pickle.STOP)]


# Examples.

_MARKED: Final = ("name", "properties", "whole", "offset", "size", "file", "start", "nbytes", "value", "cut")
_FIRST_MARK: Final = 0x7EFEFD00
_MARK: Final = re.compile(rb"J([\x00-\x09])\xfd\xfe\x7e")
"""How a mark is pickled, as a number of this size. No text in UTF-8 holds the bytes FD and FE."""


def _examples() -> tuple[tuple[tuple[Any, ...], str], ...]:
    """Objects with marks, and which these are in their order: the whole; keys and values of a tensor, of an object, and
    of where each is stored.
    """
    mark: dict[str, Any] = {column: _FIRST_MARK + number for number, column in enumerate(_MARKED)}
    whole = Metadata({})
    # A torch that does not know `version` accepts it: DCP's writers set it on the object.
    for name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
        vars(whole).pop(name, None)
        vars(whole)[name] = mark["value"]
    chunks = [mark["cut"], ChunkStorageMetadata(mark["offset"], mark["size"]), mark["cut"]]
    info = StorageInfo(mark["file"], mark["start"], mark["nbytes"])
    of_tensor = MetadataIndex("", torch.Size(()))
    vars(of_tensor).update(fqn=mark["name"], offset=mark["offset"])
    return (
        ((whole,), "value value value value value"),
        (
            (mark["name"], TensorStorageMetadata(mark["properties"], mark["whole"], chunks)),
            "name properties whole cut offset size cut",
        ),
        ((mark["name"], BytesStorageMetadata()), "name"),
        ((of_tensor, info), "name offset file start nbytes"),
        ((MetadataIndex(mark["name"]), info), "name file start nbytes"),
    )


def _cut(example: tuple[Any, ...], marks: str, memo: dict[int, tuple[int, Any]]) -> list[bytes | str]:
    """The opcodes of an example, cut at its marks. Those of a key and its value put them into a dict."""
    opcodes = b"".join(_opcodes(value, memo) for value in example)
    parts: list[Any] = _MARK.split(opcodes + pickle.SETITEM if len(example) > 1 else opcodes)
    parts[1::2] = [_MARKED[each[0]] for each in parts[1::2]]
    if parts[1::2] != marks.split():
        raise NotImplementedError(
            f"robust_dcp cannot write .metadata with torch {torch.__version__}: expected that objects like {example!r} "
            f"are pickled with {marks}, found {' '.join(parts[1::2])}; use another version of torch or of robust_dcp"
        )
    return parts


# Records.


def _state_entries(
    tensor: list[bytes | str], an_object: list[bytes | str], name: Int32, columns: Mapping[str, Ints]
) -> Iterator[memoryview]:
    """The entries of ``state_dict_metadata`` for whole names. A name is never divided, however many rows it has."""
    first_cut = tensor.index("cut")
    last_cut = tensor.index("cut", first_cut + 1)
    begin, chunk, end = tensor[:first_cut], tensor[first_cut + 1 : last_cut], tensor[last_cut + 1 :]
    templates = (an_object, chunk, begin + chunk, chunk + end, begin + chunk + end)
    is_first, is_last = np.diff(name, prepend=-1) != 0, np.diff(name, append=-1) != 0
    columns = {**columns, "which": np.where(columns["which"], 0, 1 + is_first + 2 * is_last)}
    starts = np.append(np.flatnonzero(is_first), len(name))
    slabs = starts[np.searchsorted(starts, np.arange(0, len(name) + 1, SLAB_ROWS))]
    for first, last in pairwise([*sorted(set(slabs.tolist())), len(name)]):
        yield _records(templates, {name: column[first:last] for name, column in columns.items()})


def _records(templates: Sequence[Parts], columns: Mapping[str, Ints]) -> memoryview:
    """A frame with an entry for each row: the template that its column ``which`` names, filled from the others."""
    which = columns["which"]
    filled_from, lengths = [], list[int]()
    for number, parts in enumerate(templates):
        places = np.flatnonzero(which == number)
        blank, gaps = _blank(parts, columns, places)
        filled_from.append((places, blank, gaps))
        lengths.append(len(blank))
    nbytes = np.array(lengths)[which]
    ends = np.cumsum(nbytes)
    head = _frame_head(int(nbytes.sum()))
    frame: npt.NDArray[np.uint8] = np.empty(len(head) + int(nbytes.sum()), dtype=np.uint8)
    frame[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    data = frame[len(head) :]
    for places, blank, gaps in filled_from:
        if len(places):
            whole = np.dtype((np.void, len(blank)))
            filled = np.full(len(places), np.frombuffer(blank, dtype=whole))
            for name in gaps.names or ():
                filled.view(gaps)[name] = columns[name][places]
            # View each byte of `data` as the start of a record. These records overlap, but those that we write to do
            # not.
            starts = np.ndarray(len(data) - len(blank) + 1, dtype=whole, buffer=data, strides=(1,))
            starts[ends[places] - len(blank)] = filled
    return frame.data


def _blank(parts: Parts, columns: Mapping[str, Ints], rows: Rows) -> tuple[bytes, np.dtype[np.void]]:
    """A record with empty gaps, and where the gaps are. A number has room for the largest number in ``rows``."""
    blank, names, forms, offsets = b"", list[str](), list[str](), list[int]()
    for part in parts:
        if isinstance(part, bytes):
            blank += part
            continue
        if part not in _NUMBERS:
            opcode, form = pickle.LONG_BINGET, "<u4"
        elif int(columns[part][rows].max(initial=0)) < 1 << 31:
            opcode, form = pickle.BININT, "<i4"
        else:
            opcode, form = pickle.LONG1 + b"\x08", "<i8"
        names.append(part)
        forms.append(form)
        offsets.append(len(blank) + len(opcode))
        blank += opcode + bytes(int(form[-1]))
    return blank, np.dtype({"names": names, "formats": forms, "offsets": offsets, "itemsize": len(blank)})


def _frame_head(nbytes: int) -> bytes:
    """The head of a frame. If a file has no ``peek``, as files of object stores have none, ``pickle.load`` reads data
    outside of frames opcode by opcode. For 640,000 items: 0.95 s with frames, 1.8 s without from a ``BytesIO``, 3.4 s
    without from a file object in Python.
    """
    return pickle.FRAME + nbytes.to_bytes(8, "little")
