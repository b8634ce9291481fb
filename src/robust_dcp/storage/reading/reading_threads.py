"""The threads of a load: they read groups and single items, and large items in pieces.

This module owns the threads, where a large item is cut, and how the checksums of its pieces become that of the whole.
The first error in one of the threads ends the work of all. It never calls the planner.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.staging import Block, BlockLease, DeviceCopies
from robust_dcp.storage.reading.block_items import BlockItems, Stretch
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.read_options import ReadOptions
from robust_dcp.storage.reading.reads import MEDIUM_NBYTES, Read, ReadGroup, is_flat, takes_bytes
from robust_dcp.storage.reading.stored_tensor import (
    ItemBytes,
    ItemInFile,
    ItemInMemory,
    StoredBox,
    Verification,
    check_members,
    damaged,
    find_box,
    read_box,
    read_tensor,
)
from robust_dcp.storage.records.checksum import crc32, crc32_of_both
from robust_dcp.storage.records.objects import check_object
from robust_dcp.storage.records.record import bytes_of

__all__ = [
    "PiecewiseRead",
    "ReadingThreads",
    "Stopped",
    "cut",
    "shares_of",
]


def cut(offset: int, nbytes: int, piece_nbytes: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` bytes at ``offset`` of a file at the multiples of ``piece_nbytes`` in that file.

    Returns:
        For each piece its start, counted from ``offset``, and its length. None is longer than ``piece_nbytes``.
    """
    pieces = []
    start = 0
    while start < nbytes:
        end = min(nbytes, start + piece_nbytes - (offset + start) % piece_nbytes)
        pieces.append((start, end - start))
        start = end
    return pieces


def shares_of(nbytes: Sequence[int], share_nbytes: int) -> list[list[int]]:
    """Put neighbours together, up to ``share_nbytes``. Handing a short piece to a thread takes longer than reading
    it.
    """
    shares: list[list[int]] = []
    filled = share_nbytes
    for number, piece_nbytes in enumerate(nbytes):
        if filled + piece_nbytes > share_nbytes:
            shares.append([])
            filled = 0
        shares[-1].append(number)
        filled += piece_nbytes
    return shares


