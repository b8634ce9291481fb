"""Reads one tensor, or a part of it, from a stored item.

This module reads and checks a single tensor, whoever wrote it: it finds out its form, reads only the bytes that are
needed, compares them with checksums, and reads straight into the target where that is possible. It knows nothing of
plans and planners. Several threads call it.
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
from robust_dcp.storage.records.parse_record import ParsedRecord, parse_record
from robust_dcp.storage.records.torch_zip import contiguous_strides, payload_view, record_template
from robust_dcp.storage.records.zip_members import zip_members

__all__ = ["StoredBox", "check_members", "find_box", "read_box", "read_tensor"]

# Data is read and checked in pieces of this size, so that the checksum finds each in the processor's cache.
_BLOCK_NBYTES: Final = 2 << 20


class StoredBox(NamedTuple):
    """Where a box (a part of a tensor) lies in its item: the range of bytes from its first to its last element.

    Attributes:
        record: the tensor that the box is part of.
        lengths: the size of the box.
        offset: the first byte of the range, counted from the start of the item.
        numel: elements in the range, including those between rows of the box.
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
        """Length of the range in bytes."""
        return self.numel * self.record.dtype.itemsize

    def buffer_for(self, into: torch.Tensor | None) -> torch.Tensor:
        """The tensor to read the range into: ``into``, if the range holds exactly the bytes of ``into``, or else a new
        tensor.
        """
        if into is not None and self.is_one_piece and into.dtype == self.record.dtype:
            return into
        return torch.empty(self.numel, dtype=self.record.dtype)

    def tensor_in(self, buffer: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
        """The box as a tensor, taken out of the ``buffer`` that the range was read into; ``None`` if ``buffer`` is
        ``into``.
        """
        return None if buffer is into else buffer.as_strided(self.lengths, self.record.stride)


def find_box(
    stored: ItemBytes,
    offsets: Sequence[int],
    lengths: Sequence[int],
    expected: tuple[torch.dtype, tuple[int, ...]] | None = None,
    *,
    with_sums: bool = True,
) -> StoredBox | None:
    """Find where the box of ``lengths`` at ``offsets`` of a stored tensor lies.

    Args:
        expected: dtype and shape according to the metadata. With them, a record that we wrote is recognised at once.
        with_sums: whether the box will be verified. If not, the footer of the file is not read.

    Returns:
        ``None`` if the record has a form that only ``torch.load`` may understand.

    Raises:
        CorruptCheckpoint: the stored tensor has no such box.
        StorageError: a read failed.
    """
    record = (
        _from_head(stored, expected) or _from_known_header(stored, expected) or parse_record(stored.read, stored.nbytes)
    )
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

    Only the bytes from its first to its last element are read, and the bytes around them that are needed to verify
    them. For a slice along dimension 0 these are its own bytes, extended to the ends of checksum blocks. For other
    boxes they are all rows that the box touches.

    Args:
        into: a tensor of size ``lengths`` for which ``takes_bytes`` holds. The box is read into it if the dtypes are
            equal and the box is stored in one piece. It holds garbage if that read fails.
        expected: as for :func:`find_box`.
        trusted: passed to :func:`load_object` if the record is anything but a plain tensor.

    Returns:
        ``None`` if ``into`` has been filled; else a CPU tensor of size ``lengths`` and of the stored dtype.

    Raises:
        CorruptCheckpoint: there is no such tensor, or its bytes are not those that were written.
        UnsafeCheckpoint: the record names classes that are not known to be data.
        StorageError: a read failed.
    """
    box = find_box(stored, offsets, lengths, expected, with_sums=verification.verify is not False)
    if box is not None:
        return read_box(stored, box, into, verification)
    whole = _by_torch_load(stored, verification, trusted)
    _check_box(stored, whole.shape, offsets, lengths)
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != whole.shape[dimension]:  # only where needed: some kinds of tensors have no narrow
            whole = whole.narrow(dimension, offset, length)
    return whole


def read_box(
    stored: ItemBytes, box: StoredBox, into: torch.Tensor | None, verification: Verification
) -> torch.Tensor | None:
    """Read the box that :func:`find_box` has found; ``into`` and the result are those of :func:`read_tensor`."""
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
    """Fill ``view`` with the item's bytes from ``offset`` on, and verify bytes ``begin`` to ``end`` of the item."""
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

    Those of the footer come first: they tell what lies at this place of the file. A record's own checksum is right in a
    record of another item, too.
    """
    sums = stored.find_sums(begin, end)
    if sums is not None:
        _check_frame(stored, record, sums)
        return sums
    if stored.raw is not None and stored.raw.block_crc32s and end - begin < record.data_nbytes:
        return BlockSums(0, record.data_nbytes, SUM_NBYTES, stored.raw.block_crc32s)
    if record.crc32 is None:
        return None
    return BlockSums(record.data_offset, record.data_nbytes, max(record.data_nbytes, 1), (record.crc32,))


def _check_frame(stored: ItemBytes, record: ParsedRecord, sums: BlockSums) -> None:
    """Make sure that the frame of a record says rightly where its data lies.

    The checksums of blocks prove that a slice has the right bytes of the file. They do not prove that these bytes are
    the ones to take: the frame says that.

    Raises:
        CorruptCheckpoint: the frame is wrong.
    """
    if (sums.offset, sums.nbytes) == (record.data_offset, record.data_nbytes):
        return
    if (sums.offset, sums.nbytes) != (0, stored.nbytes):
        expected = f"{sums.nbytes} bytes of data at {sums.offset}, as the footer of the file has it"
        raise corrupt_item(stored, expected, f"{record.data_nbytes} bytes at {record.data_offset}")
    # The checksums of blocks cover the frame as well.
    for low, high in ((0, record.data_offset), (record.directory_at, stored.nbytes)):
        first, last = sums.around(low, high)
        if crc32(stored.read(first, last - first)) != sums.expected(first, last):
            raise damaged(stored, sums, first, last)


def _from_head(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> ParsedRecord | None:
    """The tensor that the head of the file describes, in the terms of a record; ``None`` if the item is a record."""
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


def _from_known_header(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> ParsedRecord | None:
    """The record, if its header is exactly the one that we write for a tensor of the expected dtype and shape."""
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
        crc32=crc or None,  # 0 means that none was computed
    )


def _by_torch_load(stored: ItemBytes, verification: Verification, trusted: bool) -> torch.Tensor:
    """Load a tensor that only ``torch.load`` understands: quantized, sparse, compressed, or of an old format."""
    data = stored.read(0, stored.nbytes)
    check_members(stored, data, verification)
    loaded: Any = load_object(data, file=stored.file, item=stored.item, trusted=trusted)
    if not isinstance(loaded, torch.Tensor):
        raise corrupt_item(stored, "a tensor", f"a {type(loaded).__name__}")
    return loaded.detach() if loaded.requires_grad else loaded  # a subclass need not have its own detach


def check_members(stored: ItemBytes, data: bytes, verification: Verification) -> None:
    """Compare the members of ``data`` with their checksums, if ``data`` is a zip. ``torch.load`` does not do that.

    Raises:
        CorruptCheckpoint: a checksum does not match, or the archive is broken.
    """
    sums = None if verification.verify is False else stored.find_sums(0, stored.nbytes)
    if sums is not None and (sums.offset, sums.nbytes) == (0, stored.nbytes):
        if crc32(data) != sums.expected(0, stored.nbytes):
            raise damaged(stored, sums, 0, stored.nbytes)
        return
    if verification.verify is False or not data.startswith(ZIP_MAGIC):
        verification.skip(len(data), stored.item, stored.file)
        return
    try:
        members = zip_members(data)
    except ValueError as error:
        if is_program(data):
            return  # ``load_object`` refuses it
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
