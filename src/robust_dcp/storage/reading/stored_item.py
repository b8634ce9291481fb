"""One way from a stored item to a tensor, whoever wrote it: find its record, read the bytes that the wanted box needs,
verify them, and put them into the target.

This module decides which bytes are compared with checksums, and makes the errors for damaged data. It knows nothing of
plans and planners. Several threads call it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.staging.blocks import BlockLease, TensorBytes, flat_bytes, memory_at, on_cpu
from robust_dcp.storage.layouts.footer import BlockSums
from robust_dcp.storage.options import Verify
from robust_dcp.storage.reading.comparing import ELEMENTS, Comparison, elements_of
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.reads import Read, item_name
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32, crc32_of_both
from robust_dcp.storage.records.objects import is_program, load_object
from robust_dcp.storage.records.record import (
    ZIP_MAGIC,
    KnownRecords,
    Record,
    bytes_of,
    contiguous_strides,
    framed_record,
    known_record,
    parsed_record,
    raw_record,
    zip_members,
)

_CHEAP_NBYTES: Final = 2 * SUM_NBYTES
_CHEAP_PART: Final = 20
"""A slice is verified if that takes at most ``_CHEAP_NBYTES`` more bytes, or at most one more byte for each 20
wanted.
"""


class Verification(msgspec.Struct, eq=False):
    """What one load verifies, and how it recognises records.

    Attributes:
        verify: see :data:`Verify`.
        unverified_nbytes: bytes of data that were handed over and not compared with any checksum.
        known_records: the records that were recognised.
    """

    verify: Verify
    unverified_nbytes: int = 0
    known_records: KnownRecords = {}
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

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
    """The bytes of one item in an open file.

    Offsets in calls count from the start of the item. Calls raise :class:`CorruptCheckpoint` if the item or the file
    ends too early.

    Args:
        file: the open file.
        read: what is wanted, and where the item begins and ends.
        verification: decides what is verified.
        memory: the item's bytes, if they have been read: fewer, if the file ends inside the item.

    Attributes:
        raw: the item's entry in the head of the file; ``None`` for a record.
    """

    __slots__ = ("file", "memory", "name", "nbytes", "offset", "raw", "read", "verification")

    def __init__(
        self, file: DataFile, read: Read, verification: Verification, memory: memoryview | None = None
    ) -> None:
        self.file = file
        self.read = read
        self.name = item_name(read.item)
        self.offset = read.offset
        self.nbytes = read.nbytes
        self.verification = verification
        self.memory = memory
        head, index = file.head, read.item.storage_index
        chunk = index.offset or ()
        self.raw = None if head is None else head.find(index.fqn, chunk, read.offset, read.nbytes, file.path)

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
            raise self.corrupt(f"{nbytes} bytes at {offset}", f"an item of {self.nbytes} bytes")

    def check_found(self, offset: int, nbytes: int, found: int) -> None:
        """Raise unless a read of ``nbytes`` bytes ``found`` all of them."""
        if found != nbytes:
            expected = f"{nbytes} bytes at offset {self.offset + offset}"
            raise self.corrupt(expected, f"a file that ends after {found} of them")

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
        raise self.corrupt(expected, what)

    def corrupt(self, expected: str, found: str) -> CorruptCheckpoint:
        """The error for an item that is not what it should be."""
        return CorruptCheckpoint.of_file(self.file.path, expected, found, item=self.name, problem="is damaged")


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


# --- the record, and the box in it


def _find_record(item: StoredItem, *, by_footer: bool = False) -> tuple[Record, int | None] | None:
    """The record of an item, and the CRC-32 of its data.

    Args:
        by_footer: whether the frame need not be read if the footer says where the data lies, and has its checksums.
    """
    raw, read = item.raw, item.read
    # With dtype and shape according to the metadata, a record is recognised at once.
    expected = None if read.dtype is None or read.shape is None else (read.dtype, read.shape)
    if raw is not None:
        if expected is not None and (raw.dtype, raw.shape) != expected:
            of_head = f"{raw.dtype} {list(raw.shape)} in its head"
            raise item.corrupt(f"{expected[0]} {list(expected[1])}", of_head)
        return raw_record(raw.dtype, raw.shape), raw.crc32
    if expected is not None and item.memory is not None and len(item.memory) == item.nbytes:
        found = known_record(item.verification.known_records, item.memory, 0, item.nbytes, *expected)
        if found is not None:
            return found[0], found[1] or None  # 0 means that none was computed
    elif expected is not None and (ours := framed_record(*expected)) is not None and ours.nbytes == item.nbytes:
        end = ours.data_offset + ours.data_nbytes
        sums = item.find_sums(ours.data_offset, end) if by_footer and item.verification.verify is not False else None
        if sums is not None and (sums.offset, sums.nbytes) == (ours.data_offset, ours.data_nbytes):
            return ours, None
        crc = ours.crc32_in_header(bytes(item.view(0, ours.data_offset)))
        if crc is not None:
            return ours, crc or None
    record = parsed_record(lambda offset, nbytes: bytes(item.view(offset, nbytes)), item.nbytes)
    if record is None:
        return None
    if expected is not None and item.verification.verify is not False and (record.dtype, record.shape) != expected:
        here = f"{record.dtype} {list(record.shape)} in the file"
        raise item.corrupt(f"{expected[0]} {list(expected[1])}, as the metadata says", here)
    return record, record.crc32


def _check_box(item: StoredItem, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
    inside = len(shape) == len(offsets) == len(lengths) and all(
        offset >= 0 <= length and offset + length <= size
        for size, offset, length in zip(shape, offsets, lengths, strict=True)
    )
    if not inside:
        box = f"a tensor with a box of {list(lengths)} at {list(offsets)}"
        raise item.corrupt(box, f"one of shape {list(shape)}")


def _sums(item: StoredItem, record: Record, crc: int | None, begin: int, end: int) -> BlockSums | None:
    """The checksums of the blocks that bytes ``begin`` to ``end`` of the item lie in; ``None`` if nothing is compared.

    The checksums of the footer come first: they tell what lies at this place of the file. A record's own checksum is
    right in a record of another item, too.
    """
    verify, nbytes = item.verification.verify, end - begin
    sums = None if verify is False else item.find_sums(begin, end)
    if sums is not None:
        _check_frame(item, record, sums)
    elif verify is not False and item.raw is not None and item.raw.block_crc32s and nbytes < record.data_nbytes:
        sums = BlockSums(0, record.data_nbytes, SUM_NBYTES, item.raw.block_crc32s)
    elif verify is not False and crc is not None:
        sums = BlockSums(record.data_offset, record.data_nbytes, max(record.data_nbytes, 1), (crc,))
    if sums is not None and nbytes:
        first, last = sums.around(begin, end)
        more = last - first - nbytes
        if verify == "all" or more <= _CHEAP_NBYTES or more * _CHEAP_PART <= nbytes:
            return sums
    item.verification.skip(nbytes, item.name, item.file.path)
    return None


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
        raise item.corrupt(expected, f"{record.data_nbytes} bytes at {record.data_offset}")
    # The checksums of blocks cover the frame as well.
    around = (0, record.data_offset), (item.nbytes - len(record.trailer), item.nbytes)
    for low, high in around if record.trailer else ((0, item.nbytes),):
        first, last = sums.around(low, high)
        item.check(sums, first, last, crc32(item.view(first, last - first)))


# --- reading it


def find_box(item: StoredItem, into: torch.Tensor | None, comparison: Comparison | None = None) -> BoxRead | None:
    """Find the box that is wanted of a stored tensor.

    Args:
        into, comparison: as for :class:`BoxRead`.

    Returns:
        ``None`` if the record has a form that only ``torch.load`` may understand.

    Raises:
        CorruptCheckpoint: the stored tensor has no such box.
        StorageError: a read failed.
    """
    found = _find_record(item, by_footer=comparison is not None)
    return None if found is None else BoxRead(item, *found, into, comparison)


class _Piece(NamedTuple):
    """Bytes of an item that are read at once.

    Attributes:
        begin, end: which bytes of the item.
        part: which part of the box begins with them; ``None`` if they are read only for a checksum.
    """

    begin: int
    end: int
    part: tuple[int | slice, ...] | None


class BoxRead:
    """A part of a stored tensor, on its way into a tensor, or to be compared with it.

    A slice along dimension 0 is one range of bytes, which is read straight into a target that takes it in order. Of
    other boxes the rows are read into blocks, several at once, and copied to their places. Columns are such a box: half
    of what is read is not wanted.

    It is taken from memory at once (:meth:`taken`), or read from the file in pieces, which several threads may do.

    Args:
        item: the item.
        record: the tensor that the box is part of.
        crc: the CRC-32 of its data, if it is known.
        into: a tensor of the box's size, on any device, with any strides, whose memory holds its elements as they are
            stored. The box is put into it if the dtypes are equal. It holds garbage if that fails.
        comparison: compare the box with ``into`` if the dtypes are equal. Where the checksum of a block is that of its
            bytes in ``into``, the block is not read.

    Attributes:
        is_tangled: whether elements lie in other rows than their own, so that the box can only be taken from memory.
    """

    def __init__(
        self,
        item: StoredItem,
        record: Record,
        crc: int | None,
        into: torch.Tensor | None,
        comparison: Comparison | None = None,
    ) -> None:
        wanted, stride, itemsize = item.read.item, record.stride, record.dtype.itemsize
        offsets, lengths = wanted.storage_offsets, tuple(wanted.lengths)
        if lengths == record.shape and record.is_contiguous and not any(offsets):
            first, count, is_one_piece = 0, record.data_nbytes // itemsize, True
        else:
            _check_box(item, record.shape, offsets, lengths)
            first, count = 0, 0
            if prod(lengths):
                first = record.storage_offset + sum(o * s for o, s in zip(offsets, stride, strict=True))
                count = 1 + sum((n - 1) * s for n, s in zip(lengths, stride, strict=True))
            in_order = zip(lengths, stride, contiguous_strides(lengths), strict=True)
            is_one_piece = not count or all(length == 1 or step == expected for length, step, expected in in_order)
        self._item = item
        self._begin = record.data_offset + first * itemsize
        self._end = self._begin + count * itemsize
        self._sums = _sums(item, record, crc, self._begin, self._end)
        self._range = (self._begin, self._end) if self._sums is None else self._sums.around(self._begin, self._end)
        item.check_bounds(self._range[0], self._range[1] - self._range[0])
        self._made: torch.Tensor | None = None
        if into is None or into.dtype != record.dtype:
            into = self._made = torch.empty(lengths, dtype=record.dtype)
            comparison = None  # that is up to the caller
        self._into, self._itemsize, self._comparison = into, itemsize, comparison
        self._is_straight = is_one_piece and into.is_contiguous() and comparison is None
        self._is_flat = is_one_piece and comparison is not None
        self.is_tangled = False
        if self._is_straight:
            return
        if self._is_flat:  # the elements as one row
            self._order, self._lengths, self._steps = [0], [count], [itemsize]
            return
        # The dimensions in the order in which they lie in the file, the outermost first.
        self._order = sorted(range(len(lengths)), key=lambda each: -stride[each])
        self._lengths = [lengths[each] for each in self._order]
        self._steps = [stride[each] * itemsize for each in self._order]
        inner = [self._extent(each) for each in range(1, len(lengths) + 1)]
        self.is_tangled = any(
            length > 1 and step < nbytes and (step or nbytes > itemsize)
            for length, step, nbytes in zip(self._lengths, self._steps, inner, strict=True)
        )

    def _extent(self, dimension: int, length: int | None = None) -> int:
        """The bytes from the first element to the end of the last one of the dimensions from ``dimension`` on, of which
        the first has ``length``."""
        lengths = self._lengths[dimension:]
        steps = self._steps[dimension:]
        if length is not None:
            lengths[0] = length
        return self._itemsize + sum((size - 1) * step for size, step in zip(lengths, steps, strict=True))

    def tensor(self) -> torch.Tensor | None:
        """A CPU tensor of the stored dtype, which owns its memory; ``None`` if ``into`` has been filled."""
        return self._made

    def taken(self) -> torch.Tensor | None:
        """Take the box out of an item that is in memory, to a tensor on the CPU. Returns the same as :meth:`tensor`.

        Raises:
            CorruptCheckpoint: the bytes are not those that were written.
        """
        (first, last), begin, end = self._range, self._begin, self._end
        found = self._item.view(first, last - first)
        if self._sums is not None:
            self._item.check(self._sums, first, last, crc32(found))
        if self._is_straight and begin < end:
            memory_at(self._into.data_ptr(), end - begin)[:] = found[begin - first :][: end - begin]
        elif begin < end and self._comparison is not None:
            self._compare((), found, begin - first)
        elif begin < end:
            self._put((), found, begin - first)
        return self.tensor()

    def shares(self, piece_nbytes: int, blocks: BlockLease) -> list[list[int]]:
        """The pieces that one thread reads, by number. There is at least one share, and each goes to :meth:`read` once,
        on any thread.

        Args:
            piece_nbytes: the longest piece.
            blocks: memory for bytes of a target that is compared and is not on the CPU.
        """
        if self._is_straight and self._into.is_cpu:
            self._view = bytes_of(self._into)
        elif self._is_straight:
            self._flat = self._into.as_strided((self._into.numel(),), (1,)).view(torch.uint8)
        self._pieces: list[_Piece] = []
        self._ranges: list[tuple[int, int, int]] = []  # bytes that are verified together, and the end of their pieces
        if self._is_straight:
            rows = [_Piece(self._begin, self._end, ())]
        else:
            rows = list(self._unlike_rows(piece_nbytes, blocks) if self._is_flat else self._rows(piece_nbytes))
        for near in _near_each_other(rows, self._sums) if rows else ():
            first, last = begin, end = near[0].begin, near[-1].end
            if self._sums is not None:
                first, last = self._sums.around(begin, end)
            self._add(first, begin, None, piece_nbytes)
            for row, following in pairwise([*near, None]):
                if row is None:
                    continue
                if self._is_straight:
                    self._add(row.begin, row.end, (), piece_nbytes)
                elif following is None or self._sums is None:
                    self._pieces.append(row)
                elif following.begin - row.begin <= piece_nbytes:  # what lies between is read with it
                    self._pieces.append(row._replace(end=following.begin))
                else:
                    self._pieces.append(row)
                    self._add(row.end, following.begin, None, piece_nbytes)
            self._add(end, last, None, piece_nbytes)
            self._ranges.append((first, last, len(self._pieces)))
        # Neighbours go to one thread, up to the length of a piece: handing a short piece over takes longer than reading
        # it.
        shares: list[list[int]] = [[]]
        filled = 0
        for number, piece in enumerate(self._pieces):
            nbytes = piece.end - piece.begin
            if filled + nbytes > piece_nbytes:
                shares.append([])
                filled = 0
            shares[-1].append(number)
            filled += nbytes
        self._crc32s = [0] * len(self._pieces)
        self._shares_left = len(shares)
        self._lock = threading.Lock()
        return shares

    def _rows(self, piece_nbytes: int) -> Iterator[_Piece]:
        """The box as rows, or parts of rows, of at most ``piece_nbytes`` bytes each, in the order of the file."""
        piece_nbytes = min(piece_nbytes, _ROWS_NBYTES)
        inner = next(at for at, step in enumerate(self._steps) if step <= piece_nbytes)
        length, step = self._lengths[inner], self._steps[inner]
        at_once = min(length, piece_nbytes // step if step else length)
        for outer in product(*map(range, self._lengths[:inner])):
            begin = self._begin + sum(each * step for each, step in zip(outer, self._steps, strict=False))
            for low in range(0, length, at_once):
                high = min(low + at_once, length)
                at = begin + low * step
                yield _Piece(at, at + self._extent(inner, high - low), (*outer, slice(low, high)))

    def _unlike_rows(self, piece_nbytes: int, blocks: BlockLease) -> Iterator[_Piece]:
        """The bytes of a flat box that checksums do not show to be those of the target, as rows."""
        comparison, sums, (first, last) = self._comparison, self._sums, self._range
        most = min(piece_nbytes, _ROWS_NBYTES) // self._itemsize * self._itemsize
        step = last - first if sums is None or len(sums.crcs) == 1 else sums.block_nbytes
        for low in range(first, last, max(step, 1)):
            high = min(low + step, last)
            begin, end = max(low, self._begin), min(high, self._end)
            if comparison is not None and sums is not None and (begin, end) == (low, high):
                value = 0
                for at in range(begin, end, most):
                    stop = min(at + most, end)
                    with self._target_bytes(at - self._begin, stop - self._begin, blocks) as here:
                        value = crc32(here, value)
                if value == sums.expected(begin, end):
                    comparison.add_equal(end - begin)
                    continue
            for at in range(begin, end, most):
                stop = min(at + most, end)
                elements = slice((at - self._begin) // self._itemsize, (stop - self._begin) // self._itemsize)
                yield _Piece(at, stop, (elements,))

    @contextmanager
    def _target_bytes(self, begin: int, end: int, blocks: BlockLease) -> Iterator[memoryview]:
        """These bytes of the target, in the order of a contiguous tensor."""
        if self._bytes.address is not None:
            yield memory_at(self._bytes.address + begin, end - begin)
            return
        with blocks.lent() as block:
            if blocks.can_run_ahead(self._bytes):
                blocks.begin(self._bytes, begin, end, block, 0)()
            else:
                self._bytes.copy(begin, end, block, 0)
            yield block.view[: end - begin]

    @cached_property
    def _bytes(self) -> TensorBytes:
        return TensorBytes(self._into)

    def _add(self, begin: int, end: int, part: tuple[()] | None, piece_nbytes: int) -> None:
        """Add pieces that end at multiples of their length in the file."""
        while begin < end:
            stop = min(end, begin + piece_nbytes - (self._item.offset + begin) % piece_nbytes)
            self._pieces.append(_Piece(begin, stop, part))
            begin = stop

    def read(self, share: Sequence[int], blocks: BlockLease) -> bool:
        """Read some pieces.

        Args:
            blocks: memory for bytes that cannot be read into the tensor itself. Each block holds a piece, wherever it
                begins in the file.

        Returns:
            whether these were the last ones: then :meth:`tensor` has the box.

        Raises:
            CorruptCheckpoint: the file ends too early. With the last share: a checksum does not match.
            StorageError: the read failed.
        """
        item, needed = self._item, self._sums is not None
        for number in share:
            begin, end, part = self._pieces[number]
            start, nbytes, place = begin - self._begin, end - begin, item.offset + begin
            if part is not None and self._is_straight and self._into.is_cpu:
                view, address = self._view[start : start + nbytes], self._into.data_ptr() + start
                found, crc = item.file.read_piece(view, address, place, blocks, checksum=needed)
                item.check_found(begin, nbytes, found)
            else:
                with blocks.lent() as block:
                    at, found = item.file.read_block(block, place, nbytes)
                    item.check_found(begin, nbytes, found)
                    crc = crc32(block.view[at : at + nbytes]) if needed else 0
                    if part is not None and self._comparison is not None:
                        self._compare(part, block.view, at, blocks)
                    elif part is not None and self._is_straight:
                        blocks.fill([self._flat[start : start + nbytes]], block, [at])
                    elif part is not None and self._into.is_cpu:
                        self._put(part, block.view, at)
                    elif part is not None:
                        target = self._into.permute(self._order)[part]
                        steps = self._steps[len(self._steps) - target.dim() :]
                        blocks.fill([target], block, [at], [step // self._itemsize for step in steps])
            self._crc32s[number] = crc
        with self._lock:
            self._shares_left -= 1
            if self._shares_left > 0:
                return False
        done = 0
        for first, last, stop in self._ranges:
            value = 0
            for piece, crc in zip(self._pieces[done:stop], self._crc32s[done:stop], strict=True):
                value = crc32_of_both(value, crc, piece.end - piece.begin)
            done = stop
            if self._sums is not None:
                item.check(self._sums, first, last, value)
        return True

    @cached_property
    def _elements(self) -> npt.NDArray[Any]:
        """The memory of the target, with the dimensions in the order of the file."""
        return elements_of(self._into, self._order)

    def _put(self, part: tuple[int | slice, ...], data: memoryview, at: int) -> None:
        """Copy this part of the box from ``data``, where it begins at ``at``. torch's own copy may use all cores, and
        the data loaders need them."""
        target = self._elements[part]
        target[...] = self._stored(target, data, at)

    def _compare(
        self, part: tuple[int | slice, ...], data: memoryview, at: int, blocks: BlockLease | None = None
    ) -> None:
        """Compare this part of the box with ``data``, where it begins at ``at``."""
        item, comparison = self._item.read.item, self._comparison
        if comparison is None:
            return
        begins = [each.start if isinstance(each, slice) else each for each in part] or [0]

        def place(differs: npt.NDArray[np.bool_]) -> Sequence[Any]:
            if self._is_flat:
                return np.unravel_index(begins[0] + int(np.argmax(differs)), tuple(item.lengths))
            whole = differs.reshape((1,) * (len(self._order) - differs.ndim) + differs.shape)
            index = np.argwhere(whole.transpose(np.argsort(self._order)))[0]
            index[self._order[: len(begins)]] += np.array(begins, dtype=np.int64)
            return tuple(index)

        here: npt.NDArray[Any]
        with ExitStack() as lent:
            if not self._is_flat and self._into.is_cpu:
                here = self._elements[part]
            elif not self._is_flat:
                on_host = on_cpu(self._into.permute(self._order)[part])  # stays until it has been compared
                here = elements_of(on_host)
            elif blocks is None:
                here = np.frombuffer(flat_bytes(self._into).numpy(), dtype=ELEMENTS[self._itemsize])
            else:
                begin, end = begins[0] * self._itemsize, getattr(part[0], "stop", 0) * self._itemsize
                view = lent.enter_context(self._target_bytes(begin, end, blocks))
                here = np.frombuffer(view, dtype=ELEMENTS[self._itemsize])
            comparison.add(item, here, self._stored(here, data, at), place)

    def _stored(self, like: npt.NDArray[Any], data: memoryview, at: int) -> npt.NDArray[Any]:
        """The stored elements that go where ``like`` is, from ``data``, where they begin at ``at``."""
        steps = self._steps[len(self._steps) - like.ndim :]
        return np.ndarray(like.shape, like.dtype, data, offset=at, strides=steps)


_ROWS_NBYTES: Final = 1 << 20
"""So many bytes of rows are read at once: the checksum and the copy find them in the processor's cache."""


