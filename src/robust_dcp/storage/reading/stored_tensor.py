"""Reads one tensor, or a part of it, from a stored item, whoever wrote it.

This module finds out the form of an item, reads only the bytes that are needed, decides which of them are compared with
checksums, and reads straight into the target where that is possible. It makes the errors for damaged data. It knows
nothing of plans and planners. Several threads call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final, Literal, NamedTuple

import torch

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.layouts.footer import Footer
from robust_dcp.storage.layouts.read_head import StoredTensor
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.checksum import SUM_NBYTES, BlockSums, crc32
from robust_dcp.storage.records.objects import is_program, load_object
from robust_dcp.storage.records.record import (
    ZIP_MAGIC,
    Record,
    bytes_of,
    framed_record,
    parsed_record,
    raw_record,
    zip_members,
)

__all__ = [
    "ItemBytes",
    "ItemInFile",
    "ItemInMemory",
    "StoredBox",
    "Verification",
    "Verify",
    "check_members",
    "corrupt_item",
    "damaged",
    "damaged_footer",
    "find_box",
    "read_box",
    "read_tensor",
]

Verify = bool | Literal["all"]
"""``True``: verify what costs little. ``"all"``: data that cannot be verified is an error. ``False``: verify
nothing.
"""

_AT_ONCE_NBYTES: Final = 1 << 20

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

    def __init__(self, verify: Verify = True) -> None:
        self.verify = verify
        self.unverified_nbytes = 0
        self._lock = threading.Lock()

    def range_for(self, stored: ItemBytes, sums: BlockSums | None, begin: int, end: int) -> tuple[int, int] | None:
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
        self.skip(end - begin, stored.item, stored.file)
        return None

    def skip(self, nbytes: int, item: str, file: str) -> None:
        """Count ``nbytes`` bytes of an item that are handed over without having been verified.

        Raises:
            CorruptCheckpoint: ``verify`` is ``"all"``.
        """
        if self.verify == "all" and nbytes:
            raise CorruptCheckpoint(
                f"item {item!r} in {file} cannot be verified: no checksums were written with it, and "
                'verify_checksums="all"; pass True to load what cannot be verified',
                file=file,
                item=item,
                expected="checksums",
                found="none",
            )
        with self._lock:
            self.unverified_nbytes += nbytes


def damaged(stored: ItemBytes, sums: BlockSums, begin: int, end: int) -> CorruptCheckpoint:
    """The error for bytes ``begin`` to ``end`` of an item that do not match their checksums. Both are ends of blocks.

    The bytes are read once more, so that the error names the first damaged block.
    """
    found = (
        "other bytes at first, but the right ones in a second read: suspect the memory or the connection to the disk"
    )
    for first in range(begin, end, sums.block_nbytes):
        last = min(first + sums.block_nbytes, end)
        value = _crc32_of(stored, first, last)
        if value != sums.expected(first, last):
            begin, end, found = first, last, f"{value:08x}"
            break
    at = stored.offset
    expected = f"CRC-32 {sums.expected(begin, end):08x} of bytes {at + begin} to {at + end} of the file"
    return CorruptCheckpoint(
        f"item {stored.item!r} in {stored.file} is damaged: expected {expected}, found {found}; take another "
        "checkpoint, or restore the file",
        file=stored.file,
        item=stored.item,
        expected=expected,
        found=found,
    )


def _crc32_of(stored: ItemBytes, begin: int, end: int) -> int:
    value = 0
    for first in range(begin, end, _AT_ONCE_NBYTES):
        value = crc32(stored.read(first, min(first + _AT_ONCE_NBYTES, end) - first), value)
    return value


class ItemBytes:
    """The ``nbytes`` bytes of an item as they are stored. ``file`` and ``item`` name them in errors.

    ``raw`` is the item's entry in the head of its file, if the item holds only the bytes of a tensor. It is ``None``
    for a record. ``offset`` is where the item begins in the file; it is used in errors.

    Offsets in calls count from the start of the item. Calls raise :class:`CorruptCheckpoint` if the item or the file
    ends too early.
    """

    def __init__(self, file: str, item: str, nbytes: int, offset: int, raw: StoredTensor | None) -> None:
        self.file = file
        self.item = item
        self.nbytes = nbytes
        self.offset = offset
        self.raw = raw

    @property
    def footer(self) -> Footer | None:
        """That of the file, if there is one."""
        raise NotImplementedError

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view``."""
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """These bytes."""
        self.check_bounds(offset, nbytes)  # before memory is taken
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def find_sums(self, begin: int, end: int) -> BlockSums | None:
        """The checksums of the blocks that hold bytes ``begin`` to ``end`` of the item, if the footer has them."""
        footer = self.footer
        if footer is None:
            return None
        try:
            return footer.find(self.offset + begin, self.offset + end, self.offset)
        except ValueError as error:
            raise damaged_footer(self.file, self.item, error) from error

    def check_bounds(self, offset: int, nbytes: int) -> None:
        """Raise unless these bytes lie in the item."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise corrupt_item(self, f"{nbytes} bytes at {offset}", f"an item of {self.nbytes} bytes")

    def check_found(self, offset: int, nbytes: int, found: int) -> None:
        """Raise unless a read of ``nbytes`` bytes ``found`` all of them."""
        if found != nbytes:
            expected = f"{nbytes} bytes at offset {self.offset + offset}"
            raise corrupt_item(self, expected, f"a file that ends after {found} of them")


class ItemInFile(ItemBytes):
    """An item at ``offset`` of an open file. ``check_stop`` is called before each read; it raises to end the load."""

    def __init__(
        self,
        opened: DataFile,
        item: str,
        offset: int,
        nbytes: int,
        check_stop: Callable[[], None],
        raw: StoredTensor | None = None,
    ) -> None:
        super().__init__(opened.path, item, nbytes, offset, raw)
        self.opened = opened
        self.check_stop = check_stop

    @property
    def footer(self) -> Footer | None:
        return self.opened.footer

    def read_into(self, view: memoryview, offset: int) -> None:
        self.check_stop()
        self.check_bounds(offset, view.nbytes)
        self.check_found(offset, view.nbytes, self.opened.read_into(view, self.offset + offset))


class ItemInMemory(ItemBytes):
    """An item that has been read as a whole.

    Args:
        nbytes: its length. ``data`` may be shorter if the file ends inside the item.
        offset: where the item begins in the file; ``None`` if the bytes are no longer those of the file.
        footer: that of the file, if there is one.
    """

    def __init__(
        self,
        file: str,
        item: str,
        data: bytes | memoryview,
        nbytes: int | None = None,
        offset: int | None = None,
        raw: StoredTensor | None = None,
        footer: Footer | None = None,
    ) -> None:
        super().__init__(file, item, len(data) if nbytes is None else nbytes, offset or 0, raw)
        self._data = memoryview(data)
        self._footer = footer

    @property
    def footer(self) -> Footer | None:
        return self._footer

    def read_into(self, view: memoryview, offset: int) -> None:
        self.check_bounds(offset, view.nbytes)
        self.check_found(offset, view.nbytes, max(0, min(len(self._data) - offset, view.nbytes)))
        view[:] = self._data[offset : offset + view.nbytes]


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


def corrupt_item(stored: ItemBytes, expected: str, found: str) -> CorruptCheckpoint:
    """The error for an item that is not what it should be."""
    return CorruptCheckpoint(
        f"item {stored.item!r} in {stored.file} is damaged: expected {expected}, found {found}",
        file=stored.file,
        item=stored.item,
        expected=expected,
        found=found,
    )


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

    record: Record
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
        _from_head(stored, expected)
        or _from_known_header(stored, expected)
        or parsed_record(stored.read, stored.nbytes)
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
    view = bytes_of(buffer)
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


def _sums(stored: ItemBytes, record: Record, begin: int, end: int) -> BlockSums | None:
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


def _check_frame(stored: ItemBytes, record: Record, sums: BlockSums) -> None:
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
    around = (0, record.data_offset), (stored.nbytes - len(record.trailer), stored.nbytes)
    for low, high in around if record.trailer else ((0, stored.nbytes),):
        first, last = sums.around(low, high)
        if crc32(stored.read(first, last - first)) != sums.expected(first, last):
            raise damaged(stored, sums, first, last)


def _from_head(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> Record | None:
    """The tensor that the head of the file describes, in the terms of a record; ``None`` if the item is a record."""
    raw = stored.raw
    if raw is None:
        return None
    if expected is not None and (raw.dtype, raw.shape) != (expected[0], tuple(expected[1])):
        raise corrupt_item(stored, f"{expected[0]} {list(expected[1])}", f"{raw.dtype} {list(raw.shape)} in its head")
    return replace(raw_record(raw.dtype, raw.shape), crc32=raw.crc32)


def _from_known_header(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> Record | None:
    """The record, if its header is exactly the one that we write for a tensor of the expected dtype and shape."""
    template = None if expected is None else framed_record(*expected)
    if template is None or template.nbytes != stored.nbytes:
        return None
    crc = template.crc32_in_header(stored.read(0, template.data_offset))
    return None if crc is None else replace(template, crc32=crc or None)  # 0 means that none was computed


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
        members = zip_members(lambda offset, nbytes: data[offset : offset + nbytes], len(data))
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
