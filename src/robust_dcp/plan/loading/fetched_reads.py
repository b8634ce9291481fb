"""Reads what lies on other nodes: a rank that sees the file reads it, and passes it to the ranks that do not.

This module turns the items that a rank cannot read into requests, reads what others have requested, and puts what
arrives into its tensors, window by window. ``fetch_plan`` decides who reads what. ``node_files`` makes an object of
this class for one load, and ``api.load`` uses it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Bucket, Channel, Relay
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.plan.loading.fetch_plan import FetchBox, FetchBucket, FetchShare, Requests, parts_of, room_for
from robust_dcp.plan.loading.shared_reads import checksum_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.placed_reads import Read
from robust_dcp.storage.reading.targets import is_plain, may_ask_early, target_of
from robust_dcp.storage.records.objects import ObjectBytes

__all__ = ["FetchedReads"]


class _Wanted(NamedTuple):
    """Where a box goes: a part of a tensor, or all of an object. ``place`` is the place of its item in the plan."""

    place: int
    target: torch.Tensor


class FetchedReads:
    """What one rank gets from other nodes, and what it reads for them.

    Args:
        reader, planner: of the load.
        plan: this rank's plan.
        reads: where the items of the plan lie, in its order.
        missing: the files that this rank does not see.

    Attributes:
        requests: what this rank wants.

    Raises:
        CorruptCheckpoint: an item that lies elsewhere can only be read by this rank itself.
    """

    def __init__(
        self,
        reader: RobustReader,
        planner: LoadPlanner,
        plan: LoadPlan,
        reads: Sequence[Read],
        missing: Collection[str],
    ) -> None:
        self._reader = reader
        self._planner = planner
        self._plan = plan
        self._items = plan.items
        self._elsewhere = {place for place, read in enumerate(reads) if read.relative_path in missing}
        self._wanted: list[_Wanted] = []
        self._objects: dict[int, torch.Tensor] = {}
        boxes: list[FetchBox] = []
        for place in sorted(self._elsewhere):
            self._add(place, reads[place], boxes)
        self.requests = Requests(tuple(boxes))

    @property
    def received(self) -> list[ReadItem]:
        """The items that other ranks read for this one."""
        return [self._items[place] for place in sorted(self._elsewhere)]

    def _add(self, place: int, read: Read, boxes: list[FetchBox]) -> None:
        index = read.item.storage_index
        chunk = None if index.offset is None else tuple(index.offset)
        if read.transforms or not may_ask_early(self._planner):
            why = "was saved through a transform" if read.transforms else f"is filled by {type(self._planner).__name__}"
            raise CorruptCheckpoint(
                f"{read.relative_path}, which holds item {read.name!r}, lies on another node, and the item {why}: only "
                "the rank that needs it can read it; copy the files of all nodes into one directory and load that",
                file=read.relative_path,
                item=read.name,
                expected="a file in this rank's directory",
                found="a file on another node",
            )
        trusted = self._reader.options.trusted
        if read.item.type == LoadItemType.BYTE_IO:
            self._objects[place] = torch.empty(read.nbytes, dtype=torch.uint8)
            self._wanted.append(_Wanted(place, self._objects[place]))
            boxes.append(FetchBox(read.relative_path, index.fqn, chunk, index.index, (), (), "", read.nbytes, trusted))
            return
        target = target_of(self._planner, read.item, early=True)
        if not target.numel():
            return
        # A tensor that is no plain memory is filled by ``copy_``, which takes all of it at once.
        whole = ((0,) * target.dim(), tuple(target.shape))
        parts = parts_of(target.shape, target.element_size()) if is_plain(target) else [whole]
        for offsets, lengths in parts:
            part = target
            for axis, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
                part = part.narrow(axis, first, length)
            stored = tuple(a + b for a, b in zip(read.item.storage_offsets, offsets, strict=True))
            dtype = str(target.dtype).removeprefix("torch.")
            nbytes = part.numel() * part.element_size()
            self._wanted.append(_Wanted(place, part))
            boxes.append(FetchBox(read.relative_path, index.fqn, chunk, index.index, stored, lengths, dtype, nbytes))

    def read(self, reader: RobustReader, planner: LoadPlanner) -> None:
        """Read all that this rank sees itself."""
        plan = self._plan
        if self._elsewhere:
            plan = LoadPlan([item for place, item in enumerate(self._items) if place not in self._elsewhere])
        reader.read_data(plan, planner).wait()

    def fetch(self, channel: Channel, phase: str, share: FetchShare, check_stop: Callable[[int, int], None]) -> None:
        """Read for others, and get what they have read. All ranks call this together.

        Raises:
            RobustCheckpointError: the same on all ranks.
        """
        # All windows use the same memory, so that it does not depend on when the collector finds that of the last one.
        room = [0] * share.n_windows
        for bucket in share.buckets:
            room[bucket.window] += room_for(bucket.nbytes)
        memory = torch.empty(max(room, default=0), dtype=torch.uint8)
        for window in range(share.n_windows):
            buckets = [bucket for bucket in share.buckets if bucket.window == window]
            contents = _Contents(channel.rank, buckets, self._wanted, memory)

            def read_window(contents: _Contents = contents) -> None:
                with self._reader.checking(check_stop):
                    contents.read(self._reader)

            channel.barrier(f"{phase}: read for other nodes", read_window)
            sent = [Bucket(0, bucket.ranks, bucket.nbytes) for bucket in buckets]
            channel.relay(f"{phase}: fetch", Relay(sent, contents, checksum_of))

    def load_objects(self, planner: LoadPlanner, directory: str) -> None:
        """Pass the objects that came from other ranks to ``planner``."""
        for place, slot in self._objects.items():
            planner.load_bytes(self._items[place], ObjectBytes(slot.numpy().tobytes(), directory))


class _Contents:
    """The bytes of the buckets of one window on one rank; see ``comm.relay.RelayContents``."""

    def __init__(
        self, rank: int, buckets: Sequence[FetchBucket], wanted: Sequence[_Wanted], memory: torch.Tensor
    ) -> None:
        self._rank = rank
        self._buckets = buckets
        self._wanted = wanted
        begins = [0, *accumulate(room_for(bucket.nbytes) for bucket in buckets)]
        self._buffers = [memory[begin : begin + bucket.nbytes] for begin, bucket in zip(begins, buckets, strict=False)]

    def read(self, reader: RobustReader) -> None:
        """Read the buckets that this rank reads for others."""
        targets: list[torch.Tensor] = []
        items: list[ReadItem] = []
        for number, bucket in enumerate(self._buckets):
            if bucket.ranks[0] != self._rank:
                continue
            buffer = self._buffers[number]
            begin = 0
            for box in bucket.boxes:
                if reader.options.trusted and not box.dtype and not box.trusted:
                    raise UnsafeCheckpoint(
                        f"rank {self._rank} loads with trusted=True, and reads {box.name!r} for ranks that do not; "
                        "pass the same to RobustReader on all ranks",
                        file=box.file,
                        what=f"{box.name!r}, unchecked",
                    )
                items.append(_item_of(box, len(targets)))
                flat = buffer[begin : begin + box.nbytes]
                targets.append(flat.view(getattr(torch, box.dtype)).view(box.lengths) if box.dtype else flat)
                begin += room_for(box.nbytes)
        if items:
            reader.read_data(LoadPlan(items), _IntoBuffers(targets)).wait()

    def outgoing(self, number: int) -> torch.Tensor:
        return self._buffers[number]

    def incoming(self, number: int) -> torch.Tensor:
        return self._buffers[number]

    def arrived(self, number: int, received: torch.Tensor) -> None:
        begin = 0
        for request in self._buckets[number].requests:
            target = self._wanted[request].target
            nbytes = target.numel() * target.element_size()
            target.copy_(received[begin : begin + nbytes].view(target.dtype).view(target.shape))
            begin += room_for(nbytes)


def _item_of(box: FetchBox, number: int) -> ReadItem:
    stored = MetadataIndex(box.name, None if box.chunk is None else torch.Size(box.chunk), box.number)
    return ReadItem(
        type=LoadItemType.TENSOR if box.dtype else LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(str(number)),  # for the planner below
        dest_offsets=torch.Size((0,) * len(box.lengths)),
        storage_index=stored,
        storage_offsets=torch.Size(box.offsets),
        lengths=torch.Size(box.lengths),
    )


class _IntoBuffers(DefaultLoadPlanner):
    """Reads boxes into the buffers of their buckets."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._targets[int(read_item.dest_index.fqn)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.resolve_tensor(read_item).copy_(torch.frombuffer(value.getbuffer(), dtype=torch.uint8))
