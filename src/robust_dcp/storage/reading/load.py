"""The reads of one load: many items from many files at once, handed to the planner one by one.

This module owns the order of the reads, the threads, and all calls to the planner. Those calls come from the calling
thread only. Items that lie next to each other are read as one block; large ones go straight into their targets, in
pieces that several threads read. The first error in one of the threads ends the work of all. ``stored_item`` makes
tensors of what is read. If the planner has a ``comparison``, targets are compared and not filled.

Many small tensors stay in columns up to the copy: a load of 20,000 takes 11 us for each, and 64 if one by one.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import nullcontext, suppress
from errno import ENOENT
from functools import cached_property
from itertools import compress, pairwise, repeat
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.errors import CorruptCheckpoint, PlanConflict, StorageError
from robust_dcp.staging.blocks import (
    Block,
    BlockLease,
    copy_each,
    flat_bytes,
    is_plain,
    memory_at,
    to_host_together,
)
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, locate
from robust_dcp.storage.index.stored_index import ChunkKind
from robust_dcp.storage.layouts.footer import item_id
from robust_dcp.storage.layouts.places import PAGE_NBYTES, Places
from robust_dcp.storage.options import ReadOptions
from robust_dcp.storage.reading.comparing import Comparison
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.reads import (
    Group,
    PlannedItems,
    Read,
    item_name,
    may_ask_early,
    reads_of,
    target_of,
)
from robust_dcp.storage.reading.stored_item import (
    BoxRead,
    StoredItem,
    Verification,
    checked_bytes,
    damaged_footer,
    find_box,
    loaded_by_torch,
)
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.objects import ObjectBytes, check_object
from robust_dcp.storage.records.record import NOT_ALIKE, framed_record, known_record
from robust_dcp.threads import submit, thread_pool

Int64 = npt.NDArray[np.int64]

# So many reads per thread are submitted ahead. That keeps a thread busy while the calling thread copies.
_AHEAD_PER_THREAD: Final = 4

_SMALL_NBYTES: Final = 64 << 10
"""An item up to this length is read whole: that takes no longer than reading a part of it. A gap up to this length
between two items is read as well.
"""

_MEDIUM_NBYTES: Final = 2 << 20
"""A longer item is read straight into its target, where that takes bytes. For a shorter one a copy is cheaper than the
read of its header that comes first.
"""

_NOT_ALL: Final = object()
"""Is returned in place of an item of which other threads still read pieces."""


class ItemReader:
    """Reads items from the files of a checkpoint and hands them to a planner. It is used once.

    Args:
        directory: the checkpoint's directory.
        check_stop: called between reads, from several threads, with two numbers: the bytes read so far, and the bytes
            of all items. What it raises ends the load.
        mark: the mark of the save that wrote the files; ``None`` if they have none.

    Attributes:
        verification: says how many bytes of data were not compared with any checksum.
        peak_nbytes: the most memory that was in use at any time, in bytes: what was read and not yet handed over, and
            buffers. It is known after :meth:`run`.
    """

    def __init__(
        self,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        metadata: Metadata,
        directory: str,
        disk: Disk,
        options: ReadOptions,
        check_stop: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None,
        mark: str | None = None,
    ) -> None:
        self._items = planned = PlannedItems.of(items)
        if planned.targets and planned.planner is not planner:
            self._items = planned = PlannedItems(others=list(planned))
        self._others = others = reads_of(planned.others, metadata, directory)
        _, paths, starts, lengths, *_ = zip(*others, strict=True) if others else ((),) * len(Read._fields)
        columns = np.arange(len(others)), np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
        self._order, self._places = planned.places.followed_by(Places(paths, *columns)).sorted()
        self._planner = planner
        self._directory = directory
        self._disk = disk
        self._options = options
        self._told_to_stop = check_stop
        self._mark = mark
        self.verification = Verification(options.verify_checksums)
        self._targets_first = may_ask_early(planner)
        self._comparison: Comparison | None = getattr(planner, "comparison", None)
        if self._comparison is not None:
            self._comparison.note = self._note_read
        self._n_threads, self._block_nbytes = options.fitted()
        # One for each thread more for what a comparison has on a device.
        n_blocks = (2 if self._comparison is None else 3) * self._n_threads + 1
        # A direct read takes whole pages, so it may need one more page at either end.
        nbytes = -(-self._block_nbytes // PAGE_NBYTES) * PAGE_NBYTES + 2 * PAGE_NBYTES
        # Each thread reads into one, one waits for each to be handed over, and this thread passes what is converted on.
        self._blocks = BlockLease(nbytes, n_blocks, of_load=True)
        self._limit_nbytes = options.buffer_bytes - n_blocks * nbytes
        self._threads = thread_pool(self._n_threads, "robust_dcp-read")
        self._errors: list[BaseException] = []
        self._files: dict[int, DataFile] = {}
        places = self._places
        self._reads_left: list[int] = np.bincount(places.file, minlength=len(places.files)).tolist()
        self._counting = threading.Lock()
        self._read_nbytes = 0
        self._total_nbytes = int(places.nbytes.sum())
        self._pending: deque[Group] = deque()
        self._pending_nbytes = 0
        self._pending_blocks = 0
        self._peak_pending_nbytes = self.peak_nbytes = 0

    def run(self) -> None:
        """Read all items.

        The first error of any thread ends all reads. It is raised once no thread is left that could still write into a
        target. Targets may hold parts of the data then. Every file has been closed in any case.
        """
        try:
            # ``no_grad``: we ask each DTensor for its local tensor, and autograd would record each of these calls.
            with torch.no_grad() if self._targets_first else nullcontext():
                waiting = self._groups()
                while waiting:  # a group is dropped when it is handed over, and its bytes with it
                    group = waiting.popleft()
                    self._start(group, self._file_of(group))
                while self._pending:
                    self._finish_first()
        except CancelledError:
            raise self._errors[0] from None
        except BaseException as error:
            self._errors.append(error)  # stops the reads that still run
            raise
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._blocks.close()
        self.peak_nbytes = self._peak_pending_nbytes + self._blocks.used_nbytes

    # --- the reads, ordered by file and by place in the file: in which order, and where each lies

    @cached_property
    def _item_ids(self) -> Int64:
        """int64: for each read its :func:`~robust_dcp.storage.layouts.footer.item_id`. Only files of ours need them."""
        items = self._items
        in_columns = zip(items.names, items.kind_of.tolist(), strict=True)
        ids = [item_id(name, items.kinds[kind].offsets) for name, kind in in_columns]
        ids += [item_id(read.item.storage_index.fqn, read.item.storage_index.offset or ()) for read in self._others]
        return np.array(ids, dtype=np.int64)[self._order]

    def _read_at(self, place: int) -> Read:
        """The read at ``place``. One that is in columns is made only if somebody asks for it."""
        number, items, at = int(self._order[place]), self._items, self._places
        if number >= len(items.names):
            return self._others[number - len(items.names)]
        kind, path = items.kinds[int(items.kind_of[number])], at.files[int(at.file[place])]
        start, nbytes = int(at.start[place]), int(at.nbytes[place])
        return Read(items.in_columns(number), path, start, nbytes, (), kind.dtype, kind.lengths)

    def _groups(self) -> deque[Group]:
        """All reads. Items that lie next to each other are in groups of up to the bytes of a block.

        Items are alone if they are large, have transforms, or are wanted only in part.
        """
        items, (_, file, start, nbytes) = self._items, self._places
        is_part = np.array([(kind.part or kind).lengths != kind.lengths for kind in items.kinds], dtype=np.bool_)
        in_columns = is_part[items.kind_of] & (items.places.nbytes > _SMALL_NBYTES)
        others = [bool(read.transforms) or (read.nbytes > _SMALL_NBYTES and not read.is_whole) for read in self._others]
        is_alone = np.append(in_columns, np.array(others, dtype=np.bool_))[self._order]
        is_alone |= nbytes > min(self._block_nbytes, _MEDIUM_NBYTES)
        end = start + nbytes
        is_near = (file[1:] == file[:-1]) & (start[1:] - end[:-1] <= _SMALL_NBYTES) & ~is_alone[1:] & ~is_alone[:-1]
        firsts = [*np.flatnonzero(np.append(True, ~is_near)).tolist(), len(file)] if len(file) else []
        groups = deque[Group]()
        for first, stop in pairwise(firsts):
            if is_alone[first]:
                groups.append(Group(np.arange(first, stop), int(end[first]), self._read_at(first)))
                continue
            furthest = np.maximum.accumulate(end[first:stop])  # an item may end behind the next one
            at = first
            while at < stop:
                fits = int(np.searchsorted(furthest, start[at] + self._block_nbytes, side="right"))
                behind = max(first + fits, at + 1)
                groups.append(Group(np.arange(at, behind), int(furthest[behind - first - 1]), None))
                at = behind
        return groups

    # --- reads are started

    def _start(self, group: Group, file: DataFile) -> None:
        read = group.alone
        if read is not None:
            if self._targets_first and read.item.type != LoadItemType.BYTE_IO:
                group.target = target_of(self._planner, read.item, early=True)
            # A read straight into its target takes no memory of ours.
            is_straight = group.target is not None and is_plain(group.target) and group.target.dtype == read.dtype
            group.nbytes = 0 if is_straight else read.nbytes
        while self._pending and (
            len(self._pending) >= self._n_threads * _AHEAD_PER_THREAD
            or self._pending_nbytes + group.nbytes > self._limit_nbytes
            or (read is None and self._pending_blocks >= self._n_threads)
        ):
            self._finish_first()
        if read is None and self._comparison is not None:
            unlike = self._unlike(group.places, file)
            self._finish(group, len(group.places) - len(unlike))
            if not len(unlike):
                return
            group.places = unlike
        if read is None:
            group.block = block = self._blocks.take()
            first = int(self._places.start[group.places[0]])
            submit(self._threads, self._on_thread, group.result, file.read_block, block, first, group.end - first)
        else:
            submit(self._threads, self._on_thread, group.result, self._read_alone, group, read, file)
        self._pending.append(group)
        self._pending_nbytes += group.nbytes
        self._pending_blocks += group.block is not None
        self._peak_pending_nbytes = max(self._peak_pending_nbytes, self._pending_nbytes)

    def _file_of(self, group: Group) -> DataFile:
        """The file of a group. It was written by the save that wrote ``.metadata``."""
        number = int(self._places.file[group.places[0]])
        if number in self._files:
            return self._files[number]
        path = locate(self._disk, self._directory, self._places.files[number], file=self._directory)
        try:
            file = self._files[number] = DataFile(self._disk, path, self._options.direct, self._note_read)
        except StorageError as error:
            if error.errno != ENOENT:
                raise
            name = item_name(self._read_at(int(group.places[0])).item)
            raise CorruptCheckpoint(
                f"{path}, which holds item {name!r}, is missing", file=path, item=name, expected="a file", found="none"
            ) from error
        head = file.head or file.footer
        mark = None if head is None else head.mark
        if self._mark not in (None, mark) and (mark is not None or self._options.verify_checksums is not False):
            found = "no mark: it is not whole, or was written by another program"
            if mark is not None:
                found = f"that of save {mark}"
            raise CorruptCheckpoint.of_file(
                path,
                f"the mark of save {self._mark}",
                found,
                problem=f"is not the file that {METADATA_NAME} beside it means",
                advice="copy the whole checkpoint again, or take another one",
            )
        self._check_places(number, file)
        return file

    def _check_places(self, number: int, file: DataFile) -> None:
        """Make sure that items lie in their file, and are those that were written there, before memory is taken."""
        here = slice(*np.searchsorted(self._places.file, (number, number + 1)).tolist())
        begin, nbytes = self._places.start[here], self._places.nbytes[here]
        is_beyond = nbytes > file.nbytes - begin  # a sum of the two could be too large
        if is_beyond.any():
            read = self._read_at(here.start + int(np.argmax(is_beyond)))
            item = StoredItem(file, read, self.verification)
            raise item.corrupt(f"{read.nbytes} bytes at offset {read.offset}", f"a file of {file.nbytes} bytes")
        footer = None if self._options.verify_checksums is False else file.footer
        if footer is None or not footer.n_items:
            return
        end = begin + nbytes
        try:
            differs = np.flatnonzero(footer.items_at(begin, end) != self._item_ids[here])
        except ValueError as error:
            name = item_name(self._read_at(here.start).item)
            raise damaged_footer(file.path, name, error) from error
        if not len(differs):
            return
        name = item_name(self._read_at(here.start + int(differs[0])).item)
        where = f"bytes {begin[differs[0]]} to {end[differs[0]]}"
        raise CorruptCheckpoint(
            f"{METADATA_NAME} says that item {name!r} lies in {where} of {file.path}, and the file says that it does "
            "not; take another checkpoint, or restore both files",
            file=file.path,
            item=name,
            expected=f"{name!r} in {where}",
            found="another item",
        )

    # --- on several threads

    def _on_thread(self, result: Future[Any], read: Callable[..., Any], *arguments: Any) -> None:
        """Call ``read``, and note its error. What it returns is the result, unless other threads still read pieces."""
        try:
            self._note_read(0)
            found = read(*arguments)
            if found is not _NOT_ALL:
                result.set_result(found)
        except BaseException as error:
            if not isinstance(error, CancelledError):
                self._errors.append(error)
            with suppress(InvalidStateError):  # another piece of the same item has failed before
                result.set_exception(error)

    def _note_read(self, nbytes: int) -> None:
        """Count bytes that were read, and raise if this load is over."""
        if self._errors:
            raise CancelledError  # ends this read, because another one failed
        with self._counting:
            self._read_nbytes += nbytes
        self._told_to_stop(self._read_nbytes, self._total_nbytes)

    def _read_alone(self, group: Group, read: Read, file: DataFile) -> Any:
        item, target = StoredItem(file, read, self.verification), group.target
        if read.transforms:
            item.memory = _decoded(item, read.transforms)
            item.nbytes = len(item.memory)
        if read.item.type == LoadItemType.BYTE_IO or item.memory is not None:
            return self._taken(item, target)
        box = find_box(item, target if target is not None and is_plain(target) else None, self._comparison)
        if box is None:
            return loaded_by_torch(item, trusted=self._options.trusted)
        if box.is_tangled:
            return self._taken(item, target)
        first, *others = box.shares(self._block_nbytes, self._blocks)
        for share in others:
            submit(self._threads, self._on_thread, group.result, self._read_share, box, share)
        return self._read_share(box, first)

    def _read_share(self, box: BoxRead, share: Sequence[int]) -> Any:
        return box.tensor() if box.read(share, self._blocks) else _NOT_ALL

    # --- what was read is handed over

    def _finish_first(self) -> None:
        """Wait for the oldest read and give the planner what it read."""
        group = self._pending.popleft()
        found = group.result.result()
        self._pending_nbytes -= group.nbytes
        file = self._files[int(self._places.file[group.places[0]])]
        if group.alone is not None:
            self._hand_over(group.alone, group.target, found)
        elif group.block is not None:
            self._pending_blocks -= 1
            block, (at, nbytes) = group.block, found
            shift, end = at - int(self._places.start[group.places[0]]), at + nbytes
            for place in self._not_in_columns(group.places, file, block, shift, end):
                read = self._read_at(place)
                begin = shift + read.offset
                item = StoredItem(file, read, self.verification, block.view[begin : min(begin + read.nbytes, end)])
                is_object = read.item.type == LoadItemType.BYTE_IO
                target = None if is_object else target_of(self._planner, read.item, early=self._targets_first)
                self._hand_over(read, target, self._taken(item, target))
            self._blocks.give_back(block)
        self._finish(group, len(group.places))

    def _finish(self, group: Group, n_reads: int) -> None:
        """So many reads of a group are over. After the last one of its file this is closed."""
        number = int(self._places.file[group.places[0]])
        self._reads_left[number] -= n_reads
        if self._reads_left[number] == 0:
            self._files.pop(number).close()

    def _taken(self, item: StoredItem, target: torch.Tensor | None) -> torch.Tensor | bytes | None:
        """The bytes of an object, after a check of what loading them would do, or what is wanted of a tensor in memory;
        ``None`` if ``target`` has been filled.
        """
        if item.read.item.type == LoadItemType.BYTE_IO:
            data = checked_bytes(item)
            if not self._options.trusted:
                check_object(data, file=item.file.path, item=item.name)
            return data
        into = target if target is not None and is_plain(target) and target.is_cpu else None
        box = find_box(item, into, self._comparison)
        return loaded_by_torch(item, trusted=self._options.trusted) if box is None else box.taken()

    def _hand_over(self, read: Read, target: torch.Tensor | None, found: Any) -> None:
        if read.item.type == LoadItemType.BYTE_IO:
            path = os.path.join(self._directory, read.relative_path)
            self._planner.load_bytes(read.item, ObjectBytes(found, path))
            return
        if target is None:
            target = target_of(self._planner, read.item, early=self._targets_first)
        if self._comparison is not None:
            if found is not None:
                self._comparison.add_tensor(read.item, target, found)
            return
        if found is not None:  # else it was read straight into the target
            try:
                with torch.inference_mode():  # the target may have been made in it
                    self._blocks.fill_from(found, target)
            except RuntimeError as error:  # such as a sparse tensor with another number of elements
                name = read.item.dest_index.fqn
                raise PlanConflict(f"{name!r} cannot be loaded into: {error}", key=name) from error
        self._planner.commit_tensor(read.item, target)

    # --- whole tensors in columns

    def _not_in_columns(self, places: Int64, file: DataFile, block: Block, shift: int, end: int) -> list[int]:
        """Fill the targets of whole tensors from a block. Those of one dtype and size are copied together.

        Args:
            places: the reads. The other arguments are those of :meth:`_copy_alike`.

        Returns:
            the reads that are to be handed over one by one, which finds out what they are, or what is wrong with them.
        """
        done = np.zeros(len(places), dtype=np.bool_)
        for alike in self._alike(places) if self._comparison is None else ():
            done[alike] = self._copy_alike(file, block, shift, end, places[alike])
        left: list[int] = places[~done].tolist()
        return left

    def _alike(self, places: Int64) -> Sequence[Int64]:
        """Those of some reads that are whole tensors in columns, by kind."""
        numbers = self._order[places]
        whole = np.flatnonzero(numbers < len(self._items.targets))
        if not len(whole):
            return ()
        kinds = self._items.kind_of[numbers[whole]]
        order = np.argsort(kinds, kind="stable")
        return np.split(whole[order], np.flatnonzero(np.diff(kinds[order])) + 1)

    def _unlike(self, places: Int64, file: DataFile) -> Int64:
        """Those of some reads whose targets do not have the checksum that was written with the item."""
        items, footer, comparison = self._items, file.footer, self._comparison
        differs = np.ones(len(places), dtype=np.bool_)
        has_sums = file.head is not None or (footer is not None and footer.n_items > 0)
        if comparison is None or self._options.verify_checksums is False or not has_sums:
            return places
        for alike in self._alike(places):
            numbers, start = self._order[places[alike]], self._places.start[places[alike]]
            kind = items.kinds[int(items.kind_of[numbers[0]])]
            record = framed_record(kind.dtype, kind.lengths)
            if file.head is not None:
                crcs = self._crcs_in_head(file, numbers, start, kind)
            elif footer is not None and record is not None:
                offset, nbytes = footer.data_at(start)
                is_framed = (offset == start + record.data_offset) & (nbytes == record.data_nbytes)
                crcs = np.where(is_framed, footer.crc32s_at(start), NOT_ALIKE)
            else:
                continue
            targets = [items.targets[number] for number in numbers.tolist()]
            elsewhere = [n for n, target in enumerate(targets) if not (target.is_cpu and target.is_contiguous())]
            # At once: each copy from a device waits for the device.
            copies = to_host_together([flat_bytes(targets[number]) for number in elsewhere])
            for number, copy in zip(elsewhere, copies, strict=True):
                targets[number] = copy
            for place, crc, target in zip(alike, crcs.tolist(), targets, strict=True):
                differs[place] = crc == NOT_ALIKE or crc32(memory_at(target.data_ptr(), kind.nbytes)) != crc
            comparison.add_equal(kind.nbytes * int((~differs[alike]).sum()))
        return places[differs]

    def _copy_alike(self, file: DataFile, block: Block, shift: int, end: int, places: Int64) -> npt.NDArray[np.bool_]:
        """Fill the targets of whole tensors of one dtype and size from a block.

        Args:
            shift: from a place in the file to one in the block.
            end: where the bytes in the block end.
            places: the reads.

        Returns:
            for each of ``places`` whether its target has been filled.
        """
        items, numbers = self._items, self._order[places]
        kind = items.kinds[int(items.kind_of[numbers[0]])]
        data_nbytes = kind.nbytes
        start, nbytes = self._places.start[places], self._places.nbytes[places]
        if (nbytes != nbytes[0]).any() or int(start.max() + nbytes[0]) + shift > end:
            return np.zeros(len(places), dtype=np.bool_)
        at = start + shift
        if file.head is not None:
            crcs = self._crcs_in_head(file, numbers, start, kind)
        else:
            known = self.verification.known_records
            found = known_record(known, block.memory, int(at[0]), int(nbytes[0]), kind.dtype, kind.lengths)
            if found is None or found[0].data_nbytes != data_nbytes:
                return np.zeros(len(places), dtype=np.bool_)
            crcs = found[0].crc32s_in(block.data, at)
            at = at + found[0].data_offset
            footer = None if self._options.verify_checksums is False else file.footer
            if footer is not None and footer.n_items:  # a sound record of another item has a right CRC-32 of its own
                crcs[crcs != footer.crc32s_at(start)] = NOT_ALIKE
        targets = list(map(items.targets.__getitem__, numbers.tolist()))
        takes_bytes = [(target.is_cpu or target.is_cuda) and target.is_contiguous() for target in targets]
        sound: npt.NDArray[np.bool_] = np.array(takes_bytes) & (crcs != NOT_ALIKE)
        if self._options.verify_checksums is not False:
            data = [block.view[begin : begin + data_nbytes] for begin in at.tolist()]
            # Tensors without a checksum (0) are counted, or refused, one by one.
            sound &= (crcs != 0) & (crcs == np.fromiter(map(crc32, data), dtype=np.int64, count=len(data)))
        else:
            self.verification.skip(int(sound.sum()) * data_nbytes, "", file.path)
        into = list(compress(targets, sound.tolist()))
        if all(map(attrgetter("is_cpu"), into)):
            copy_each([target.data_ptr() for target in into], (block.address + at[sound]).tolist(), repeat(data_nbytes))
        else:
            self._blocks.fill(list(map(flat_bytes, into)), block, at[sound].tolist())
        return sound

    def _crcs_in_head(self, file: DataFile, numbers: Int64, start: Int64, kind: ChunkKind) -> Int64:
        """The CRC-32 of each tensor according to the head of its file: 0 if it has none, ``NOT_ALIKE`` if this is
        another tensor.
        """
        tensors, names = file.head.tensors if file.head else {}, self._items.names
        found = [tensors.get(names[number]) for number in numbers.tolist()]
        wanted = (kind.dtype, kind.lengths, kind.nbytes, tuple(kind.offsets))
        crcs = [
            raw.crc32 or 0
            if raw is not None and (raw.dtype, raw.shape, raw.nbytes, raw.chunk_offset) == wanted and raw.offset == at
            else NOT_ALIKE
            for raw, at in zip(found, start.tolist(), strict=True)
        ]
        return np.array(crcs, dtype=np.int64)


def _decoded(item: StoredItem, transforms: Sequence[str]) -> memoryview:
    """Undo what the extensions of DCP (compression, for example) did to the item's bytes.

    They are private to torch. They are read because the switch leaves a save with them to stock, and the load of it
    comes here.
    """
    from torch.distributed.checkpoint._extension import ExtensionRegistry  # private, and rarely needed

    stream: Any = io.BytesIO(item.view(0, item.nbytes))
    extensions: Sequence[Any] = ExtensionRegistry().from_descriptor_list(transforms)
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        return memoryview(stream.read(-1))
    except Exception as error:  # the extension's own kinds
        raise item.corrupt(f"bytes encoded by {list(transforms)}", str(error)) from error
