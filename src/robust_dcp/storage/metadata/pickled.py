"""The pickle of ``.metadata``, made by all ranks: a head and a tail by the coordinator, and a piece by each rank.

A pickle has a memo: numbered registers that hold objects. The head puts the names of all items into it, for each tensor
an empty list of chunks, and an empty ``storage_data``. A piece only appends to these lists, sets keys of that dict, and
leaves the stack as it was. So it knows of nothing that another rank does, and pieces may stand in any order::

    head    {<name>: TensorStorageMetadata(<properties>, <whole>, [])}, each list to its register; {} to its own
    piece   sizes and names of files to registers that the next piece uses anew, then for each item
            GET list | ChunkStorageMetadata(GET offset, GET size) | APPEND, and
            MetadataIndex(GET name, GET offset) | _StorageInfo(GET file, start, nbytes) | SETITEM
    tail    Metadata(GET state, GET paths, GET storage, <StorageMeta>), and the trailer

How long a piece is follows from the plan: a number that a save may change has room for any. So each rank knows for good
where its piece begins. Head and pieces fill whole pages, because two clients of a network file system must not write to
one page. The checksum of the file is computed from those of its parts.

Nothing here knows how torch pickles its classes. One object of each is pickled, with a mark in place of all that
differs from item to item, and is cut at the marks. NumPy then repeats the opcodes between them for a million rows.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
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

PAGE_NBYTES: Final = 4096
END_NBYTES: Final = 4096
"""The last bytes of the file, which tell it from others, are of the tail alone."""

Path = tuple[str | int, ...]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Ints = npt.NDArray[np.integer[Any]]
Parts = Sequence[bytes | str]
"""Opcodes, and between them the names of columns."""
Blank = tuple[bytes, np.dtype[np.void]]
"""A record with empty gaps, and where the gaps are."""

_PROTOCOL: Final = 3
"""Its opcodes are valid in protocol 4, and it has no frames that would have to be removed."""

_STATE, _PATHS, _STORAGE, _FIRST_NAME = range(4)
"""Registers behind those of the definitions. That of the list of a tensor follows that of the last name."""


class Names(msgspec.Struct, frozen=True, eq=False):
    """The N names of a checkpoint, and what holds for all chunks of one.

    Attributes:
        names: the distinct names, sorted: the order of ``state_dict_metadata``.
        paths: for each name its place in the nested state dict (DCP's ``planner_data``), or ``None``. The parts of a
            path, joined by dots, are the name.
        properties: the P distinct ``(dtype, layout, requires_grad)``.
        name_properties: int32 ``[N]``, place in ``properties``; -1 for an object (``BytesStorageMetadata``).
        name_size: int32 ``[N]``, place in ``sizes`` of the tensor's global size; -1 for objects.
        sizes: the S distinct sizes and offsets, those of fewer dimensions first.
    """

    names: Sequence[str]
    paths: Sequence[Path] | None
    properties: Sequence[tuple[torch.dtype, torch.layout, bool]]
    name_properties: Int32
    name_size: Int32
    sizes: Sequence[tuple[int, ...]]


class StoredRows(msgspec.Struct, frozen=True, eq=False):
    """K items that are written, each a row.

    Attributes:
        sizes: sizes and offsets.
        name: int32 ``[K]``, place among all names. A row with a name has the only object of that name, or a chunk.
        offset, size: int32 ``[K]``, places in ``sizes`` of the chunk's offsets and sizes; -1 for objects.
        file: int32 ``[K]``, place among the names of files, which are given for each checkpoint.
        start: int64 ``[K]``, where in its file the item begins, in bytes; -1 if this is given for each checkpoint.
        nbytes: int64 ``[K]``, its length there in bytes; -1 where ``start`` is -1.
    """

    sizes: Sequence[tuple[int, ...]]
    name: Int32
    offset: Int32
    size: Int32
    file: Int32
    start: Int64
    nbytes: Int64


class MetadataHead:
    """The head of the ``.metadata`` of all checkpoints that one plan writes, and what of them the plan determines.

    Attributes:
        data: the bytes of the head.
    """

    def __init__(self, names: Names) -> None:
        form, n_names = _form(), len(names.names)
        first_name = form.n_registers + _FIRST_NAME
        free = first_name + 2 * n_names
        numbers = np.arange(n_names, dtype=np.int64)
        properties = _each([TensorProperties(*each) for each in names.properties], form.memo)
        wholes = _each(map(torch.Size, names.sizes), form.memo)
        columns: dict[str, Ints] = {
            "name": first_name + numbers,
            "chunks": first_name + n_names + numbers,
            "properties": free + names.name_properties,
            "whole": free + len(properties) + names.name_size,
        }
        is_object = (names.name_properties < 0).astype(np.intp)
        blanks = [_blank(parts) for parts in (form.tensor, form.an_object)]
        paths: dict[str, Path] | None = None
        if names.paths is not None:
            texts = {name: name for name in names.names}
            paths = {  # with the strings that are in registers, and not others with the same letters
                name: tuple(texts.get(part, part) if isinstance(part, str) else part for part in path)
                for name, path in zip(names.names, names.paths, strict=True)
            }
        memo_of_names = {id(name): (number, name) for number, name in enumerate(names.names, first_name)}
        parts: list[bytes | memoryview] = [
            pickle.PROTO + b"\x04",
            _framed(form.definitions),
            _framed(_to_registers(_each(names.names), first_name)),
            _framed(_to_registers([*properties, *wholes], free)),  # only the head needs these
            pickle.EMPTY_DICT,
            *(
                _records(blanks, is_object[slab], {name: column[slab] for name, column in columns.items()})
                for slab in _slabs(n_names)
            ),
            form.to_register(_STATE),
            _framed(_each([paths], memo_of_names)[0] + form.to_register(_PATHS)),
            pickle.EMPTY_DICT + form.to_register(_STORAGE),
        ]
        self.data = _padded(parts)
        self._crc = crc32(self.data)

    def tail(self, pieces: Iterable[tuple[int, int]], storage_meta: StorageMeta | None) -> bytes:
        """The tail of one checkpoint, with the trailer.

        Args:
            pieces: for each piece its length in bytes and its CRC-32, in the order of the file.
            storage_meta: written into the file as it is.
        """
        form = _form()
        filling: dict[str, bytes] = {
            "state": form.of_register(_STATE),
            "paths": form.of_register(_PATHS),
            "storage": form.of_register(_STORAGE),
            "meta": _each([storage_meta])[0],
            "version": _each([FORMAT_VERSION])[0],
        }
        whole = b"".join(filling[part] if isinstance(part, str) else part for part in form.whole) + pickle.STOP
        # The checksum of what does not change is kept, not computed anew. So if a bit flips in memory between two
        # saves, readers of the file notice it.
        nbytes, crc = len(self.data), self._crc
        last = _padding(END_NBYTES) + whole
        for piece_nbytes, piece_crc in (*pieces, (len(last), crc32(last))):
            nbytes, crc = nbytes + piece_nbytes, crc32_of_both(crc, piece_crc, piece_nbytes)
        return last + trailer_of(nbytes, crc)


def encode_piece(rows: StoredRows, n_names: int, files: Sequence[str], places: Int64) -> bytes:
    """The piece of one rank; no bytes if it writes nothing.

    Args:
        rows: what the rank writes.
        n_names: how many names the head has.
        files: the data files, relative to the checkpoint.
        places: int64 ``[V, 2]``, start and length in its file, in bytes, of each row whose place is given for each
            checkpoint, in the order of the rows.
    """
    if not len(rows.name):
        return b""
    form, used = _form(), used_sizes(rows)
    first_name = form.n_registers + _FIRST_NAME
    free = first_name + 2 * n_names
    register_of_size = np.zeros(len(rows.sizes) + 1, dtype=np.int64)  # one more, for objects, which have none
    register_of_size[used] = free + np.arange(len(used))
    columns: dict[str, Ints] = {
        "name": first_name + rows.name,
        "list": first_name + n_names + rows.name,
        "offset": register_of_size[rows.offset],
        "size": register_of_size[rows.size],
        "file": free + len(used) + rows.file,
        "start": rows.start.copy(),
        "nbytes": rows.nbytes.copy(),
    }
    variable = rows.start < 0
    columns["start"][variable], columns["nbytes"][variable] = places[:, 0], places[:, 1]
    values = [*_each((torch.Size(rows.sizes[each]) for each in used.tolist()), form.memo), *_each(files)]
    chunk, stored = form.blanks(_are_long(rows))
    tensors, which = np.flatnonzero(rows.offset >= 0), _kinds_of(rows)
    parts: list[bytes | memoryview] = [_framed(_to_registers(values, free))]
    for rows_of_slab in (tensors[slab] for slab in _slabs(len(tensors))):
        of_slab = {name: columns[name][rows_of_slab] for name in ("list", "offset", "size")}
        parts.append(_records([chunk], np.zeros(len(rows_of_slab), dtype=np.intp), of_slab))
    parts.append(form.of_register(_STORAGE))
    parts += [
        _records(stored, which[slab], {name: column[slab] for name, column in columns.items()})
        for slab in _slabs(len(which))
    ]
    parts.append(pickle.POP)
    return _padded(parts)


def piece_nbytes(rows: StoredRows, files: Sequence[str], nbytes_of_size: dict[tuple[int, ...], int]) -> int:
    """How long the piece of these rows is, whatever the places that are given for each checkpoint.

    Args:
        files: the data files, or other names that are as long.
        nbytes_of_size: what this function has found out of sizes, for the pieces of other ranks.
    """
    if not len(rows.name):
        return 0
    form = _form()
    used = [rows.sizes[each] for each in used_sizes(rows).tolist()]
    unknown = [size for size in used if size not in nbytes_of_size]
    nbytes_of_size.update(zip(unknown, map(len, _each(map(torch.Size, unknown), form.memo)), strict=True))
    chunk, stored = form.blanks(_are_long(rows))
    n_tensors, counts = int((rows.offset >= 0).sum()), np.bincount(_kinds_of(rows), minlength=len(stored)).tolist()
    n_frames = 1 + len(_slabs(n_tensors)) + len(_slabs(len(rows.name)))
    n_values = len(used) + len(files)
    return _padded_nbytes(
        n_frames * len(_frame_head(0))
        + sum(nbytes_of_size[size] for size in used)
        + sum(map(len, _each(files)))
        + n_values * len(_to_registers([b""], 0))
        + n_tensors * len(chunk[0])
        + sum(count * len(blank) for count, (blank, _) in zip(counts, stored, strict=True))
        + len(form.of_register(_STORAGE) + pickle.POP)
    )


def digest_of_form() -> str:
    """A digest of how this process writes heads and pieces. Those of processes with another one do not fit."""
    form = _form()
    return hashlib.sha256(repr((form.definitions, form.chunk, form.stored, form.n_registers)).encode()).hexdigest()[:16]


# How rows become records.


def used_sizes(rows: StoredRows) -> Ints:
    """The places of the sizes and offsets that chunks have, ascending."""
    is_used = np.zeros(len(rows.sizes) + 1, dtype=np.bool_)
    is_used[rows.offset] = is_used[rows.size] = True
    return np.flatnonzero(is_used[:-1])


def _are_long(rows: StoredRows) -> tuple[bool, bool]:
    """Whether the places of items of fixed size begin, and are, longer than 31 bits."""
    return int(rows.start.max()) >= 1 << 31, int(rows.nbytes.max()) >= 1 << 31


def _kinds_of(rows: StoredRows) -> npt.NDArray[np.intp]:
    """Which of the records in ``_Form.blanks`` each row has."""
    return 2 * (rows.offset < 0) + (rows.start < 0)


def _slabs(n_rows: int) -> list[slice]:
    return [slice(at, at + SLAB_ROWS) for at in range(0, n_rows, SLAB_ROWS)]


def _records(blanks: Sequence[Blank], which: npt.NDArray[np.intp], columns: Mapping[str, Ints]) -> memoryview:
    """A frame with a record for each row: the blank that ``which`` names, filled from the columns."""
    nbytes = np.array([len(blank) for blank, _ in blanks])[which]
    ends = np.cumsum(nbytes)
    head = _frame_head(int(nbytes.sum()))
    frame: npt.NDArray[np.uint8] = np.empty(len(head) + int(nbytes.sum()), dtype=np.uint8)
    frame[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    data = frame[len(head) :]
    for number, (blank, gaps) in enumerate(blanks):
        places = np.flatnonzero(which == number)
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


_LONG: Final = (pickle.LONG1 + b"\x08", "<i8")
_OPCODES: Final = {"start": (pickle.BININT, "<i4"), "nbytes": (pickle.BININT, "<i4")}
"""How a column is pickled, and the numbers in it. All others hold registers."""


def _blank(parts: Parts, opcodes: Mapping[str, tuple[bytes, str]] = _OPCODES) -> Blank:
    blank, names, forms, offsets = b"", list[str](), list[str](), list[int]()
    for part in parts:
        if isinstance(part, bytes):
            blank += part
            continue
        opcode, form = opcodes.get(part, (pickle.LONG_BINGET, "<u4"))
        if part == "chunks":
            opcode = pickle.EMPTY_LIST + pickle.LONG_BINPUT
        names.append(part)
        forms.append(form)
        offsets.append(len(blank) + len(opcode))
        blank += opcode + bytes(int(form[-1]))
    return blank, np.dtype({"names": names, "formats": forms, "offsets": offsets, "itemsize": len(blank)})


# Opcodes.


def _each(values: Iterable[Any], memo: dict[int, tuple[int, Any]] | None = None) -> list[bytes]:
    """For each value the opcodes that push it and do not change the memo. No value may contain itself."""
    with io.BytesIO() as stream:
        pickler = pickle.Pickler(stream, _PROTOCOL)
        pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce_tensor_properties}
        pickler.fast = True
        pickler.memo = memo or {}
        ends = [0]
        for value in values:
            pickler.dump(value)
            ends.append(stream.tell())
        data = stream.getvalue()
    head, end = len(pickle.PROTO) + 1, len(pickle.STOP)
    return [data[begin + head : stop - end] for begin, stop in pairwise(ends)]


def _to_registers(values: Sequence[bytes], first: int) -> bytes:
    """Put what these opcodes push into registers, from ``first`` on."""
    return b"".join(
        value + pickle.LONG_BINPUT + number.to_bytes(4, "little") + pickle.POP
        for number, value in enumerate(values, first)
    )


def _frame_head(nbytes: int) -> bytes:
    """The head of a frame. If a file has no ``peek``, as files of object stores have none, ``pickle.load`` reads data
    outside of frames opcode by opcode. For 640,000 items: 0.95 s with frames, 1.8 s without from a ``BytesIO``, 3.4 s
    without from a file object in Python.
    """
    return pickle.FRAME + nbytes.to_bytes(8, "little")


def _framed(opcodes: bytes) -> bytes:
    return _frame_head(len(opcodes)) + opcodes


def _padding(nbytes: int) -> bytes:
    """Opcodes that do nothing."""
    zeros = nbytes - len(pickle.BINBYTES) - 4 - len(pickle.POP)
    return pickle.BINBYTES + zeros.to_bytes(4, "little") + bytes(zeros) + pickle.POP


def _padded_nbytes(nbytes: int) -> int:
    return -(-(nbytes + len(_padding(6))) // PAGE_NBYTES) * PAGE_NBYTES


def _padded(parts: Sequence[bytes | memoryview]) -> bytes:
    nbytes = sum(map(len, parts))
    return b"".join([*parts, _padding(_padded_nbytes(nbytes) - nbytes)])


# What torch pickles.

_MARKED: Final = (
    *("name", "properties", "whole", "chunks", "offset", "size", "file", "start", "nbytes"),
    *("state", "paths", "storage", "meta", "version"),
)
_FIRST_MARK: Final = 0x7EFEFD00
_MARK: Final = re.compile(rb"J([\x00-\x0d])\xfd\xfe\x7e")
"""How a mark is pickled, as a number of this size. No text in UTF-8 holds the bytes FD and FE."""


class _Form:
    """How this torch pickles the classes of ``.metadata``.

    Attributes:
        definitions: puts classes and names of their attributes into the first registers.
        n_registers: how many these are.
        memo: the same for picklers.
        whole: the opcodes of a ``Metadata``, with marks.
        tensor, an_object: sets what there is to a name in ``state_dict_metadata``, which is on the stack.
        chunk: appends a chunk to a list.
        stored: sets where a chunk, and where an object lies in ``storage_data``, which is on the stack.

    Raises:
        NotImplementedError: this torch pickles a class of the metadata in a way that we cannot repeat.
    """

    def __init__(self) -> None:
        with io.BytesIO() as stream:
            pickler = pickle.Pickler(stream, _PROTOCOL)
            pickler.dump((*_examples(), torch.Size, TensorProperties))
            self.definitions = stream.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)] + pickle.POP
        self.memo = pickler.memo.copy()
        self.n_registers = len(self.memo)
        self.whole, self.tensor, self.an_object, chunk, *self.stored = (_cut(*each, self.memo) for each in _examples())
        self.chunk = ["list", *chunk, pickle.APPEND + pickle.POP]

    def to_register(self, number: int) -> bytes:
        """Take what is on top of the stack into a register behind those of the definitions."""
        return _to_registers([b""], self.n_registers + number)

    def of_register(self, number: int) -> bytes:
        """Push what a register behind those of the definitions holds."""
        return pickle.LONG_BINGET + (self.n_registers + number).to_bytes(4, "little")

    @cache  # noqa: B019 there is one form in a process
    def blanks(self, are_long: tuple[bool, bool]) -> tuple[Blank, list[Blank]]:
        """The record of a chunk; and those of where it lies: of a chunk of fixed and of variable size, then of an
        object.

        Args:
            are_long: whether starts and lengths of items of fixed size need more than 31 bits.
        """
        fixed = {name: _LONG for name, is_long in zip(_OPCODES, are_long, strict=True) if is_long}
        opcodes = (_OPCODES | fixed, dict.fromkeys(_OPCODES, _LONG))
        return _blank(self.chunk), [_blank(parts, each) for parts in self.stored for each in opcodes]


@cache
def _form() -> _Form:
    return _Form()


def _examples() -> tuple[tuple[tuple[Any, ...], str], ...]:
    """Objects with marks, and which these are in their order: the whole; keys and values of a tensor and of an object;
    a chunk; keys and values of where a chunk and where an object is stored.
    """
    mark: dict[str, Any] = {column: _FIRST_MARK + number for number, column in enumerate(_MARKED)}
    whole = Metadata({})
    # A torch that does not know `version` accepts it: DCP's writers set it on the object.
    for name, column in (
        ("state_dict_metadata", "state"),
        ("planner_data", "paths"),
        ("storage_data", "storage"),
        ("storage_meta", "meta"),
        ("version", "version"),
    ):
        vars(whole).pop(name, None)
        vars(whole)[name] = mark[column]
    info = StorageInfo(mark["file"], mark["start"], mark["nbytes"])
    of_tensor = MetadataIndex("", torch.Size(()))
    vars(of_tensor).update(fqn=mark["name"], offset=mark["offset"])
    return (
        ((whole,), "state paths storage meta version"),
        (
            (mark["name"], TensorStorageMetadata(mark["properties"], mark["whole"], mark["chunks"])),
            "name properties whole chunks",
        ),
        ((mark["name"], BytesStorageMetadata()), "name"),
        ((ChunkStorageMetadata(mark["offset"], mark["size"]),), "offset size"),
        ((of_tensor, info), "name offset file start nbytes"),
        ((MetadataIndex(mark["name"]), info), "name file start nbytes"),
    )


def _cut(example: tuple[Any, ...], marks: str, memo: dict[int, tuple[int, Any]]) -> list[bytes | str]:
    """The opcodes of an example, cut at its marks. Those of a key and its value put them into a dict."""
    opcodes = b"".join(_each(example, memo))
    parts: list[Any] = _MARK.split(opcodes + pickle.SETITEM if len(example) > 1 else opcodes)
    parts[1::2] = [_MARKED[each[0]] for each in parts[1::2]]
    if parts[1::2] != marks.split():
        raise NotImplementedError(
            f"robust_dcp cannot write .metadata with torch {torch.__version__}: expected that objects like {example!r} "
            f"are pickled with {marks}, found {' '.join(parts[1::2])}; use another version of torch or of robust_dcp"
        )
    return parts
