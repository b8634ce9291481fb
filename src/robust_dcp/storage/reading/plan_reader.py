"""The reads of one load: many items from many files at once, handed to the planner one by one.

This module owns the order of the reads, how many run at a time, and all calls to the planner. Those calls come from the
calling thread only. It never reads or decodes an item itself: ``reading_threads`` and ``block_items`` do. ``reader``
calls it.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from errno import ENOENT
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.staging import Block, BlockPool
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, locate
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.reading.block_items import BlockItems, RecordForms, SmallTensors, Stretch
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.read_options import ReadOptions
from robust_dcp.storage.reading.reading_threads import ReadingThreads, Stopped
from robust_dcp.storage.reading.reads import (
    PlacedReads,
    PlannedItems,
    Read,
    ReadGroup,
    WholeTensors,
    check_end,
    in_groups,
    is_flat,
    may_ask_early,
    reads_of,
    target_of,
)
from robust_dcp.storage.reading.stored_tensor import Verification, damaged_footer
from robust_dcp.storage.records.objects import ObjectBytes

__all__ = ["ItemsRead", "read_items"]

Int64 = npt.NDArray[np.int64]

# So many reads per thread are submitted ahead. That keeps a thread busy while the calling thread copies.
_AHEAD_PER_THREAD: Final = 4


def read_items(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    metadata: Metadata,
    directory: str,
    disk: Disk,
    options: ReadOptions,
    check_stop: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None,
    mark: str | None = None,
) -> ItemsRead:
    """Read ``items`` from the files in ``directory`` and hand them to ``planner``.

    Args:
        check_stop: called between reads, from several threads, with two numbers: the bytes read so far, and the bytes
            of all items. What it raises ends the load.
        mark: the mark of the save that wrote the files; ``None`` if they have none.

    The first error of any thread ends all reads. It is raised once no thread is left that could still write into a
    target. Targets may hold parts of the data then. Every file has been closed in any case.
    """
    whole, others = WholeTensors.none(), items
    if isinstance(items, PlannedItems) and items.planner is planner:
        whole, others = items.whole, items.others
    reads = PlacedReads(whole, reads_of(others, metadata, directory))
    load = _Load(reads, planner, directory, disk, options, check_stop, mark)
    # ``no_grad``: we ask each DTensor for its local tensor, and autograd would record each of these calls.
    with torch.no_grad() if may_ask_early(planner) else nullcontext():
        load.run()
    return ItemsRead(load.peak_nbytes, load.verification.unverified_nbytes)


class ItemsRead(NamedTuple):
    """What :func:`plan_reader` did.

    Attributes:
        peak_nbytes: the most memory in use at any time: bytes that were read and not yet handed over, and buffers for
            reads.
        unverified_nbytes: bytes of data that were not compared with any checksum.
    """

    peak_nbytes: int
    unverified_nbytes: int


class _Pending(NamedTuple):
    """A read that has been started: one item with its target, if that is known, or a group with its block."""

    read: Read | ReadGroup
    result: Future[Any]
    nbytes: int
    target: torch.Tensor | None = None
    block: Block | None = None


class _Load:
    """The state of one :func:`plan_reader`."""

    def __init__(
        self,
        reads: PlacedReads,
        planner: LoadPlanner,
        directory: str,
        disk: Disk,
        options: ReadOptions,
        check_stop: Callable[[int, int], None],
        mark: str | None,
    ) -> None:
        self._reads = reads
        self._mark = mark
        self.verification = Verification(options.verify_checksums)
        self._planner = planner
        self._directory = directory
        self._disk = disk
        self._options = options
        self._targets_first = may_ask_early(planner)
        self._block_nbytes = options.fitted_block_nbytes
        self._limit_nbytes = options.buffer_bytes - options.n_threads * self._block_nbytes
        # A direct read takes whole pages, so it may need one more page at either end.
        nbytes = -(-self._block_nbytes // PAGE_NBYTES) * PAGE_NBYTES + 2 * PAGE_NBYTES
        self._pool = BlockPool(stay_at_fork=True)
        self._blocks = self._pool.lease(nbytes, 2 * options.n_threads)
        forms = RecordForms()
        self._items = BlockItems(forms, verification=self.verification, trusted=options.trusted)
        self._small = SmallTensors(reads.whole, forms, self.verification)
        total_nbytes = sum(reads.nbytes)
        files: dict[str, DataFile] = {}
        self._files = files
        # The function must not refer to `self`. In a cycle of references, the planner and all its tensors would stay in
        # memory until the garbage collector runs.
        self._tasks = ReadingThreads(
            options,
            self._blocks,
            self._block_nbytes,
            self._items,
            self.verification,
            lambda: check_stop(sum(file.read_nbytes for file in list(files.values())), total_nbytes),
        )
        self._pending: deque[_Pending] = deque()
        self._pending_nbytes = 0
        self._pending_groups = 0
        self._peak_pending_nbytes = 0
        self._reads_left = {reads.paths[number]: count for number, count in Counter(reads.path_of).items()}

    @property
    def peak_nbytes(self) -> int:
        """The most memory that was in use for data on its way."""
        return self._peak_pending_nbytes + self._blocks.used_nbytes

    def run(self) -> None:
        try:
            for read in in_groups(self._reads, self._block_nbytes):
                if isinstance(read, ReadGroup):
                    self._start_group(read)
                else:
                    self._start_single(read)
            while self._pending:
                self._finish_first()
        except Stopped:
            raise self._tasks.errors[0] from None
        except BaseException as error:
            self._tasks.errors.append(error)  # stops the reads that still run
            raise
        finally:
            self._tasks.shut_down()
            for file in self._files.values():
                file.close()
            self._blocks.end()
            self._pool.release()

    def _start_group(self, group: ReadGroup) -> None:
        while self._pending_groups >= self._options.n_threads:
            self._finish_first()
        self._make_room(self._block_nbytes)
        file = self._open(group)
        if group.end > file.nbytes:
            for read in group.reads:
                check_end(read, file)
        self._check_items(file, *group.item_ids(), lambda place: group.reads[place].name)
        block = self._blocks.take()
        self._append(_Pending(group, self._tasks.read_group(group, block, file), self._block_nbytes, block=block))

    def _start_single(self, read: Read) -> None:
        target = None
        if self._targets_first and read.item.type != LoadItemType.BYTE_IO:
            target = self._resolve(read.item)
        # A read straight into its target takes no memory of ours.
        is_straight = target is not None and is_flat(target) and target.dtype == read.dtype and read.is_whole
        nbytes = 0 if is_straight else read.nbytes
        self._make_room(nbytes)
        file = self._open(read)
        check_end(read, file)
        begin = np.array([read.offset], dtype=np.int64)
        self._check_items(file, begin, begin + read.nbytes, np.array([read.item_id]), lambda _: read.name)
        self._append(_Pending(read, self._tasks.read_single(read, target, file), nbytes, target))

    def _make_room(self, nbytes: int) -> None:
        while self._pending and (
            len(self._pending) >= self._options.n_threads * _AHEAD_PER_THREAD
            or self._pending_nbytes + nbytes > self._limit_nbytes
        ):
            self._finish_first()

    def _append(self, pending: _Pending) -> None:
        self._pending.append(pending)
        self._pending_nbytes += pending.nbytes
        self._pending_groups += pending.block is not None
        in_blocks = self._pending_groups * self._block_nbytes  # peak_nbytes counts blocks separately
        self._peak_pending_nbytes = max(self._peak_pending_nbytes, self._pending_nbytes - in_blocks)

    def _finish_first(self) -> None:
        """Wait for the oldest read and give the planner what it read."""
        pending = self._pending.popleft()
        result = pending.result.result()
        self._pending_nbytes -= pending.nbytes
        read = pending.read
        self._reads_left[read.relative_path] -= 1 if isinstance(read, Read) else len(read.places)
        if self._reads_left[read.relative_path] == 0:
            self._files.pop(read.relative_path).close()
        if isinstance(read, Read):
            self._hand_over(read, pending.target, result)
            return
        self._pending_groups -= 1
        self._hand_over_group(result, read)
        if pending.block is not None:
            self._blocks.give_back(pending.block)

    def _hand_over_group(self, stretch: Stretch, group: ReadGroup) -> None:
        done = self._small.copy(stretch, group.numbers())
        if not done.all():
            for read in map(group.reads.__getitem__, np.flatnonzero(~done).tolist()):
                self._hand_over_from(stretch, read)

    def _hand_over(self, read: Read, target: torch.Tensor | None, result: Any) -> None:
        if read.item.type == LoadItemType.BYTE_IO:
            path = os.path.join(self._directory, read.relative_path)
            self._planner.load_bytes(read.item, ObjectBytes(result, path))
            return
        if target is None:
            target = self._resolve(read.item)
        if result is not None:  # else it was read straight into the target
            target.copy_(result)
        self._planner.commit_tensor(read.item, target)

    def _hand_over_from(self, stretch: Stretch, read: Read) -> None:
        if read.item.type == LoadItemType.BYTE_IO:
            self._hand_over(read, None, self._tasks.checked_object(self._items.stored(stretch, read)))
            return
        target = self._resolve(read.item)
        self._hand_over(read, target, self._items.tensor(stretch, read, target))

    def _resolve(self, item: ReadItem) -> torch.Tensor:
        return target_of(self._planner, item, early=self._targets_first)

    def _check_mark(self, file: DataFile, mark: str) -> None:
        """Make sure that the save which wrote ``.metadata`` also wrote this file."""
        if file.mark == mark or (file.mark is None and self._options.verify_checksums is False):
            return
        found = "no mark: it is not whole, or was written by another program"
        if file.mark is not None:
            found = f"that of save {file.mark}"
        raise CorruptCheckpoint(
            f"{file.path} is not the file that {METADATA_NAME} beside it means: expected the mark of save {mark}, "
            f"found {found}; copy the whole checkpoint again, or take another one",
            file=file.path,
            expected=f"the mark of save {mark}",
            found=found,
        )

    def _check_items(
        self, file: DataFile, begin: Int64, end: Int64, item_ids: Int64, name_of: Callable[[int], str]
    ) -> None:
        """Make sure that the items which the metadata places in some records are those that were written there."""
        if self._options.verify_checksums is False or file.footer is None or not file.footer.tail.n_items:
            return
        try:
            differs = np.flatnonzero(file.footer.items_at(begin, end) != item_ids)
        except ValueError as error:
            raise damaged_footer(file.path, name_of(0), error) from error
        if not len(differs):
            return
        name, where = name_of(int(differs[0])), f"bytes {begin[differs[0]]} to {end[differs[0]]}"
        raise CorruptCheckpoint(
            f"{METADATA_NAME} says that item {name!r} lies in {where} of {file.path}, and the file says that it does "
            "not; take another checkpoint, or restore both files",
            file=file.path,
            item=name,
            expected=f"{name!r} in {where}",
            found="another item",
        )

    def _open(self, read: Read | ReadGroup) -> DataFile:
        if read.relative_path not in self._files:
            path = locate(self._disk, self._directory, read.relative_path, file=self._directory)
            try:
                file = self._files[read.relative_path] = DataFile(self._disk, path, self._options.direct)
            except StorageError as error:
                if error.errno != ENOENT:
                    raise
                name = (read if isinstance(read, Read) else read.reads[0]).name
                raise CorruptCheckpoint(
                    f"{path}, which holds item {name!r}, is missing",
                    file=path,
                    item=name,
                    expected="a file",
                    found="none",
                ) from error
            if self._mark is not None:
                self._check_mark(file, self._mark)
        return self._files[read.relative_path]
