"""One way from a stored item to a tensor, whoever wrote it: find its record, read the bytes that the wanted box needs,
verify them, and put them into the target.

This module decides which bytes are compared with checksums, and makes the errors for damaged data. It knows nothing of
plans and planners. Several threads call it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, Final, Literal, NamedTuple

import torch

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.staging.blocks import BlockLease, memory_at
from robust_dcp.staging.tensor_bytes import DeviceCopies
from robust_dcp.storage.layouts.safetensors import StoredTensor
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.checksum import SUM_NBYTES, BlockSums, crc32, crc32_of_both
from robust_dcp.storage.records.objects import check_object, is_program, load_object
from robust_dcp.storage.records.record import (
    ZIP_MAGIC,
    KnownRecords,
    Record,
    bytes_of,
    contiguous_strides,
    framed_record,
    members_of,
    parsed_record,
    raw_record,
)

__all__ = [
    "Box",
    "BoxRead",
    "StoredItem",
    "Verification",
    "Verify",
    "checked_object",
    "corrupt_item",
    "damaged_footer",
    "find_box",
    "loaded_by_torch",
    "read_box",
]

Verify = bool | Literal["all"]
"""``True``: verify what costs little. ``"all"``: data that cannot be verified is an error. ``False``: verify
nothing.
"""

_CHEAP_NBYTES: Final = 2 * SUM_NBYTES
_CHEAP_PART: Final = 20
"""A slice is verified if that takes at most ``_CHEAP_NBYTES`` more bytes, or at most one more byte for each 20
wanted.
"""


class Verification:
    """What one load verifies.

    Attributes:
        verify: see :data:`Verify`.
        unverified_nbytes: bytes of data that were handed over and not compared with any checksum.
    """

    def __init__(self, verify: Verify) -> None:
        self.verify = verify
        self.unverified_nbytes = 0
        self._lock = threading.Lock()

    def range_for(self, item: StoredItem, sums: BlockSums | None, begin: int, end: int) -> tuple[int, int] | None:
        """The range of an item to read so that bytes ``begin`` to ``end`` can be verified; ``None`` if they are not
        verified.

        Raises:
            CorruptCheckpoint: they must be verified, and cannot be.
        """
        if self.verify is not False and sums is not None and begin < end:
            first, last = sums.around(begin, end)
            more = last - first - (end - begin)
            if self.verify == "all" or more <= _CHEAP_NBYTES or more * _CHEAP_PART <= end - begin:
                return first, last
        self.skip(end - begin, item.name, item.file.path)
        return None

    def skip(self, nbytes: int, name: str, file: str) -> None:
        """Count ``nbytes`` bytes of an item that are handed over without having been verified.

        Raises:
            CorruptCheckpoint: ``verify`` is ``"all"``.
        """
        if self.verify == "all" and nbytes:
            raise CorruptCheckpoint(
                f"item {name!r} in {file} cannot be verified: no checksums were written with it, and "
                'verify_checksums="all"; pass True to load what cannot be verified',
                file=file,
                item=name,
                expected="checksums",
                found="none",
            )
        with self._lock:
            self.unverified_nbytes += nbytes


class StoredItem:
    """The ``nbytes`` bytes of an item, which begin at ``offset`` of an open file. Its ``name`` is for errors.

    ``memory`` has these bytes, if they have been read: fewer, if the file ends inside the item. ``raw`` is the item's
    entry in the head of the file; it is ``None`` for a record.

    Offsets in calls count from the start of the item. Calls raise :class:`CorruptCheckpoint` if the item or the file
    ends too early.
    """

    __slots__ = ("file", "memory", "name", "nbytes", "offset", "raw")

    def __init__(
        self,
        file: DataFile,
        name: str,
        offset: int,
        nbytes: int,
        raw: StoredTensor | None = None,
        memory: memoryview | None = None,
    ) -> None:
        self.file = file
        self.name = name
        self.offset = offset
        self.nbytes = nbytes
        self.raw = raw
        self.memory = memory

    def view(self, offset: int, nbytes: int) -> memoryview:
        """These bytes. If they are not in memory, they are read."""
        self.check_bounds(offset, nbytes)  # before memory is taken
        found = (
            memoryview(self.file.read(self.offset + offset, nbytes))
            if self.memory is None
            else self.memory[offset : offset + nbytes]
        )
        self.check_found(offset, nbytes, len(found))
        return found

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of these bytes."""
        return bytes(self.view(offset, nbytes))

    def find_sums(self, begin: int, end: int) -> BlockSums | None:
        """The checksums of the blocks that hold bytes ``begin`` to ``end`` of the item, if the footer has them."""
        footer = self.file.footer
        if footer is None:
            return None
        try:
            return footer.find(self.offset + begin, self.offset + end, self.offset)
        except ValueError as error:
            raise damaged_footer(self.file.path, self.name, error) from error

    def check_bounds(self, offset: int, nbytes: int) -> None:
        """Raise unless these bytes lie in the item."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise corrupt_item(self, f"{nbytes} bytes at {offset}", f"an item of {self.nbytes} bytes")

    def check_found(self, offset: int, nbytes: int, found: int) -> None:
        """Raise unless a read of ``nbytes`` bytes ``found`` all of them."""
        if found != nbytes:
            expected = f"{nbytes} bytes at offset {self.offset + offset}"
            raise corrupt_item(self, expected, f"a file that ends after {found} of them")

    def check(self, sums: BlockSums, begin: int, end: int, found: int) -> None:
        """Raise unless ``found`` is the CRC-32 of bytes ``begin`` to ``end``. Both are ends of blocks.

        The bytes are read once more then, so that the error names the first damaged block.
        """
        if found == sums.expected(begin, end):
            return
        what = "other bytes at first, but the right ones in a second read (suspect memory, or the way to the disk)"
        for first in range(begin, end, sums.block_nbytes):
            last = min(first + sums.block_nbytes, end)
            value = 0
            for low in range(first, last, _AT_ONCE_NBYTES):
                value = crc32(self.view(low, min(low + _AT_ONCE_NBYTES, last) - low), value)
            if value != sums.expected(first, last):
                begin, end, what = first, last, f"{value:08x}"
                break
        at = self.offset
        expected = f"CRC-32 {sums.expected(begin, end):08x} of bytes {at + begin} to {at + end} of the file"
        raise corrupt_item(self, expected, what)


_AT_ONCE_NBYTES: Final = 1 << 20


def damaged_footer(file: str, item: str, error: ValueError) -> CorruptCheckpoint:
    """The error for a footer that is not what was written."""
    return CorruptCheckpoint(
        f"the footer of {file} is damaged: {error}; take another checkpoint, restore the file, or load with "
        "verify_checksums=False, which does not look at it",
        file=file,
        item=item,
        expected="the footer that was written",
        found=str(error),
    )


def corrupt_item(item: StoredItem, expected: str, found: str) -> CorruptCheckpoint:
    """The error for an item that is not what it should be."""
    return CorruptCheckpoint(
        f"item {item.name!r} in {item.file.path} is damaged: expected {expected}, found {found}; take another "
        "checkpoint, or restore the file",
        file=item.file.path,
        item=item.name,
        expected=expected,
        found=found,
    )


# --- the record, and the box in it


class Box(NamedTuple):
    """Where a part of a tensor lies in its item: the range of bytes from its first to its last element.

    Attributes:
        record: the tensor that the box is part of.
        lengths: the size of the box.
        offset: the first byte of the range, counted from the start of the item.
        numel: elements in the range, including those between rows of the box.
        is_one_piece: whether the range holds nothing but the box, in order.
        sums: checksums of the blocks that the range lies in, if there are any.
    """

    record: Record
    lengths: tuple[int, ...]
    offset: int
    numel: int
    is_one_piece: bool
    sums: BlockSums | None

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
    item: StoredItem,
    offsets: Sequence[int],
    lengths: Sequence[int],
    expected: tuple[torch.dtype, tuple[int, ...]] | None,
    known: KnownRecords,
    *,
    with_sums: bool,
) -> Box | None:
    """Find where the box of ``lengths`` at ``offsets`` of a stored tensor lies.

    For a slice along dimension 0 these are its own bytes. For other boxes they are all rows that the box touches.

    Args:
        expected: dtype and shape according to the metadata. With them, a record is recognised at once.
        known: the records of this load.
        with_sums: whether the box will be verified. If not, the footer of the file is not read.

    Returns:
        ``None`` if the record has a form that only ``torch.load`` may understand.

    Raises:
        CorruptCheckpoint: the stored tensor has no such box.
        StorageError: a read failed.
    """
    found = _find_record(item, expected, known)
    if found is None:
        return None
    record, crc = found
    lengths, stride, itemsize = tuple(lengths), record.stride, record.dtype.itemsize
    if lengths == record.shape and record.is_contiguous and not any(offsets):
        first, count, is_one_piece = 0, record.data_nbytes // itemsize, True
    else:
        _check_box(item, record.shape, offsets, lengths)
        first, count = 0, 0
        if prod(lengths):
            first = record.storage_offset + sum(o * s for o, s in zip(offsets, stride, strict=True))
            count = 1 + sum((n - 1) * s for n, s in zip(lengths, stride, strict=True))
        in_order = zip(lengths, stride, contiguous_strides(lengths), strict=True)
        is_one_piece = all(length == 1 or step == expected_step for length, step, expected_step in in_order)
    begin = record.data_offset + first * itemsize
    sums = _sums(item, record, crc, begin, begin + count * itemsize) if with_sums else None
    return Box(record, lengths, begin, count, is_one_piece, sums)


def _find_record(
    item: StoredItem, expected: tuple[torch.dtype, tuple[int, ...]] | None, known: KnownRecords
) -> tuple[Record, int | None] | None:
    """The record of an item, and the CRC-32 of its data."""
    raw = item.raw
    if raw is not None:
        if expected is not None and (raw.dtype, raw.shape) != expected:
            of_head = f"{raw.dtype} {list(raw.shape)} in its head"
            raise corrupt_item(item, f"{expected[0]} {list(expected[1])}", of_head)
        return raw_record(raw.dtype, raw.shape), raw.crc32
    if expected is not None and item.memory is not None and len(item.memory) == item.nbytes:
        found = known.find(item.memory, 0, item.nbytes, *expected)
        if found is not None:
            return found[0], found[1] or None  # 0 means that none was computed
    elif expected is not None and (ours := framed_record(*expected)) is not None and ours.nbytes == item.nbytes:
        crc = ours.crc32_in_header(item.read(0, ours.data_offset))
        if crc is not None:
            return ours, crc or None
    record = parsed_record(item.read, item.nbytes)
    return None if record is None else (record, record.crc32)


def _check_box(item: StoredItem, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
    inside = len(shape) == len(offsets) == len(lengths) and all(
        offset >= 0 <= length and offset + length <= size
        for size, offset, length in zip(shape, offsets, lengths, strict=True)
    )
    if not inside:
        box = f"a tensor with a box of {list(lengths)} at {list(offsets)}"
        raise corrupt_item(item, box, f"one of shape {list(shape)}")


def _sums(item: StoredItem, record: Record, crc: int | None, begin: int, end: int) -> BlockSums | None:
    """The checksums of the blocks that bytes ``begin`` to ``end`` of the item lie in.

    Those of the footer come first: they tell what lies at this place of the file. A record's own checksum is right in a
    record of another item, too.
    """
    sums = item.find_sums(begin, end)
    if sums is not None:
        _check_frame(item, record, sums)
        return sums
    if item.raw is not None and item.raw.block_crc32s and end - begin < record.data_nbytes:
        return BlockSums(0, record.data_nbytes, SUM_NBYTES, item.raw.block_crc32s)
    if crc is None:
        return None
    return BlockSums(record.data_offset, record.data_nbytes, max(record.data_nbytes, 1), (crc,))


def _check_frame(item: StoredItem, record: Record, sums: BlockSums) -> None:
    """Make sure that the frame of a record says rightly where its data lies.

    The checksums of blocks prove that a slice has the right bytes of the file. They do not prove that these bytes are
    the ones to take: the frame says that.

    Raises:
        CorruptCheckpoint: the frame is wrong.
    """
    if (sums.offset, sums.nbytes) == (record.data_offset, record.data_nbytes):
        return
    if (sums.offset, sums.nbytes) != (0, item.nbytes):
        expected = f"{sums.nbytes} bytes of data at {sums.offset}, as the footer of the file has it"
        raise corrupt_item(item, expected, f"{record.data_nbytes} bytes at {record.data_offset}")
    # The checksums of blocks cover the frame as well.
    around = (0, record.data_offset), (item.nbytes - len(record.trailer), item.nbytes)
    for low, high in around if record.trailer else ((0, item.nbytes),):
        first, last = sums.around(low, high)
        item.check(sums, first, last, crc32(item.view(first, last - first)))


# --- reading it


def read_box(item: StoredItem, box: Box, into: torch.Tensor | None, verification: Verification) -> torch.Tensor | None:
    """Take a box out of an item that is in memory.

    Args:
        into: a flat CPU tensor of the box's size. The box is put into it if the dtypes are equal and the box is stored
            in one piece. It holds garbage if that fails.

    Returns:
        ``None`` if ``into`` has been filled; else a CPU tensor of the stored dtype, which owns its memory.

    Raises:
        CorruptCheckpoint: the bytes are not those that were written.
    """
    buffer, begin, nbytes = box.buffer_for(into), box.offset, box.nbytes
    verified = verification.range_for(item, box.sums, begin, begin + nbytes)
    first, last = verified or (begin, begin + nbytes)
    found = item.view(first, last - first)
    if verified is not None and box.sums is not None:
        item.check(box.sums, first, last, crc32(found))
    if nbytes:
        memory_at(buffer.data_ptr(), nbytes)[:] = found[begin - first : begin - first + nbytes]
    return box.tensor_in(buffer, into)


class BoxRead:
    """A box that is read from a file, in pieces. Several threads may read them.

    Args:
        item: the item, which is not in memory.
        box: the part of it that is wanted.
        into: as for :func:`read_box`, but on any device.
        verification: decides what is verified.
        blocks: memory for bytes that cannot be read into the tensor itself. Each block holds a piece, wherever it
            begins in the file.
        piece_nbytes: the longest piece.
        copies: copies to devices.

    Attributes:
        shares: the pieces that one thread reads, by number. Each share goes to :meth:`read` once, on any thread.
    """

    def __init__(
        self,
        item: StoredItem,
        box: Box,
        into: torch.Tensor | None,
        verification: Verification,
        blocks: BlockLease,
        piece_nbytes: int,
        copies: DeviceCopies,
    ) -> None:
        self._item = item
        self._box = box
        self._into = into
        self._buffer = box.buffer_for(into)
        self._blocks = blocks
        self._copies = copies
        begin, end = box.offset, box.offset + box.nbytes
        self._verified = verification.range_for(item, box.sums, begin, end)
        first, last = self._verified or (begin, end)
        item.check_bounds(first, last - first)
        if self._buffer.is_cpu:
            self._view = bytes_of(self._buffer)
        else:
            self._flat = self._buffer.as_strided((self._buffer.numel(),), (1,)).view(torch.uint8)
        # Pieces end at multiples of their length in the file. Bytes beyond the box are read only for their checksum.
        self._pieces: list[tuple[int, int]] = []
        for low, high in ((first, begin), (begin, end), (end, last)):
            while low < high:
                stop = min(high, low + piece_nbytes - (item.offset + low) % piece_nbytes)
                self._pieces.append((low, stop - low))
                low = stop
        # Neighbours go to one thread, up to the length of a piece: handing a short piece over takes longer than reading
        # it.
        self.shares: list[list[int]] = []
        filled = piece_nbytes
        for number, (_, nbytes) in enumerate(self._pieces):
            if filled + nbytes > piece_nbytes:
                self.shares.append([])
                filled = 0
            self.shares[-1].append(number)
            filled += nbytes
        self._crc32s = [0] * len(self._pieces)
        self._shares_left = len(self.shares)
        self._lock = threading.Lock()

    def read(self, share: Sequence[int]) -> bool:
        """Read some pieces.

        Returns:
            whether these were the last ones: then :meth:`tensor` has the box.

        Raises:
            CorruptCheckpoint: the file ends too early. With the last share: a checksum does not match.
            StorageError: the read failed.
        """
        item, needed = self._item, self._verified is not None
        for number in share:
            offset, nbytes = self._pieces[number]
            start, place = offset - self._box.offset, item.offset + offset
            is_wanted = 0 <= start < self._box.nbytes
            if is_wanted and self._buffer.is_cpu:
                view, address = self._view[start : start + nbytes], self._buffer.data_ptr() + start
                found, crc = item.file.read_piece(view, address, place, self._blocks, checksum=needed)
                item.check_found(offset, nbytes, found)
            else:
                with self._blocks.lent() as block:
                    at, found = item.file.read_block(block, place, nbytes)
                    item.check_found(offset, nbytes, found)
                    crc = crc32(block.view[at : at + nbytes]) if needed else 0
                    if is_wanted:
                        self._copies.fill(self._flat[start : start + nbytes], block, at)
            self._crc32s[number] = crc
        with self._lock:
            self._shares_left -= 1
            if self._shares_left > 0:
                return False
        if self._verified is not None and self._box.sums is not None:
            value = 0
            for (_, nbytes), crc in zip(self._pieces, self._crc32s, strict=True):
                value = crc32_of_both(value, crc, nbytes)
            item.check(self._box.sums, *self._verified, value)
        return True

    def tensor(self) -> torch.Tensor | None:
        """The result, as that of :func:`read_box`."""
        return self._box.tensor_in(self._buffer, self._into)


# --- what is not a plain tensor


def loaded_by_torch(
    item: StoredItem,
    offsets: Sequence[int],
    lengths: Sequence[int],
    verification: Verification,
    *,
    trusted: bool,
) -> torch.Tensor:
    """A box of a tensor that only ``torch.load`` understands: quantized, sparse, compressed, or in another byte order.

    Raises:
        CorruptCheckpoint: there is no such tensor, or its bytes are not those that were written.
        UnsafeCheckpoint: the record names classes that are not known to be data.
    """
    data = item.read(0, item.nbytes)
    _check_members(item, data, verification)
    loaded: Any = load_object(data, file=item.file.path, item=item.name, trusted=trusted)
    if not isinstance(loaded, torch.Tensor):
        raise corrupt_item(item, "a tensor", f"a {type(loaded).__name__}")
    whole = loaded.detach() if loaded.requires_grad else loaded  # a subclass need not have its own detach
    _check_box(item, whole.shape, offsets, lengths)
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != whole.shape[dimension]:  # only where needed: some kinds of tensors have no narrow
            whole = whole.narrow(dimension, offset, length)
    return whole


def checked_object(item: StoredItem, verification: Verification, *, trusted: bool) -> bytes:
    """The bytes of an item that is not a tensor, after a check of what loading them would do."""
    data = item.read(0, item.nbytes)
    _check_members(item, data, verification)
    if not trusted:
        check_object(data, file=item.file.path, item=item.name)
    return data


def _check_members(item: StoredItem, data: bytes, verification: Verification) -> None:
    """Compare the members of ``data`` with their checksums, if ``data`` is a zip. ``torch.load`` does not do that.

    Raises:
        CorruptCheckpoint: a checksum does not match, or the archive is broken.
    """
    sums = None if verification.verify is False else item.find_sums(0, item.nbytes)
    if sums is not None and (sums.offset, sums.nbytes) == (0, item.nbytes):
        item.check(sums, 0, item.nbytes, crc32(data))
        return
    if verification.verify is False or not data.startswith(ZIP_MAGIC):
        verification.skip(len(data), item.name, item.file.path)
        return
    try:
        members = members_of(data)
    except ValueError as error:
        if is_program(data):
            return  # ``load_object`` refuses it
        raise corrupt_item(item, "an intact zip archive", str(error)) from error
    view = memoryview(data)
    for name, member in members.items():
        found = crc32(view[member.offset : member.offset + member.nbytes])
        if member.crc32 == 0 != found:  # torch.serialization.set_crc32_options(False) was set
            verification.skip(member.nbytes, item.name, item.file.path)
        elif member.crc32 != found:
            raise corrupt_item(
                item, f"an intact zip archive: {name!r:.60} with CRC-32 {member.crc32:08x}", f"{found:08x}"
            )