def _near_each_other(rows: Sequence[_Piece], sums: BlockSums | None) -> Iterator[list[_Piece]]:
    """Rows that are verified together. Between two lists lie whole blocks, which nobody needs to read."""
    least = 2 * sums.block_nbytes if sums is not None else 0
    begin = 0
    for at, (row, following) in enumerate(pairwise(rows), 1):
        if following.begin - row.end > least:
            yield list(rows[begin:at])
            begin = at
    yield list(rows[begin:])


# --- what is not a plain tensor


def loaded_by_torch(item: StoredItem, *, trusted: bool) -> torch.Tensor:
    """A box of a tensor that only ``torch.load`` understands: quantized, sparse, compressed, or in another byte order.

    Raises:
        CorruptCheckpoint: there is no such tensor, or its bytes are not those that were written.
        UnsafeCheckpoint: the record names classes that are not known to be data.
    """
    data = checked_bytes(item)
    if not data.startswith(ZIP_MAGIC):
        raise item.corrupt("an archive of torch.save", f"bytes that begin with {data[:4]!r}")
    offsets, lengths = item.read.item.storage_offsets, item.read.item.lengths
    loaded: Any = load_object(data, file=item.file.path, item=item.name, trusted=trusted)
    if not isinstance(loaded, torch.Tensor):
        raise item.corrupt("a tensor", f"a {type(loaded).__name__}")
    whole = loaded.detach() if loaded.requires_grad else loaded  # a subclass need not have its own detach
    _check_box(item, whole.shape, offsets, lengths)
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != whole.shape[dimension]:  # only where needed: some kinds of tensors have no narrow
            whole = whole.narrow(dimension, offset, length)
    return whole


