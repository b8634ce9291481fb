"""Reads the head of a safetensors file, whoever wrote it: where each tensor lies, and what its checksums are.

This module checks a head before anything in it is used: the lengths must fit together and fill the file.
``data_file`` calls it for such files, ``metadata_file`` for directories without ``.metadata``, and
``commit``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.safetensors import (
    CRC32_KEY,
    DTYPES,
    LENGTH_NBYTES,
    MARK_KEY,
    MAX_HEADER_NBYTES,
    METADATA_KEY,
    OFFSETS_KEY,
    SAVE_KEY,
    SHARDING_KEY,
)
from robust_dcp.storage.records.checksum import SUM_NBYTES

__all__ = ["FileHead", "StoredTensor", "parse_head", "read_head", "unusable_file"]

# Dtypes that later versions of safetensors know, and that we do not write.
_MORE_DTYPES: Final = {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu"}
_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, dtype)
    for name, dtype in {**{name: dtype for dtype, name in DTYPES.items()}, **_MORE_DTYPES}.items()
    if hasattr(torch, dtype)
}
_HEXADECIMAL: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True)
class StoredTensor:
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
    crc32: int | None
    block_crc32s: tuple[int, ...] = ()


@dataclass(frozen=True)
class FileHead:
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
            raise unusable_file(file, f"{nbytes} bytes at {offset} according to its head", found, name)
        if stored.chunk_offset != tuple(chunk_offset):
            expected = f"the chunk at {list(chunk_offset)} of its tensor"
            raise unusable_file(file, expected, f"that at {list(stored.chunk_offset)}", name)
        return stored


def read_head(disk: Disk, path: str) -> FileHead:
    """Read the head of the file at ``path``.

    Raises:
        StorageError: the file cannot be read.
        CorruptCheckpoint: as :func:`parse_head`.
    """
    with disk.reading(path) as file:
        file_nbytes = disk.size(file)
        length = disk.read(file, LENGTH_NBYTES, 0)
        header_nbytes = int.from_bytes(length, "little")
        if len(length) < LENGTH_NBYTES or header_nbytes > min(file_nbytes - LENGTH_NBYTES, MAX_HEADER_NBYTES):
            most = min(file_nbytes - LENGTH_NBYTES, MAX_HEADER_NBYTES)
            raise unusable_file(path, f"a header of at most {most} bytes", f"{header_nbytes} bytes announced")
        header = disk.read(file, header_nbytes, LENGTH_NBYTES)
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
            raise unusable_file(file, f"a dtype that this version can read ({known})", f"{entry.dtype!r:.50}", name)
        shape, (begin, end) = tuple(entry.shape), entry.data_offsets
        nbytes = prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            raise unusable_file(file, f"{nbytes} bytes of data for {dtype} {shape}", f"{end - begin} bytes", name)
        offset = (0,) * len(shape)
        if name in chunks:
            expected = f"{OFFSETS_KEY} of {len(shape)} dimensions"
            offset = tuple(_checked(chunks[name], _Chunk, expected, file, name).saved_offsets)
            if len(offset) != len(shape):
                raise unusable_file(file, expected, str(offset), name)
        crc32, blocks = _checked_crc32s(name, checksums, nbytes, file)
        tensors[name] = StoredTensor(dtype, shape, base + begin, nbytes, offset, crc32, blocks)
    _refuse_holes(tensors, base, file_nbytes, file)
    return FileHead(tensors, is_of_checkpoint=MARK_KEY in metadata, mark=metadata.get(SAVE_KEY))


# No more and no larger numbers than torch can hold: multiplying more of them could take forever.
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Numbers = Annotated[list[_Number], msgspec.Meta(max_length=64)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: _Numbers
    data_offsets: tuple[_Number, _Number]


class _Chunk(msgspec.Struct):
    saved_offsets: _Numbers = msgspec.field(name=OFFSETS_KEY)


def _object_in(text: str | bytes, what: str, file: str) -> dict[str, Any]:
    """The JSON object in the header, or in one of its texts."""
    try:
        value = json.loads(text)
    except Exception as error:  # ValueError, UnicodeDecodeError, RecursionError
        raise unusable_file(file, f"a JSON object in {what}", f"{type(error).__name__}: {error}") from error
    found: dict[str, Any] = _checked(value, dict[str, Any], f"a JSON object in {what}", file)
    return found


def _checked(value: Any, kind: Any, expected: str, file: str, name: str | None = None) -> Any:
    """``value`` as a value of ``kind``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise unusable_file(file, expected, f"{value!r:.200}: {error}", name) from error


def _checked_crc32s(name: str, checksums: dict[str, Any], nbytes: int, file: str) -> tuple[int | None, tuple[int, ...]]:
    """The CRC-32 of a tensor, and the CRC-32s of its blocks."""
    value = checksums.get(name)
    if value is None:
        return None, ()
    n_blocks = -(-nbytes // SUM_NBYTES)
    may_have = {8} if n_blocks < 2 else {8, 8 * (1 + n_blocks)}  # some files have none for blocks
    if not isinstance(value, str) or len(value) not in may_have or not _HEXADECIMAL.fullmatch(value):
        raise unusable_file(file, "a CRC-32 of 8 hexadecimal digits, of it and of its blocks", f"{value!r:.50}", name)
    found = np.frombuffer(bytes.fromhex(value), dtype=">u4").tolist()
    return found[0], tuple(found[1:])


def _refuse_holes(tensors: dict[str, StoredTensor], base: int, file_nbytes: int, file: str) -> None:
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise unusable_file(file, f"data from byte {end - base} on", f"from byte {tensor.offset - base} on", name)
        end += tensor.nbytes
    if end != file_nbytes:
        raise unusable_file(file, f"a file of {end} bytes", f"{file_nbytes} bytes")


def unusable_file(file: str, expected: str, found: str, item: str | None = None) -> CorruptCheckpoint:
    """The error for a safetensors file that is damaged, or does not fit the others."""
    what = file if item is None else f"item {item!r} in {file}"
    return CorruptCheckpoint(
        f"{what} cannot be used: expected {expected}, found {found}; take another checkpoint, or restore the file",
        file=file,
        item=item,
        expected=expected,
        found=found,
    )
