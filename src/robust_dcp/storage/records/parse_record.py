"""Finds the data of a ``torch.save`` record of one plain tensor, with its dtype and shape, without ``torch.load``.

This module takes records by us and by DCP's writers. It never says that a record is damaged. If a record is not a plain
tensor in a plain zip, the result is ``None``, and the reader gives it to ``torch.load``.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from typing import Final

import torch

from robust_dcp.storage.records.tensor_pickle import read_tensor_pickle
from robust_dcp.storage.records.torch_zip import contiguous_strides
from robust_dcp.storage.records.zip_members import ReadRange, ZipArchive, ZipEntry

__all__ = ["ParsedRecord", "parse_record"]

_MAX_DIRECTORY_NBYTES: Final = 1 << 16
_READ_MEMBERS: Final = ("data.pkl", "byteorder")


@dataclass(frozen=True)
class ParsedRecord:
    """A tensor in a record.

    Attributes:
        dtype, shape, stride, requires_grad: as ``torch.load`` would return them; strides in elements.
        storage_offset: place of the tensor's first element in its storage, in elements.
        data_offset: where the storage's bytes begin, from the start of the record.
        data_nbytes: length of the storage in bytes.
        crc32: CRC-32 of the storage's bytes; ``None`` if it is 0, because ``torch.save`` writes 0 after
            ``torch.serialization.set_crc32_options(False)``.
        directory_at: where the archive's directory begins. It extends to the end of the record.
        crc32_at: where the CRC-32 is in the directory: 4 bytes, little-endian.
        unread_at: start and end of each range, in the directory or before the data, that says nothing about the tensor:
            checksums of its data, and of members that nobody reads.
        is_framed: whether all bytes that were read to find this lie before the data or in the directory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    requires_grad: bool
    data_offset: int
    data_nbytes: int
    crc32: int | None
    directory_at: int = field(default=0, compare=False)
    crc32_at: int = field(default=0, compare=False)
    unread_at: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    is_framed: bool = field(default=False, compare=False)

    @property
    def is_contiguous(self) -> bool:
        """Whether the storage holds the tensor's elements in order and nothing else."""
        return self.storage_offset == 0 and self.stride == contiguous_strides(self.shape)


def parse_record(read: ReadRange, nbytes: int) -> ParsedRecord | None:
    """Find the tensor in a record of ``nbytes`` bytes, in two small reads if it is a usual one.

    Returns:
        ``None`` if this is not an uncompressed zip with one tensor as ``torch.save`` writes it, in this machine's byte
        order. Then ``torch.load`` has to find out whether it is something else, or damaged.
    """
    try:
        return _parse(ZipArchive(read, nbytes, _MAX_DIRECTORY_NBYTES))
    except (struct.error, ValueError, IndexError, KeyError):
        # Bytes that are not such a record raise one of these, in zip_members, tensor_pickle or pickletools.
        return None


def _parse(archive: ZipArchive) -> ParsedRecord | None:
    entries = archive.entries
    pickled, storage = entries.get("data.pkl"), entries.get("data/0")
    # With a second storage, or the members of a TorchScript archive, this is more than one tensor.
    if pickled is None or storage is None or any(name.startswith(("data/1", "code/", "constants")) for name in entries):
        return None
    order = entries.get("byteorder")
    if (archive.contents(order) if order else b"little") != sys.byteorder.encode():
        return None
    tensor = read_tensor_pickle(archive.contents(pickled))
    data_offset = archive.data_offset(storage)
    if data_offset + storage.nbytes > archive.nbytes or tensor.storage_nbytes != storage.nbytes:
        return None
    return ParsedRecord(
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        storage_offset=tensor.storage_offset,
        requires_grad=tensor.requires_grad,
        data_offset=data_offset,
        data_nbytes=storage.nbytes,
        crc32=storage.crc32 or None,
        directory_at=archive.directory_at,
        crc32_at=storage.crc32_at,
        unread_at=_unread(entries, data_offset),
        is_framed=archive.directory_at >= data_offset + storage.nbytes
        and all(entry.header_at < storage.header_at for name, entry in entries.items() if name in _READ_MEMBERS),
    )


def _unread(entries: dict[str, ZipEntry], data_offset: int) -> tuple[tuple[int, int], ...]:
    starts = [entry.crc32_at for name, entry in entries.items() if name not in _READ_MEMBERS]
    local_crc32_at = entries["data/0"].local_crc32_at
    if local_crc32_at + 4 <= data_offset:
        starts.append(local_crc32_at)
    return tuple(sorted((start, start + 4) for start in starts))
