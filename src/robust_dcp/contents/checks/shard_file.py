"""Checks a safetensors file: its head against ``.metadata``, and its data by the checksums in the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from robust_dcp.contents.checks.findings import Findings
from robust_dcp.contents.checks.spans import Span, Whole, pieces
from robust_dcp.contents.items import Chunk, Item
from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.layouts.footer import SumColumns
from robust_dcp.storage.layouts.protocol import PlacedTensor
from robust_dcp.storage.layouts.read_head import FileHead, StoredTensor
from robust_dcp.storage.layouts.safetensors_head import LENGTH_NBYTES, ShardHead
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.block_sums import SUM_NBYTES, joined

__all__ = ["check_head", "spans_of_shard"]


def check_head(
    file: DataFile, name: str, mark: str | None, items: Sequence[tuple[Item, Chunk]], findings: Findings
) -> FileHead | None:
    """The head, after a comparison with what ``.metadata`` says; ``None`` if it cannot be used.

    Args:
        mark: of the save that wrote the file; ``None`` if it was not one of ours.
    """
    try:
        head = file.head.get()
    except CorruptCheckpoint as error:
        findings.broken(name, error.item, error.expected or "a safetensors file", error.found or error.message)
        return None
    if head is None:
        return None
    if mark is not None and head.mark != mark:
        findings.broken(name, None, f"a file of save {mark}", f"a file of save {head.mark}")
        return None
    for item, chunk in items:
        stored = head.tensors.get(item.name)
        if stored is None:
            findings.broken(name, item.name, "the tensor in the head of the file", "no such tensor")
            continue
        dtype = str(stored.dtype).removeprefix("torch.")
        is_moved = chunk.start is not None and (stored.offset, stored.nbytes) != (chunk.start, chunk.stored_nbytes)
        offsets = stored.chunk_offset if mark is not None else chunk.offsets
        if is_moved or (dtype, stored.shape, offsets) != (item.dtype, chunk.sizes, chunk.offsets):
            expected = f"{item.dtype} {list(chunk.sizes)} of {list(chunk.offsets)}, at byte {chunk.start}"
            found = f"{dtype} {list(stored.shape)} of {list(stored.chunk_offset)}, at byte {stored.offset}"
            findings.broken(name, item.name, expected, found)
    if mark is not None and not _is_as_written(file, head):
        findings.broken(name, None, "the head of a safetensors file as robust_dcp writes it", "other bytes")
    return head


def spans_of_shard(head: FileHead, findings: Findings) -> Iterator[Span]:
    """The data of all tensors that have a checksum."""
    for name, stored in sorted(head.tensors.items(), key=lambda entry: entry[1].offset):
        end = stored.offset + stored.nbytes
        if stored.crc32 is None:
            findings.not_verified("its safetensors file has no checksums", stored.nbytes)
        elif stored.block_crc32s:
            for number, value in enumerate(stored.block_crc32s):
                begin = stored.offset + number * SUM_NBYTES
                yield Span(begin, min(begin + SUM_NBYTES, end), name, value)
        elif stored.nbytes:
            yield from pieces(Whole(name, "data", stored.offset, end, stored.crc32))


def _is_as_written(file: DataFile, head: FileHead) -> bool:
    """Whether the head is, byte for byte, what our writer makes of what the head says."""
    if any(_has_too_many_blocks(each) for each in head.tensors.values()):
        return True  # such a head has too few checksums to make it once more; its parts were compared
    length = bytearray(LENGTH_NBYTES)
    file.read_into(memoryview(length), 0)
    nbytes = LENGTH_NBYTES + int.from_bytes(length, "little")
    data = bytearray(nbytes)
    file.read_into(memoryview(data), 0)
    placed = [
        PlacedTensor(number, name, each.dtype, each.shape, each.chunk_offset, each.offset)
        for number, (name, each) in enumerate(head.tensors.items())
    ]
    try:
        made = ShardHead(placed, nbytes).encode(head.mark or "", _sums_of(head))
    except (ValueError, KeyError):
        return False
    return made == data


def _has_too_many_blocks(stored: StoredTensor) -> bool:
    return stored.crc32 is not None and stored.nbytes > SUM_NBYTES and not stored.block_crc32s


def _sums_of(head: FileHead) -> SumColumns | None:
    """The checksums in the head as columns, in the order of the file."""
    stored = sorted(head.tensors.values(), key=lambda each: (each.offset, each.nbytes))
    if any(each.crc32 is None for each in stored):
        return None
    crcs = [crc for each in stored for crc in (each.block_crc32s or ((each.crc32,) if each.nbytes else ()))]
    for each in stored:
        if each.block_crc32s and joined(each.block_crc32s, each.nbytes) != each.crc32:
            raise ValueError("the checksum of a tensor is not that of its blocks")
    return SumColumns(
        np.array([each.offset for each in stored], dtype=np.int64),
        np.array([each.nbytes for each in stored], dtype=np.int64),
        np.array(crcs, dtype=np.uint32),
    )
