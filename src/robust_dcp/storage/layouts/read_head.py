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
from typing import Any, Final, TypeGuard

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
_MAX_DIMENSIONS: Final = 64
_ENTRY_KEYS: Final = {"dtype", "shape", "data_offsets"}


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
    try:
        described: Any = json.loads(header)
    except Exception as error:  # ValueError, UnicodeDecodeError, RecursionError
        raise unusable_file(file, "a header in JSON", f"{type(error).__name__}: {error}") from error
    if not isinstance(described, dict):
        raise unusable_file(file, "a header that is a JSON object", type(described).__name__)
    metadata = _checked_metadata(described.pop(METADATA_KEY, {}), file)
    chunks = _nested(metadata, SHARDING_KEY, file)
    checksums = _nested(metadata, CRC32_KEY, file)
    base = LENGTH_NBYTES + len(header)
    tensors = {}
    for name, entry in described.items():
        dtype, shape, begin, end = _checked_entry(name, entry, file)
        offset = _checked_offset(name, chunks, shape, file)
        crc32, blocks = _checked_crc32s(name, checksums, end - begin, file)
        tensors[name] = StoredTensor(dtype, shape, base + begin, end - begin, offset, crc32, blocks)
    _refuse_holes(tensors, base, file_nbytes, file)
    return FileHead(tensors, is_of_checkpoint=MARK_KEY in metadata, mark=metadata.get(SAVE_KEY))


def _checked_metadata(metadata: Any, file: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise unusable_file(file, f"strings in {METADATA_KEY}", f"{metadata!r:.200}")
    return metadata


def _nested(metadata: dict[str, str], key: str, file: str) -> dict[str, Any]:
    """The JSON object in one of the strings of the metadata; empty if there is none."""
    if key not in metadata:
        return {}
    try:
        value = json.loads(metadata[key])
    except Exception as error:
        raise unusable_file(file, f"JSON in {key}", f"{type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise unusable_file(file, f"a JSON object in {key}", type(value).__name__)
    return value


def _checked_entry(name: str, entry: Any, file: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise unusable_file(file, "dtype, shape and data_offsets", f"{entry!r:.200}", name)
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        known = ", ".join(sorted(_DTYPES))
        raise unusable_file(file, f"a dtype that this version can read ({known})", f"{entry['dtype']!r:.50}", name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise unusable_file(file, "a shape, and begin and end of the data", f"{entry!r:.200}", name)
    begin, end = offsets
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise unusable_file(file, f"{nbytes} bytes of data for {dtype} {shape}", f"{end - begin} bytes", name)
    return dtype, tuple(shape), begin, end


def _checked_offset(name: str, chunks: dict[str, Any], shape: tuple[int, ...], file: str) -> tuple[int, ...]:
    if name not in chunks:
        return (0,) * len(shape)
    described = chunks[name]
    offset = described.get(OFFSETS_KEY) if isinstance(described, dict) else None
    if not _are_sizes(offset) or len(offset) != len(shape):
        raise unusable_file(file, f"{OFFSETS_KEY} of {len(shape)} dimensions", f"{described!r:.200}", name)
    return tuple(offset)


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


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    # No more and no larger numbers than torch can hold: multiplying more of them could take forever.
    is_short = isinstance(values, list) and len(values) <= _MAX_DIMENSIONS
    return is_short and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


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
