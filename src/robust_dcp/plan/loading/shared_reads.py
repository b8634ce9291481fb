"""The bytes that a rank reads for other ranks, and those that it gets from them.

This module knows where the bytes of each bucket are in the tensors of this rank. ``readers`` decides who reads what,
and ``comm.relay`` moves the buckets. ``sharing`` makes an object of this class for one load, and ``api.load`` uses it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Bucket, GroupMover, Relay
from robust_dcp.plan.loading.readers import Piece, ReadShare, pieces_of
from robust_dcp.staging import flat_bytes, parts_in_order
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.sharable_reads import SharableReads
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.objects import ObjectBytes

__all__ = ["SharedReads", "checksum_of"]


class SharedReads:
    """What one rank reads for others, and what it gets from them."""

    def __init__(
        self,
        rank: int,
        items: Sequence[ReadItem],
        needed: SharableReads,
        share: ReadShare | None,
        move_on_device: GroupMover | None,
    ) -> None:
        self._rank = rank
        self._items = items
        self._needed = needed
        self._move_on_device = move_on_device
        self._objects: dict[int, torch.Tensor] = {}
        self._buckets: list[Bucket] = []
        self._contents: list[tuple[npt.NDArray[np.intp], Piece]] = []
        self._received: set[int] = set()
        if share is not None:
            self._unpack(share)

    @property
    def received(self) -> list[ReadItem]:
        """The items that other ranks read for this one."""
        return [self._items[place] for place in sorted(self._received)]

    def _unpack(self, share: ReadShare) -> None:
        needed = self._needed
        transfer_of = np.frombuffer(share.transfer_of, dtype="<i4")
        reader = np.array([reader for _, reader, _ in share.transfers] + [self._rank])[transfer_of]  # -1: this rank
        self._received = set(needed.places[reader != self._rank].tolist())
        for number in np.flatnonzero(transfer_of >= 0).tolist():
            if needed.targets[number] is None:
                self._objects[number] = torch.empty(int(needed.nbytes[number]), dtype=torch.uint8)
        members = [np.flatnonzero(transfer_of == number) for number in range(len(share.transfers))]
        pieces = [pieces_of(needed.nbytes[each]) for each in members]
        for number_of_round, transfer, number in np.frombuffer(share.buckets, dtype="<i4").reshape(-1, 3).tolist():
            group, reader_rank, on_device = share.transfers[transfer]
            piece = pieces[transfer][number]
            ranks = (reader_rank, *(rank for rank in share.groups[group] if rank != reader_rank))
            self._buckets.append(Bucket(number_of_round, ranks, piece.end - piece.begin, on_device))
            self._contents.append((members[transfer][piece.first : piece.last], piece))

    def read(self, reader: RobustReader, planner: LoadPlanner) -> None:
        """Read everything that no other rank reads for this one."""
        left = [item for place, item in enumerate(self._items) if place not in self._received]
        reader.read_data(LoadPlan(left), self._keeping_objects(planner)).wait()

    def _keeping_objects(self, planner: LoadPlanner) -> LoadPlanner:
        """``planner``, wrapped so that the bytes of objects that other ranks need are kept."""
        places = self._needed.places.tolist()
        slots = {self._items[places[number]]: slot for number, slot in self._objects.items()}
        return _ObjectsKept(planner, slots) if slots else planner

    def relay(self) -> Relay:
        """The argument for ``Channel.relay``, after this rank has read its share."""
        return Relay(self._buckets, self, checksum_of, self._move_on_device)

    def load_objects(self, planner: LoadPlanner, directory: str) -> None:
        """Pass the objects that came from other ranks to ``planner``."""
        for number, slot in self._objects.items():
            place = int(self._needed.places[number])
            if place in self._received:
                planner.load_bytes(self._items[place], ObjectBytes(slot.numpy().tobytes(), directory))

    def outgoing(self, number: int) -> torch.Tensor:
        """The bytes of a bucket (see ``comm.relay.RelayContents``): a piece of one target, or several targets
        packed."""
        parts = self._parts(number)
        buffer = self._buffer(number, parts)
        if len(parts) > 1 or buffer.data_ptr() != parts[0].data_ptr():
            for part, where in _side_by_side(parts, buffer):
                where.copy_(flat_bytes(part))
        return buffer

    def incoming(self, number: int) -> torch.Tensor:
        return self._buffer(number, self._parts(number))

    def arrived(self, number: int, received: torch.Tensor) -> None:
        parts = self._parts(number)
        if len(parts) == 1 and received.data_ptr() == parts[0].data_ptr():
            return
        for part, where in _side_by_side(parts, received):
            if part.is_contiguous():
                flat_bytes(part).copy_(where)
            else:
                flat = torch.empty_like(part, memory_format=torch.contiguous_format)
                flat_bytes(flat).copy_(where)
                part.copy_(flat)

    def _parts(self, number: int) -> list[torch.Tensor]:
        """The parts of target tensors that a bucket holds."""
        members, piece = self._contents[number]
        if len(members) == 1:
            whole = self._tensor(int(members[0]))
            size = whole.element_size()
            return list(parts_in_order(whole, piece.begin // size, piece.end // size))
        return [self._tensor(member) for member in members.tolist()]

    def _tensor(self, number: int) -> torch.Tensor:
        target = self._needed.targets[number]
        return self._objects[number] if target is None else target

    def _buffer(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where a bucket's bytes are while they travel. This is their target itself, if it can be sent from there."""
        bucket, first = self._buckets[number], parts[0]
        if len(parts) == 1 and first.is_contiguous() and (bucket.on_device or first.is_cpu):
            return flat_bytes(first)
        device = first.device if bucket.on_device else torch.device("cpu")
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)


class _ObjectsKept(DefaultLoadPlanner):
    """Passes everything to another planner, and keeps the bytes of some objects.

    ``commit_tensor`` is not passed on. The other planner must have stock's, which does nothing.
    """

    def __init__(self, planner: LoadPlanner, slots: dict[ReadItem, torch.Tensor]) -> None:
        super().__init__()
        self._planner = planner
        self._slots = slots

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._planner.resolve_tensor(read_item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if read_item in self._slots:
            self._slots[read_item].copy_(torch.frombuffer(value.getbuffer(), dtype=torch.uint8))
        self._planner.load_bytes(read_item, value)


def _side_by_side(parts: Sequence[torch.Tensor], buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part with its place in ``buffer``, one after the other."""
    at = 0
    for part in parts:
        nbytes = part.numel() * part.element_size()
        yield part, buffer[at : at + nbytes]
        at += nbytes


def checksum_of(tensor: torch.Tensor) -> int:
    """The checksum of a tensor that was sent, for :class:`~robust_dcp.comm.Relay`."""
    return crc32(memoryview(tensor.numpy().data))