class PiecewiseRead:
    """A box of a stored tensor that is being read in pieces.

    Args:
        stored: the item.
        box: the part of it that is wanted.
        verified: the range of the item that is read to verify the box; ``None`` if the box is not verified.
        into: the tensor to read into, as for ``read_tensor`` of ``stored_tensor``. It may be on a device only if
            ``copies`` is given.
        blocks: memory for bytes that cannot be read into the tensor itself. Each block holds a piece, wherever it
            begins in the file.
        piece_nbytes: the longest piece.
        copies: if given, pieces are read into blocks and copied from there into ``into``.
        done: called once with what ``read_tensor`` would return, by the thread that has read the last piece.
    """

    def __init__(
        self,
        stored: ItemInFile,
        box: StoredBox,
        verified: tuple[int, int] | None,
        into: torch.Tensor | None,
        blocks: BlockLease,
        piece_nbytes: int,
        *,
        copies: DeviceCopies | None = None,
        done: Callable[[Any], None],
    ) -> None:
        self._stored = stored
        self._box = box
        self._into = into
        self._buffer = box.buffer_for(into)
        self._blocks = blocks
        self._on_device: tuple[torch.Tensor, DeviceCopies] | None = None
        if copies is not None and self._buffer is into:
            self._on_device = into.as_strided((into.numel(),), (1,)).view(torch.uint8), copies
        else:
            self._view = bytes_of(self._buffer)
        self._verified = verified
        self._done = done
        begin, end = box.offset, box.offset + box.nbytes
        first, last = verified or (begin, end)
        stored.check_bounds(first, last - first)
        # Bytes beyond the box are read only for their checksum.
        self._pieces = [
            (low + start, nbytes)
            for low, high in ((first, begin), (begin, end), (end, last))
            for start, nbytes in cut(stored.offset + low, high - low, piece_nbytes)
        ]
        self._shares = shares_of([nbytes for _, nbytes in self._pieces], piece_nbytes)
        self._crc32s = [0] * len(self._pieces)
        self._shares_left = len(self._shares)
        self._lock = threading.Lock()

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """The pieces that one thread reads, by number. Each share goes to :meth:`read` once, on any thread."""
        return self._shares

    def read(self, share: Sequence[int]) -> None:
        """Read some pieces.

        Raises:
            CorruptCheckpoint: the file ends too early. With the last share: a checksum does not match.
            StorageError: the read failed.
        """
        for number in share:
            self._stored.check_stop()
            offset, nbytes = self._pieces[number]
            start = offset - self._box.offset
            if 0 <= start < self._box.nbytes:
                self._crc32s[number] = (
                    self._read_in_place(start, nbytes)
                    if self._on_device is None
                    else self._read_through_block(start, nbytes, *self._on_device)
                )
            else:
                self._crc32s[number] = self._read_beyond(offset, nbytes)
        with self._lock:
            self._shares_left -= 1
            if self._shares_left:
                return
        self._finish()

    def _read_beyond(self, offset: int, nbytes: int) -> int:
        """Read bytes outside of the box, for their checksum."""
        stored = self._stored
        with self._blocks.lent() as block:
            at, found = stored.opened.read_block(block, stored.offset + offset, nbytes)
            stored.check_found(offset, nbytes, found)
            return crc32(block.view[at : at + nbytes])

    def _read_in_place(self, start: int, nbytes: int) -> int:
        """Read a piece into the tensor; returns its checksum, if one is needed."""
        stored, offset = self._stored, self._box.offset + start
        view = self._view[start : start + nbytes]
        address = self._buffer.data_ptr() + start
        needed = self._verified is not None
        place = stored.offset + offset
        found, checksum = stored.opened.read_piece(view, address, place, self._blocks, checksum=needed)
        stored.check_found(offset, nbytes, found)
        return checksum

    def _read_through_block(self, start: int, nbytes: int, flat: torch.Tensor, copies: DeviceCopies) -> int:
        """Read a piece into a block and copy it from there into ``flat``; returns the same as
        :meth:`_read_in_place`.
        """
        stored, offset = self._stored, self._box.offset + start
        with self._blocks.lent() as block:
            at, found = stored.opened.read_block(block, stored.offset + offset, nbytes)
            stored.check_found(offset, nbytes, found)
            checksum = self._checksum(block.view[at : at + nbytes])
            copies.fill(flat[start : start + nbytes], block, at)
        return checksum

    def _checksum(self, view: memoryview) -> int:
        return 0 if self._verified is None else crc32(view)

    def _finish(self) -> None:
        sums = self._box.sums
        if self._verified is not None and sums is not None:
            found = 0
            for (_, nbytes), piece_crc32 in zip(self._pieces, self._crc32s, strict=True):
                found = crc32_of_both(found, piece_crc32, nbytes)
            if found != sums.expected(*self._verified):
                raise damaged(self._stored, sums, *self._verified)
        self._done(self._box.tensor_in(self._buffer, self._into))


class Stopped(Exception):
    """Ends a read because another one failed."""


