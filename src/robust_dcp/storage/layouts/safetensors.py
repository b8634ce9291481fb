"""The layout ``safetensors``: files as torch's ``HuggingFaceStorageWriter`` makes them, and one more file for the rest.

A safetensors file holds 8 bytes with the length of the header, little-endian; the header, a JSON object padded with
spaces; and the tensors' bytes without gaps. This module decides which tensor goes into which file, in which order, and
what the files are called. It owns the text of the header and the bound of its length, which must fit each other: the
length is computed before there is data, and the bytes once all is known. It also reads and checks heads,
whoever wrote them.

Objects and some dtypes do not fit into safetensors. They go to one file of torch-save records for each rank, which only
readers of ``.metadata`` know.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.decoding import Undecodable, converted, from_json
from robust_dcp.errors import CorruptCheckpoint, PlanConflict
from robust_dcp.items import Items
from robust_dcp.report import listed
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import SAFETENSORS_SUFFIX, data_file_name, shard_file_name
from robust_dcp.storage.files.small_files import read_small_file
from robust_dcp.storage.layouts.footer import SumColumns
from robust_dcp.storage.layouts.places import (
    PAGE_NBYTES,
    RECORD_ALIGNMENT,
    Kinds,
    Layout,
    Placements,
    deal,
    kinds_of,
    place_records,
    record_measures,
)
from robust_dcp.storage.records.checksum import SUM_NBYTES, joined

Int64 = npt.NDArray[np.int64]

DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""The names of dtypes in safetensors: those that it and torch's ``HuggingFaceStorageReader`` load as they were saved.

The table is our own. Whether a tensor goes into such a file must not depend on what is installed on a rank.
"""

