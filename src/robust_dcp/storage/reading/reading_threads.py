"""The threads of a load: they read groups and single items, and large items in pieces.

This module owns the threads. The first error in one of them ends the work of all. It never calls the planner.
``plan_reader`` calls it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.staging import Block, BlockLease, DeviceCopies
from robust_dcp.storage.reading.block_items import BlockItems, Stretch
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.item_bytes import ItemBytes, ItemInFile, ItemInMemory
from robust_dcp.storage.reading.large_tensor import PiecewiseRead
from robust_dcp.storage.reading.placed_reads import Read, ReadGroup
from robust_dcp.storage.reading.read_options import ReadOptions
from robust_dcp.storage.reading.stored_tensor import check_members, find_box, read_box, read_tensor
from robust_dcp.storage.reading.targets import is_flat, takes_bytes
from robust_dcp.storage.reading.verification import Verification
from robust_dcp.storage.records.objects import check_object

__all__ = ["ReadingThreads", "Stopped"]

_MEDIUM_NBYTES: Final = 1 << 20
"""An item up to this length is read in one read and copied. Reading its header first would take longer."""


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

    def read_group(
        self, group: ReadGroup, targets: Sequence[torch.Tensor] | None, block: Block, file: DataFile
    ) -> Future[Any]:
        """Read a group.

        The result is a :class:`Stretch` in ``block``. If ``targets`` are given, the group is read into them, and the
        result is that of ``BlockItems.read_into``.
        """
        result: Future[Any] = Future()
        self._submit(result, self._read_group, group, targets, block, file, result)
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

    def _read_group(
        self,
        group: ReadGroup,
        targets: Sequence[torch.Tensor] | None,
        block: Block,
        file: DataFile,
        result: Future[Any],
    ) -> None:
        if targets is None:
            result.set_result(self._stretch(file, block, group.start, group.end - group.start))
        else:
            result.set_result(self._items.read_into(file, group, targets, block))

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
        elif read.is_whole and read.nbytes <= min(_MEDIUM_NBYTES, self._piece_nbytes):
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
        elif box.nbytes <= _MEDIUM_NBYTES:
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