class ReadingThreads:
    """The threads of one load.

    Args:
        blocks: memory for bytes that cannot be read straight into their target. Each thread uses at most one block at a
            time.
        piece_nbytes: a piece of this length fits into a block, wherever it begins in a file.
        items: takes tensors out of the bytes that were read.
        verification: decides what is compared with checksums, and counts what is not.

    Attributes:
        errors: what went wrong, in the order in which it happened. After the first error nothing more is read.
    """

    def __init__(
        self,
        options: ReadOptions,
        blocks: BlockLease,
        piece_nbytes: int,
        items: BlockItems,
        verification: Verification,
        check_stop: Callable[[], None],
    ) -> None:
        self.errors: list[BaseException] = []
        self._options = options
        self._blocks = blocks
        self._piece_nbytes = piece_nbytes
        self._copies = DeviceCopies()
        self._items = items
        self._verification = verification
        self._told_to_stop = check_stop
        self._pool = ThreadPoolExecutor(options.n_threads, thread_name_prefix="robust_dcp-read")

    def shut_down(self) -> None:
        """Wait for the reads that run. Reads that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read_group(self, group: ReadGroup, block: Block, file: DataFile) -> Future[Any]:
        """Read a group. The result is a :class:`Stretch` in ``block``."""
        result: Future[Any] = Future()
        self._submit(result, self._read_group, group, block, file, result)
        return result

    def read_single(self, read: Read, target: torch.Tensor | None, file: DataFile) -> Future[Any]:
        """Read one item. The result is its bytes, a CPU tensor, or ``None`` if ``target`` has been filled."""
        result: Future[Any] = Future()
        self._submit(result, self._read_single, read, target, file, result)
        return result

    def checked_object(self, stored: ItemBytes) -> bytes:
        """The bytes of an item that is not a tensor, after a check of what loading them would do."""
        data = stored.read(0, stored.nbytes)
        check_members(stored, data, self._verification)
        if not self._options.trusted:
            check_object(data, file=stored.file, item=stored.item)
        return data

    def _submit(self, result: Future[Any], work: Callable[..., None], *arguments: Any) -> None:
        self._pool.submit(self._run, result, work, arguments)

    def _run(self, result: Future[Any], work: Callable[..., None], arguments: Sequence[Any]) -> None:
        try:
            self._check_stop()
            work(*arguments)
        except BaseException as error:
            if not isinstance(error, Stopped):
                self.errors.append(error)
            with suppress(InvalidStateError):  # another piece of the same item has failed before
                result.set_exception(error)

    def _check_stop(self) -> None:
        if self.errors:
            raise Stopped
        self._told_to_stop()

    def _read_group(self, group: ReadGroup, block: Block, file: DataFile, result: Future[Any]) -> None:
        result.set_result(self._stretch(file, block, group.start, group.end - group.start))

    def _stretch(self, file: DataFile, block: Block, offset: int, nbytes: int) -> Stretch:
        start, found = file.read_block(block, offset, nbytes)
        return Stretch(file.path, offset, block, start, found, file.head.get(), self._items.footer_of(file))

    def _read_single(self, read: Read, target: torch.Tensor | None, file: DataFile, result: Future[Any]) -> None:
        raw = read.in_head(file.head.get(), file.path)
        stored = ItemInFile(file, read.name, read.offset, read.nbytes, self._check_stop, raw)
        if read.transforms:
            result.set_result(self._read_transformed(read, target, stored))
        elif read.item.type == LoadItemType.BYTE_IO:
            result.set_result(self.checked_object(stored))
        elif read.is_whole and read.nbytes <= min(MEDIUM_NBYTES, self._piece_nbytes):
            with self._blocks.lent() as block:
                stretch = self._stretch(file, block, read.offset, read.nbytes)
                result.set_result(self._items.tensor(stretch, read, target))
        else:
            self._read_tensor(read, target, stored, result)

    def _read_tensor(self, read: Read, target: torch.Tensor | None, stored: ItemInFile, result: Future[Any]) -> None:
        item = read.item
        into = target if target is not None and is_flat(target) else None
        on_device = into is not None and not into.is_cpu
        with_sums = self._verification.verify is not False
        box = find_box(stored, item.storage_offsets, item.lengths, read.expected, with_sums=with_sums)
        if box is None:
            result.set_result(self._loaded_by_torch(read, stored))
        elif box.nbytes <= MEDIUM_NBYTES:
            result.set_result(read_box(stored, box, None if on_device else into, self._verification))
        else:
            verified = self._verification.range_for(stored, box.sums, box.offset, box.offset + box.nbytes)
            pieces = PiecewiseRead(
                stored,
                box,
                verified,
                into,
                self._blocks,
                self._piece_nbytes,
                copies=self._copies if on_device else None,
                done=result.set_result,
            )
            for share in pieces.shares:
                self._submit(result, pieces.read, share)

    def _loaded_by_torch(self, read: Read, stored: ItemBytes) -> torch.Tensor | None:
        return read_tensor(
            stored,
            read.item.storage_offsets,
            read.item.lengths,
            verification=self._verification,
            trusted=self._options.trusted,
        )

    def _read_transformed(self, read: Read, target: torch.Tensor | None, stored: ItemInFile) -> Any:
        plain = _transformed(stored, read.transforms, self._options.extension_registry)
        if read.item.type == LoadItemType.BYTE_IO:
            return self.checked_object(plain)
        return read_tensor(
            plain,
            read.item.storage_offsets,
            read.item.lengths,
            into=target if target is not None and takes_bytes(target) else None,
            expected=read.expected,
            verification=self._verification,
            trusted=self._options.trusted,
        )


def _transformed(stored: ItemBytes, transforms: Sequence[str], registry: Any) -> ItemInMemory:
    """Undo what the extensions of DCP (compression, for example) did to the item's bytes."""
    if registry is None:
        from torch.distributed.checkpoint._extension import ExtensionRegistry  # private, and rarely needed

        registry = ExtensionRegistry()
    extensions = registry.from_descriptor_list(transforms)
    stream: Any = io.BytesIO(stored.read(0, stored.nbytes))
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        return ItemInMemory(stored.file, stored.item, stream.read(-1))
    except Exception as error:  # the extension's own kinds
        raise CorruptCheckpoint(
            f"item {stored.item!r} in {stored.file} cannot be decoded by {list(transforms)}: {error}",
            file=stored.file,
            item=stored.item,
            expected=f"bytes encoded by {list(transforms)}",
            found=str(error),
        ) from error