MODEL_DTYPES: Final = {
    **DTYPES,
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Those of the files of a Hugging Face model: all that safetensors 0.8 has. Older versions lack the last ones."""

MODEL_INDEX_NAME: Final = "model.safetensors.index.json"
LENGTH_NBYTES: Final = 8
MAX_HEADER_NBYTES: Final = 100_000_000
"""Readers refuse a longer header."""

MAX_BLOCKS: Final = 1 << 16
"""A tensor with more blocks (16 GiB) gets a single checksum in the header, because a longer header would slow down
readers.
"""

METADATA_KEY: Final = "__metadata__"
SHARDING_KEY: Final = "DCP_SHARDING_INFO"
OFFSETS_KEY: Final = "saved_offsets"
CRC32_KEY: Final = "robust_dcp.crc32"
"""For each tensor 8 hexadecimal digits; if it has several blocks, 8 more for each block (``records.checksum``)."""

SAVE_KEY: Final = "robust_dcp.save"
MARK_KEY: Final = "robust_dcp.shard"
"""This key is in files that count only together with a ``.metadata``. Without it, their save was not committed."""

# The header: _BEFORE; of chunks _MARK, _SAVE and _SHARDING; _CRCS if there are any; _BEHIND[0], tensors, _BEHIND[1].
# Version and format are those of torch's writer.
_BEFORE: Final = f'{{"{METADATA_KEY}":{{"DCP_VERSION":"1.0","format":"pt"'
_MARK: Final = f',"{MARK_KEY}":"1"'
_SAVE: Final = f',"{SAVE_KEY}":"{"0" * 16}"'
_SHARDING: Final = (f',"{SHARDING_KEY}":"{{', '}"')
_CRCS: Final = (f',"{CRC32_KEY}":"{{', '}"')
_BEHIND: Final = ("}", "}")
_CONSTANT_NBYTES: Final = len("".join((_BEFORE, _MARK, _SAVE, *_SHARDING, *_CRCS, *_BEHIND)))

_CRC_DIGITS: Final = 8
_escape = json.JSONEncoder().encode  # ASCII only; for a str this is a call into C


# Which tensor goes where.

Places = npt.NDArray[np.intp]

# The columns that measure() gives: first those for the torch-save record of an item, then those for a file of raw
# bytes.
_RECORD, _HEADER, _PAYLOAD, _IS_RAW, _NAME, _ITEMSIZE, _ENTRY = range(7)


def _measure(items: Items, rows: Places) -> Int64:
    kinds, kind_ids = kinds_of(items, rows)
    sizes = [(dtype in DTYPES, getattr(torch, dtype).itemsize) for dtype, _ in kinds]
    is_raw, itemsize = np.array([*sizes, (False, 0)], dtype=np.int64)[kind_ids].T
    name = items.name[rows].astype(np.int64)
    if METADATA_KEY in items.names:  # the header uses this name itself
        is_raw = is_raw & (name != items.names.index(METADATA_KEY))
    entries = entry_nbytes(items, rows, kinds, kind_ids)
    return np.column_stack([record_measures(kinds, kind_ids), is_raw, name, itemsize, entries])


def _place(measures: Int64, files: int) -> Placements:
    is_raw = measures[:, _IS_RAW] == 1
    raw, side = np.flatnonzero(is_raw), np.flatnonzero(~is_raw)
    offset = np.full(len(measures), -1, dtype=np.int64)
    nbytes = measures[:, _RECORD].copy()
    nbytes[raw] = measures[raw, _PAYLOAD]
    in_files, heads = _spread(measures[raw], files)
    file = np.full(len(measures), len(heads), dtype=np.int32)
    file[raw] = in_files
    file_nbytes = []
    for number, head in enumerate(heads):
        members = raw[_in_order(measures[raw], np.flatnonzero(in_files == number))]
        ends = head + np.cumsum(measures[members, _PAYLOAD])
        offset[members] = ends - measures[members, _PAYLOAD]
        file_nbytes.append(int(ends[-1]))
    if len(side):
        beside = place_records(measures[side, : _PAYLOAD + 1], files=1)
        offset[side] = beside.offset
        file_nbytes.append(max(beside.file_nbytes))
        heads.append(0)
    return Placements(file, offset, nbytes, tuple(file_nbytes), tuple(heads))


def _file_names(rank: int, head_nbytes: Sequence[int], mark: str) -> list[str]:
    count = sum(nbytes > 0 for nbytes in head_nbytes)
    return [
        shard_file_name(rank, number, count, mark) if nbytes else data_file_name(rank, number, mark)
        for number, nbytes in enumerate(head_nbytes)
    ]


SAFETENSORS: Final = Layout("safetensors", "safetensors-2", False, True, _measure, _place, _file_names)


def _spread(measures: Int64, files: int) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Choose a file for each tensor. A file has each name only once, and no head is longer than readers accept.

    Returns:
        (file of each tensor, length of each file's head).
    """
    if not len(measures):
        return np.zeros(0, dtype=np.int32), []
    _, which, counts = np.unique(measures[:, _NAME], return_inverse=True, return_counts=True)
    times = counts[which.reshape(-1)]  # how often a tensor's name occurs
    n_files = max(min(files, len(measures)), int(times.max()))
    while True:
        file = _dealt(measures, times > 1, n_files)
        heads = [
            head_nbytes_for(int(entries), int(count), int(payload))
            for entries, count, payload in zip(
                np.bincount(file, weights=measures[:, _ENTRY]),
                np.bincount(file),
                np.bincount(file, weights=measures[:, _PAYLOAD]),
                strict=True,
            )
        ]
        if max(heads) - LENGTH_NBYTES <= MAX_HEADER_NBYTES:
            return file, heads
        if n_files >= len(measures):
            raise PlanConflict(f"a name of {int(measures[:, _ENTRY].max())} bytes does not fit into a safetensors file")
        n_files = min(2 * n_files, len(measures))


def _dealt(measures: Int64, is_repeated: npt.NDArray[np.bool_], n_files: int) -> npt.NDArray[np.int32]:
    file = np.zeros(len(measures), dtype=np.int32)
    # Sorted by name, the chunks of one name are neighbours. They go to the files in turn, so no two of them get the
    # same file as long as there are as many files as chunks of that name.
    repeated = np.flatnonzero(is_repeated)
    repeated = repeated[np.argsort(measures[repeated, _NAME], kind="stable")]
    file[repeated] = np.arange(len(repeated)) % n_files
    nbytes = measures[:, _PAYLOAD] + measures[:, _ENTRY]
    load = np.zeros(n_files, dtype=np.int64)
    np.add.at(load, file[repeated], nbytes[repeated])
    others = np.flatnonzero(~is_repeated)
    if len(others):
        chosen, _ = deal(nbytes[others], load)
        file[others] = chosen
    # A file may get nothing, if others have more than their share. Such a file does not exist.
    return np.unique(file, return_inverse=True)[1].reshape(-1).astype(np.int32)


def _in_order(measures: Int64, members: Places) -> Places:
    """``members`` in the order of the file.

    First come tensors that fill whole pages, so that all of them lie at 64 modulo 4096, where direct I/O needs no copy.
    The others are sorted by element size, because readers want data at a multiple of it. In each group the largest
    comes first.
    """
    payload, itemsize = measures[members, _PAYLOAD], measures[members, _ITEMSIZE]
    is_whole = payload % PAGE_NBYTES == 0
    return members[np.lexsort((-payload, np.where(is_whole, 0, -itemsize), ~is_whole))]


# The head of a file.


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file.

    Attributes:
        dtype, shape: those of the tensor, or of the chunk of a tensor.
        offset, nbytes: where its data lies in the file.
        chunk_offset: the offset of the chunk in its tensor; zeros for a whole tensor.
        crc32: the CRC-32 of its data, if the head has it.
        block_crc32s: the CRC-32s of the blocks of its data (``records.checksum``), if there are several and the head
            has them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    chunk_offset: tuple[int, ...]
    crc32: int | None = None
    block_crc32s: tuple[int, ...] = ()


def entry_nbytes(items: Items, rows: Places, kinds: Kinds, kind_ids: npt.NDArray[np.int32]) -> Int64:
    """int64 ``[n]``: an upper bound of the bytes that each of these items adds to the header.

    The two numbers that say where its data begins and ends are not counted. For dtypes that are not in
    :data:`MODEL_DTYPES` the result means nothing.
    """
    once, twice = _escaped_lengths(items.names)
    texts = _tensor_text("", "", (), 0, 0), _offsets_text("", ()), f':\\"{"0" * _CRC_DIGITS}\\"'
    constant = sum(len(text) + len(",") for text in texts) - len("00")
    of_kinds = [_kind_nbytes(dtype, shape) for dtype, shape in kinds]
    numbers = np.array([sum(len(f"{at},") for at in offset) for offset in items.sizes], dtype=np.int64)
    name = items.name[rows]
    nbytes: Int64 = once[name] + 2 * twice[name]
    nbytes += constant + np.array([*of_kinds, 0], dtype=np.int64)[kind_ids] + numbers[items.offset[rows]]
    return nbytes


def _kind_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    data_nbytes = prod(shape) * int(getattr(torch, dtype).itemsize)
    digits = _CRC_DIGITS * (_n_fields(data_nbytes) - 1)
    return len(MODEL_DTYPES.get(dtype, "")) + sum(len(f"{size},") for size in _shape_in_header(dtype, shape)) + digits


def _shape_in_header(dtype: str, shape: Sequence[int]) -> Sequence[int]:
    """The shape that the header has: of F4 it counts values, of which two are one element of the tensor."""
    return (*shape[:-1], 2 * shape[-1]) if shape and dtype == "float4_e2m1fn_x2" else shape


def _n_fields(data_nbytes: int) -> int:
    """How many checksums a tensor has in the header: its own, and those of its blocks if there are several."""
    n_blocks = -(-data_nbytes // SUM_NBYTES)
    return 1 + n_blocks if 2 <= n_blocks <= MAX_BLOCKS else 1


def head_nbytes_for(entries_nbytes: int, n_items: int, payload_nbytes: int) -> int:
    """The length of a file's head, chosen so that the first tensor's data lies at 64 modulo 4096.

    Args:
        entries_nbytes: sum of :func:`entry_nbytes`.
        payload_nbytes: bytes of data of all tensors.
    """
    least = LENGTH_NBYTES + _CONSTANT_NBYTES + entries_nbytes + 2 * n_items * len(str(payload_nbytes))
    return -(-(least - RECORD_ALIGNMENT) // PAGE_NBYTES) * PAGE_NBYTES + RECORD_ALIGNMENT


class ShardHead:
    """The head of a safetensors file. It is written last, because it holds the checksums of the data after it. It holds
    all that a footer holds, so the file has none.

    Args:
        tensors: by name, in any order. Their checksums are not looked at.
        nbytes: the length of the head, at least that of :func:`head_nbytes_for`.
        is_of_checkpoint: whether the file holds chunks that count only together with a ``.metadata``.

    Raises:
        ValueError: the head is longer than was planned.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], nbytes: int, *, is_of_checkpoint: bool = True) -> None:
        self._nbytes = nbytes
        self._data_nbytes: Int64 = np.array([tensor.nbytes for tensor in tensors.values()], dtype=np.int64)
        offset: Int64 = np.array([tensor.offset for tensor in tensors.values()], dtype=np.int64)
        self._in_file = np.lexsort((self._data_nbytes, offset))
        names = list(map(_escape, tensors))
        twice = [_escape(name)[1:-1] for name in names]
        self._before = _BEFORE
        if is_of_checkpoint:
            offsets = map(_offsets_text, twice, (tensor.chunk_offset for tensor in tensors.values()))
            self._before += _MARK + _SAVE + _SHARDING[0] + ",".join(offsets) + _SHARDING[1]
        self._first_field = np.cumsum([0, *map(_n_fields, self._data_nbytes.tolist())])
        self._crcs = [f'{name}:\\"' for name in twice]
        entries = []
        for name, tensor in zip(names, tensors.values(), strict=True):
            dtype, begin = str(tensor.dtype).removeprefix("torch."), tensor.offset - nbytes
            shape = _shape_in_header(dtype, tensor.shape)
            entries.append("," + _tensor_text(name, MODEL_DTYPES[dtype], shape, begin, begin + tensor.nbytes))
        self._behind = "".join((_BEHIND[0], *entries, _BEHIND[1]))
        crcs = self._filled_in(np.zeros(self._first_field[-1], dtype=np.uint32))
        found = LENGTH_NBYTES + len(self._before) + len(crcs) + len(self._behind)
        if found > nbytes:
            raise ValueError(f"the head of a safetensors file was planned with {nbytes} bytes and needs {found}")

    def encode(self, mark: str, sums: SumColumns | None) -> bytes:
        """The bytes of the head.

        Args:
            mark: the mark of the save; empty for a file that is not part of a save.
            sums: the checksums of the tensors of the file; ``None`` if none were computed.
        """
        crcs = "" if sums is None else self._filled_in(self._fields(sums))
        text = self._before.replace(_SAVE, _SAVE.replace("0" * 16, mark), 1) + crcs + self._behind
        header = text.encode("ascii").ljust(self._nbytes - LENGTH_NBYTES)
        return len(header).to_bytes(LENGTH_NBYTES, "little") + header

    def _fields(self, sums: SumColumns) -> npt.NDArray[np.uint32]:
        """The checksums in the order of the text."""
        if not np.array_equal(sums.nbytes, self._data_nbytes[self._in_file]):
            raise ValueError("the checksums of a safetensors file are of other tensors than its head describes")
        fields: npt.NDArray[np.uint32] = np.zeros(self._first_field[-1], dtype=np.uint32)
        counts = -(-sums.nbytes // SUM_NBYTES)
        first = np.cumsum(counts) - counts
        at = self._first_field[self._in_file]
        single = counts == 1
        fields[at[single]] = sums.crcs[first[single]]
        for row in np.flatnonzero(counts > 1).tolist():
            blocks = sums.crcs[first[row] : first[row] + counts[row]]
            fields[at[row]] = joined(blocks.tolist(), int(sums.nbytes[row]))
            if counts[row] <= MAX_BLOCKS:
                fields[at[row] + 1 : at[row] + 1 + counts[row]] = blocks
        return fields

    def _filled_in(self, checksums: npt.NDArray[np.uint32]) -> str:
        digits = checksums.astype(">u4").tobytes().hex()
        ends = (_CRC_DIGITS * self._first_field).tolist()
        crcs = [f'{name}{digits[at:end]}\\"' for name, at, end in zip(self._crcs, ends, ends[1:], strict=False)]
        return _CRCS[0] + ",".join(crcs) + _CRCS[1]


def _offsets_text(name: str, offset: Sequence[int]) -> str:
    return f'{name}:{{\\"{OFFSETS_KEY}\\":[{",".join(map(str, offset))}]}}'


def _tensor_text(name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> str:
    sizes = ",".join(map(str, shape))
    return f'{name}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'


def _escaped_lengths(names: Sequence[str]) -> tuple[Int64, Int64]:
    """int64 ``[len(names)]`` twice: the bytes of each name as a JSON string, and as a JSON string inside another one.

    Both count the quotes.
    """
    if len(_escape("".join(names))) == 2 + sum(map(len, names)):  # the usual case: nothing to escape
        once = np.fromiter(map(len, names), dtype=np.int64, count=len(names)) + 2
        return once, once + 2
    escaped = list(map(_escape, names))
    once = np.fromiter(map(len, escaped), dtype=np.int64, count=len(names))
    return once, np.fromiter((len(_escape(name)) - 2 for name in escaped), dtype=np.int64, count=len(names))


# The head of a file that is read, whoever wrote it. It is checked before anything in it is used: the lengths must fit
# together and fill the file.

_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, dtype) for dtype, name in MODEL_DTYPES.items() if hasattr(torch, dtype)
}
_HEXADECIMAL: Final = re.compile(r"[0-9a-f]+")


class FileHead(msgspec.Struct, frozen=True):
    """What a head says.

    Attributes:
        tensors: the tensors of the file, by name.
        is_of_checkpoint: whether robust_dcp wrote the file as a part of a checkpoint, so that it counts only with a
            ``.metadata``.
        mark: the mark of the save that wrote the file, if the head has it.
    """

    tensors: dict[str, StoredTensor]
    is_of_checkpoint: bool
    mark: str | None = None

    def find(self, name: str, chunk_offset: Sequence[int], offset: int, nbytes: int, file: str) -> StoredTensor:
        """The chunk at ``chunk_offset`` of a tensor, which the metadata of a checkpoint places at ``offset``.

        Raises:
            CorruptCheckpoint: no such tensor lies there.
        """
        stored = self.tensors.get(name)
        if stored is None or (stored.offset, stored.nbytes) != (offset, nbytes):
            found = "no such tensor" if stored is None else f"{stored.nbytes} bytes at {stored.offset}"
            raise CorruptCheckpoint.of_file(file, f"{nbytes} bytes at {offset} according to its head", found, item=name)
        if stored.chunk_offset != tuple(chunk_offset):
            expected = f"the chunk at {list(chunk_offset)} of its tensor"
            raise CorruptCheckpoint.of_file(file, expected, f"that at {list(stored.chunk_offset)}", item=name)
        return stored


def read_head(disk: Disk, path: str) -> FileHead:
    """Read the head of the file at ``path``.

    Raises:
        StorageError: the file cannot be read.
        CorruptCheckpoint: as :func:`parse_head`.
    """
    with disk.reading(path) as file:
        file_nbytes = file.nbytes
        length = disk.read(file, 0, LENGTH_NBYTES)
        header_nbytes = int.from_bytes(length, "little")
        if len(length) < LENGTH_NBYTES or header_nbytes > min(file_nbytes - LENGTH_NBYTES, MAX_HEADER_NBYTES):
            most = min(file_nbytes - LENGTH_NBYTES, MAX_HEADER_NBYTES)
            raise CorruptCheckpoint.of_file(
                path, f"a header of at most {most} bytes", f"{header_nbytes} bytes announced"
            )
        header = disk.read(file, LENGTH_NBYTES, header_nbytes)
    return parse_head(header, file_nbytes, path)


def parse_head(header: bytes, file_nbytes: int, file: str) -> FileHead:
    """Parse and check a header.

    Args:
        header: the bytes that follow the length.
        file_nbytes: length of the whole file.
        file: its path, for errors.

    Raises:
        CorruptCheckpoint: the bytes are not a header, a dtype is unknown, a length does not fit its dtype and shape, or
            tensors overlap, leave a hole, or do not fill the file.
    """
    described = _object_in(header, "its header", file)
    metadata = _checked(described.pop(METADATA_KEY, {}), dict[str, str], f"texts in {METADATA_KEY}", file)
    chunks = _object_in(metadata.get(SHARDING_KEY, "{}"), SHARDING_KEY, file)
    checksums = _object_in(metadata.get(CRC32_KEY, "{}"), CRC32_KEY, file)
    base = LENGTH_NBYTES + len(header)
    tensors = {}
    for name, value in described.items():
        entry = _checked(value, _Entry, "dtype, shape and data_offsets", file, name)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            known = ", ".join(sorted(_DTYPES))
            raise CorruptCheckpoint.of_file(
                file, f"a dtype that this version can read ({known})", f"{entry.dtype!r:.50}", item=name
            )
        shape, (begin, end) = tuple(entry.shape), entry.data_offsets
        if entry.dtype == "F4":
            if not shape or shape[-1] % 2:
                raise CorruptCheckpoint.of_file(
                    file, "an even number of values of F4 in the last dimension", str(shape), item=name
                )
            shape = (*shape[:-1], shape[-1] // 2)
        nbytes = prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            raise CorruptCheckpoint.of_file(
                file, f"{nbytes} bytes of data for {dtype} {shape}", f"{end - begin} bytes", item=name
            )
        offset = (0,) * len(shape)
        if name in chunks:
            expected = f"{OFFSETS_KEY} of {len(shape)} dimensions"
            chunk = _checked(chunks[name], dict[str, Any], expected, file, name)
            offset = tuple(_checked(chunk.get(OFFSETS_KEY), _Numbers, expected, file, name))
            if len(offset) != len(shape):
                raise CorruptCheckpoint.of_file(file, expected, str(offset), item=name)
        crc32, blocks = _checked_crc32s(name, checksums, nbytes, file)
        tensors[name] = StoredTensor(dtype, shape, base + begin, nbytes, offset, crc32, blocks)
    _refuse_holes(tensors, base, file_nbytes, file)
    return FileHead(tensors, is_of_checkpoint=MARK_KEY in metadata, mark=metadata.get(SAVE_KEY))


def files_of_tensors(disk: Disk, directory: str) -> dict[str, str]:
    """The file of each tensor, as the index of a Hugging Face model says; nothing if there is none.

    Raises:
        CorruptCheckpoint: the index is damaged, or names a file that cannot be in this directory.
        StorageError: it cannot be read.
    """
    path = os.path.join(directory, MODEL_INDEX_NAME)
    decode = partial(from_json, kind=dict[str, Any])
    index = read_small_file(disk, path, decode, what="the index of a model", at_most=MAX_HEADER_NBYTES)
    if index is None:
        return {}
    checked = _checked(index.get("weight_map"), dict[str, str], "the file of each tensor in weight_map", path)
    files: dict[str, str] = checked
    if strange := [each for each in files.values() if "/" in each or not each.endswith(SAFETENSORS_SUFFIX)]:
        raise CorruptCheckpoint.of_file(path, f"names of files that end in {SAFETENSORS_SUFFIX}", repr(strange[0]))
    return files


def check_model(disk: Disk, directory: str, names: Collection[str]) -> None:
    """Make sure that the files of a Hugging Face model are there, if its index is. ``names`` are in the directory.

    Raises:
        CorruptCheckpoint: the index is damaged, or names other files.
        StorageError: it cannot be read.
    """
    path = os.path.join(directory, MODEL_INDEX_NAME)
    if MODEL_INDEX_NAME not in names:
        return
    if missing := sorted({*files_of_tensors(disk, directory).values()} - {*names}):
        raise CorruptCheckpoint.of_file(path, "the files that it names", f"no {listed(missing, 5)}")


# No more and no larger numbers than torch can hold: multiplying more of them could take forever.
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Numbers = Annotated[list[_Number], msgspec.Meta(max_length=64)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: _Numbers
    data_offsets: tuple[_Number, _Number]


def _object_in(text: str | bytes, what: str, file: str) -> dict[str, Any]:
    """The JSON object in the header, or in one of its texts."""
    try:
        return from_json(text, dict[str, Any])
    except Undecodable as error:
        raise CorruptCheckpoint.of_file(file, f"a JSON object in {what}", str(error)) from error


def _checked(value: Any, kind: Any, expected: str, file: str, name: str | None = None) -> Any:
    """``value`` as a value of ``kind``."""
    try:
        return converted(value, kind)
    except Undecodable as error:
        raise CorruptCheckpoint.of_file(file, expected, f"{value!r:.200}: {error}", item=name) from error


def _checked_crc32s(name: str, checksums: dict[str, Any], nbytes: int, file: str) -> tuple[int | None, tuple[int, ...]]:
    """The CRC-32 of a tensor, and the CRC-32s of its blocks."""
    value = checksums.get(name)
    if value is None:
        return None, ()
    n_blocks = -(-nbytes // SUM_NBYTES)
    may_have = {8} if n_blocks < 2 else {8, 8 * (1 + n_blocks)}  # some files have none for blocks
    if not isinstance(value, str) or len(value) not in may_have or not _HEXADECIMAL.fullmatch(value):
        raise CorruptCheckpoint.of_file(
            file, "a CRC-32 of 8 hexadecimal digits, of it and of its blocks", f"{value!r:.50}", item=name
        )
    found = np.frombuffer(bytes.fromhex(value), dtype=">u4").tolist()
    return found[0], tuple(found[1:])


def _refuse_holes(tensors: dict[str, StoredTensor], base: int, file_nbytes: int, file: str) -> None:
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CorruptCheckpoint.of_file(
                file, f"data from byte {end - base} on", f"from byte {tensor.offset - base} on", item=name
            )
        end += tensor.nbytes
    if end != file_nbytes:
        raise CorruptCheckpoint.of_file(file, f"a file of {end} bytes", f"{file_nbytes} bytes")
