"""The tensor that a stored item holds, or a part of it.

Owns reading and checking of a single tensor, whoever wrote it: its form, checksums, only the bytes that are needed,
straight into the target where that is possible. Knows nothing of plans and planners; called from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch

from robust_dcp.storage.reading.item_bytes import ItemBytes, corrupt_item
from robust_dcp.storage.reading.verification import Verification, damaged
from robust_dcp.storage.records.archives import ZIP_MAGIC, is_program
from robust_dcp.storage.records.block_sums import SUM_NBYTES, BlockSums
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.objects import load_object
from robust_dcp.storage.records.parse_record import ParsedRecord, parse_record, zip_members
from robust_dcp.storage.records.torch_zip import contiguous_strides, payload_view, record_template

__all__ = ["StoredBox", "check_members", "find_box", "read_box", "read_tensor"]

# Read and checked in pieces of this size, so that the checksum finds its data in the processor's cache.
_BLOCK_NBYTES: Final = 2 << 20


class StoredBox(NamedTuple):
    """Where the elements of a box lie in their item: one range of bytes, from its first to its last element.

    Attributes:
        record: the tensor that it is part of.
        lengths: its size.
        offset: start of the range, from the start of the item.
        numel: elements in the range, those between rows of the box included.
        sums: checksums of the blocks that the range lies in, if there are any.
        is_one_piece: whether the range holds nothing but the box, in order.
    """

    record: ParsedRecord
    lengths: tuple[int, ...]
    offset: int
    numel: int
    sums: BlockSums | None
    is_one_piece: bool

    @property
    def nbytes(self) -> int:
        """Length of the range."""
        return self.numel * self.record.dtype.itemsize

    def buffer_for(self, into: torch.Tensor | None) -> torch.Tensor:
        """What to read the range into: ``into``, if the bytes are just those of its elements, or a new tensor."""
        if into is not None and self.is_one_piece and into.dtype == self.record.dtype:
            return into
        return torch.empty(self.numel, dtype=self.record.dtype)

    def tensor_in(self, buffer: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
        """The box in the ``buffer`` that the range was read into; ``None`` if that is ``into``."""
        return None if buffer is into else buffer.as_strided(self.lengths, self.record.stride)


def find_box(
    stored: ItemBytes,
    offsets: Sequence[int],
    lengths: Sequence[int],
    expected: tuple[torch.dtype, tuple[int, ...]] | None = None,
    *,
    with_sums: bool = True,
) -> StoredBox | None:
    """Where the box of ``lengths`` at ``offsets`` of a stored tensor lies; ``None`` if only ``torch.load`` may know.

    Args:
        expected: dtype and shape according to the metadata. A record that we wrote of these is recognised at once.
        with_sums: whether the box is to be verified; else the footer of the file is not looked at.

    Raises:
        CorruptCheckpoint: the stored tensor has no such box.
        StorageError: a read failed.
    """
    record = _of_head(stored, expected) or _recognised(stored, expected) or parse_record(stored.read, stored.nbytes)
    if record is None:
        return None
    _check_box(stored, record.shape, offsets, lengths)
    first, count = 0, 0
    if prod(lengths):
        first = record.storage_offset + sum(o * s for o, s in zip(offsets, record.stride, strict=True))
        count = 1 + sum((n - 1) * s for n, s in zip(lengths, record.stride, strict=True))
    offset = record.data_offset + first * record.dtype.itemsize
    return StoredBox(
        record=record,
        lengths=tuple(lengths),
        offset=offset,
        numel=count,
        sums=_sums(stored, record, offset, offset + count * record.dtype.itemsize) if with_sums else None,
        is_one_piece=_in_one_piece(lengths, record.stride),
    )


def read_tensor(
    stored: ItemBytes,
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    into: torch.Tensor | None = None,
    expected: tuple[torch.dtype, tuple[int, ...]] | None = None,
    verification: Verification,
    trusted: bool = False,
) -> torch.Tensor | None:
    """Read the box of ``lengths`` at ``offsets`` of a stored tensor.

    Only the bytes from its first to its last element are read, and those beyond that it takes to verify them: for a
    slice along dimension 0 its own, from the end of one block to that of another; for other boxes the rows that they
    touch.

    Args:
        into: a tensor of size ``lengths`` for which ``takes_bytes`` holds. It is read into if it has the stored
            dtype and the box is stored in one piece, and holds garbage if that fails.
        expected: as for :func:`find_box`.
        trusted: passed to :func:`load_object` for records of anything but a plain tensor.

    Returns:
        ``None`` if ``into`` has been filled; else a CPU tensor of size ``lengths`` and of the stored dtype.

    Raises:
        CorruptCheckpoint: no such tensor, or its bytes are not those that were written.
        UnsafeCheckpoint: the record names classes that are not known to be data.
        StorageError: a read failed.
    """
    box = find_box(stored, offsets, lengths, expected, with_sums=verification.verify is not False)
    if box is not None:
        return read_box(stored, box, into, verification)
    whole = _loaded(stored, verification, trusted)
    _check_box(stored, whole.shape, offsets, lengths)
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != whole.shape[dimension]:  # not every kind of tensor can be narrowed, and few need it
            whole = whole.narrow(dimension, offset, length)
    return whole


def read_box(
    stored: ItemBytes, box: StoredBox, into: torch.Tensor | None, verification: Verification
) -> torch.Tensor | None:
    """Read what :func:`find_box` has found; ``into`` and the result as for :func:`read_tensor`."""
    buffer = box.buffer_for(into)
    view = payload_view(buffer)
    begin, end = box.offset, box.offset + box.nbytes
    verified = verification.range_for(stored, box.sums, begin, end)
    if verified is not None and box.sums is not None:
        _read_verified(stored, view, begin, box.sums, *verified)
    elif box.nbytes:
        stored.read_into(view, begin)
    return box.tensor_in(buffer, into)


def _read_verified(stored: ItemBytes, view: memoryview, offset: int, sums: BlockSums, begin: int, end: int) -> None:
    """Fill ``view`` from ``offset``, reading and verifying bytes ``begin`` to ``end`` of the item."""
    found = 0
    for first in range(begin, end, _BLOCK_NBYTES):
        last = min(first + _BLOCK_NBYTES, end)
        if offset <= first and last <= offset + view.nbytes:
            block = view[first - offset : last - offset]
            stored.read_into(block, first)
        else:
            block = memoryview(stored.read(first, last - first))
            wanted = max(first, offset), min(last, offset + view.nbytes)
            if wanted[0] < wanted[1]:
                view[wanted[0] - offset : wanted[1] - offset] = block[wanted[0] - first : wanted[1] - first]
        found = crc32(block, found)
    if found != sums.expected(begin, end):
        raise damaged(stored, sums, begin, end)


def _sums(stored: ItemBytes, record: ParsedRecord, begin: int, end: int) -> BlockSums | None:
    """The checksums of the blocks that bytes ``begin`` to ``end`` of the item lie in.

    The one of the whole data will do where all of it is read anyhow.
    """
    whole = None
    if record.crc32 is not None:
        whole = BlockSums(record.data_offset, record.data_nbytes, max(record.data_nbytes, 1), (record.crc32,))
        if end - begin == record.data_nbytes:
            return whole
    if stored.raw is not None and stored.raw.block_crc32s:
        return BlockSums(0, record.data_nbytes, SUM_NBYTES, stored.raw.block_crc32s)
    sums = stored.find_sums(begin, end)
    if sums is None:
        return whole
    _check_frame(stored, record, sums)
    return sums


def _check_frame(stored: ItemBytes, record: ParsedRecord, sums: BlockSums) -> None:
    """Make sure that the frame of a record is right about where its data lies: blocks of which a slice is read prove
    the bytes of the file, not that they are the ones to take.

    Raises:
        CorruptCheckpoint: it is not.
    """
    if (sums.offset, sums.nbytes) == (record.data_offset, record.data_nbytes):
        return
    if (sums.offset, sums.nbytes) != (0, stored.nbytes):
        expected = f"{sums.nbytes} bytes of data at {sums.offset}, as the footer of the file has it"
        raise corrupt_item(stored, expected, f"{record.data_nbytes} bytes at {record.data_offset}")
    # The frame is summed as well.
    for low, high in ((0, record.data_offset), (record.directory_at, stored.nbytes)):
        first, last = sums.around(low, high)
        if crc32(stored.read(first, last - first)) != sums.expected(first, last):
            raise damaged(stored, sums, first, last)


def _of_head(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> ParsedRecord | None:
    """What the head of the file says of an item, if it does, in the terms of a record."""
    raw = stored.raw
    if raw is None:
        return None
    if expected is not None and (raw.dtype, raw.shape) != (expected[0], tuple(expected[1])):
        raise corrupt_item(stored, f"{expected[0]} {list(expected[1])}", f"{raw.dtype} {list(raw.shape)} in its head")
    return ParsedRecord(
        dtype=raw.dtype,
        shape=raw.shape,
        stride=contiguous_strides(raw.shape),
        storage_offset=0,
        requires_grad=False,
        data_offset=0,
        data_nbytes=raw.nbytes,
        crc32=raw.crc32,
    )


def _recognised(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> ParsedRecord | None:
    """The record, if its header is, byte for byte, the one that we write for a tensor as the metadata describes it."""
    template = None if expected is None else record_template(*expected)
    if template is None or template.nbytes != stored.nbytes:
        return None
    crc = template.crc32_of_header(stored.read(0, template.header_nbytes))
    if crc is None:
        return None
    return ParsedRecord(
        dtype=template.dtype,
        shape=template.shape,
        stride=contiguous_strides(template.shape),
        storage_offset=0,
        requires_grad=False,
        data_offset=template.header_nbytes,
        data_nbytes=template.payload_nbytes,
        crc32=crc or None,  # 0 where none was computed
    )


def _loaded(stored: ItemBytes, verification: Verification, trusted: bool) -> torch.Tensor:
    """The tensor of a record that only ``torch.load`` understands: quantized, sparse, compressed, of an old format."""
    data = stored.read(0, stored.nbytes)
    check_members(stored, data, verification)
    loaded: Any = load_object(data, file=stored.file, item=stored.item, trusted=trusted)
    if not isinstance(loaded, torch.Tensor):
        raise corrupt_item(stored, "a tensor", f"a {type(loaded).__name__}")
    return loaded.detach()


def check_members(stored: ItemBytes, data: bytes, verification: Verification) -> None:
    """Compare the members of ``data``, if it is a zip, with their checksums; ``torch.load`` does not.

    Raises:
        CorruptCheckpoint: one does not match, or the archive is broken.
    """
    if verification.verify is False or not data.startswith(ZIP_MAGIC):
        verification.skip(len(data), stored.item, stored.file)
        return
    try:
        members = zip_members(data)
    except ValueError as error:
        if is_program(data):
            return  # which is refused as such
        raise corrupt_item(stored, "an intact zip archive", str(error)) from error
    view = memoryview(data)
    for name, member in members.items():
        found = crc32(view[member.offset : member.offset + member.nbytes])
        if member.crc32 == 0 != found:  # torch.serialization.set_crc32_options(False) was set
            verification.skip(member.nbytes, stored.item, stored.file)
        elif member.crc32 != found:
            raise corrupt_item(
                stored, f"an intact zip archive: {name!r:.60} with CRC-32 {member.crc32:08x}", f"{found:08x}"
            )


def _in_one_piece(lengths: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for length, stored_step in zip(reversed(lengths), reversed(stride), strict=True):
        if length != 1 and stored_step != step:
            return False
        step *= length
    return True


def _check_box(stored: ItemBytes, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
    inside = len(shape) == len(offsets) == len(lengths) and all(
        min(offset, length) >= 0 and offset + length <= size
        for size, offset, length in zip(shape, offsets, lengths, strict=True)
    )
    if not inside:
        box = f"a tensor with a box of {list(lengths)} at {list(offsets)}"
        raise corrupt_item(stored, box, f"one of shape {list(shape)}")