def checked_bytes(item: StoredItem) -> bytes:
    """All bytes of an item, compared with their checksums: those of the footer, or of the members if they are a zip.
    ``torch.load`` does not do that.

    Raises:
        CorruptCheckpoint: a checksum does not match, or the archive is broken.
    """
    data, verification = bytes(item.view(0, item.nbytes)), item.verification
    sums = None if verification.verify is False else item.find_sums(0, item.nbytes)
    if sums is not None and (sums.offset, sums.nbytes) == (0, item.nbytes):
        item.check(sums, 0, item.nbytes, crc32(data))
        return data
    if verification.verify is False or not data.startswith(ZIP_MAGIC):
        verification.skip(len(data), item.name, item.file.path)
        return data
    try:
        members, _ = zip_members(data, len(data))
    except ValueError as error:
        if is_program(data):
            return data  # ``load_object`` refuses it
        raise item.corrupt("an intact zip archive", str(error)) from error
    view = memoryview(data)
    for name, member in members.items():
        found = crc32(view[member.offset : member.offset + member.nbytes])
        if member.crc32 == 0 != found:  # torch.serialization.set_crc32_options(False) was set
            verification.skip(member.nbytes, item.name, item.file.path)
        elif member.crc32 != found:
            expected = f"an intact zip archive: {name!r:.60} with CRC-32 {member.crc32:08x}"
            raise item.corrupt(expected, f"{found:08x}")
    return data
