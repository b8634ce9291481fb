"""One read for replicas: of what several ranks of a load need, each byte is read by one and passed on to the others.

Owns the decision whether to, the exchange by which ranks agree on readers, and the bytes on their way. Who reads what
is decided in ``readers``; how bytes travel is ``comm.relay``'s. Called by ``api.load``.
"""

from __future__ import annotations

import hashlib
import io
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Agreement, Bucket, Channel, GroupMover, Offer, Relay, node_of
from robust_dcp.errors import PlanConflict
from robust_dcp.plan.readers import Piece, ReadColumns, ReadShare, assign_readers, pieces_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.sharable_reads import SharableReads
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.objects import ObjectBytes

__all__ = ["SharedReads", "all_have_plans", "choose_readers", "node_reads_the_same", "ranks_share", "sharing_offer"]

_NOTHING: Final = Offer().plan_id

_CAN: Final = 1
_WISHES: Final = {True: 2, False: 4, None: 8}
"""Flags of an offer; a rank without any of them reads by itself."""


def sharing_offer(share_reads: bool | None, rank: int, items: Sequence[ReadItem], *, can_share: bool) -> Offer:
    """What a rank with a ``RobustReader(share_reads=…)`` tells the others.

    Args:
        rank: of this process in the group.
        items: all that it reads; the same ones in the same order give the same offer.
        can_share: whether its planner lets others fill its tensors.

    Raises:
        ValueError: the environment says something meaningless of nodes.
    """
    flags = _WISHES[share_reads] | (_CAN if can_share else 0)
    return Offer(plan_id=_digest(items), value=node_of(rank), flags=flags)


def all_have_plans(agreement: Agreement) -> bool:
    """Whether all ranks have told what :func:`sharing_offer` tells. One that offers nothing has no index to plan by."""
    return sum(agreement.count(wish) for wish in _WISHES.values()) == agreement.n_ranks


def node_reads_the_same(agreement: Agreement) -> bool:
    """Whether the ranks of a node read exactly the same, as those of data parallelism do.

    Known where all ranks of the load read the same, and there are several on this node.
    """
    if agreement.n_ranks == 1 or not agreement.same_plan_id or agreement.plan_id == _NOTHING:
        return False
    return agreement.same_value or int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1) > 1


def _digest(items: Sequence[ReadItem]) -> bytes:
    if not items:
        return _NOTHING
    indices = [item.storage_index for item in items]
    names = "\n".join([index.fqn for index in indices]).encode()
    boxes = [box for item in items for box in (item.storage_index.offset or (), item.storage_offsets, item.lengths)]
    numbers = array("q", chain.from_iterable(boxes)).tobytes()
    lengths = array("q", map(len, (names, *boxes))).tobytes()
    return hashlib.blake2b(lengths + names + numbers, digest_size=len(_NOTHING)).digest()


def ranks_share(agreement: Agreement) -> bool:
    """Whether this load reads for replicas once; the same on all ranks.

    With ``None`` it does if they are on several nodes. Ranks on one node read through one page cache, or from one
    drive, faster than they can pass bytes on to each other (docs/performance.md).

    Args:
        agreement: of the offers of all ranks.

    Raises:
        PlanConflict: the ranks want different things; names the first of each kind.
    """
    wishes = {wish: agreement.first_rank(flag) for wish, flag in _WISHES.items() if agreement.count(flag)}
    if len(wishes) > 1:
        found = ", ".join(
            f"{wish} on rank {rank}" for wish, rank in sorted(wishes.items(), key=lambda each: each[1] or 0)
        )
        raise PlanConflict(
            f"share_reads is {found}; pass the same to RobustReader on all ranks of a load",
            key="share_reads",
            ranks=sorted(rank for rank in wishes.values() if rank is not None),
        )
    if agreement.n_ranks == 1 or not agreement.all_have(_CAN):
        return False
    return True in wishes or (None in wishes and not agreement.same_value)


def choose_readers(
    channel: Channel,
    checkpoint: str,
    reader: RobustReader,
    plan: LoadPlan,
    planner: LoadPlanner,
    process_group: dist.ProcessGroup | None,
) -> SharedReads:
    """Tell the coordinator what this rank needs, and hear what it is to read.

    Args:
        checkpoint: what phases are named after.
        plan: of this rank, made with the metadata that ``reader`` has.
        process_group: the ranks that load together; it moves what is to go from device to device.

    Raises:
        RobustCheckpointError: the same on all ranks.
    """
    device_type = _type_of_devices(process_group) if channel.size > 1 else None
    needed: list[SharableReads] = []

    def tell() -> ReadColumns | None:
        needed.append(reader.sharable_reads(plan, planner, lambda device: device.type == device_type))
        return _columns_of(needed[0], node_of(channel.rank)) if len(needed[0].places) else None

    def assign() -> list[ReadShare | None]:
        return assign_readers(told or [], reader.places_in_files(), across_nodes=reader.share_reads is None)

    told = channel.gather(f"load {checkpoint}: reads", tell, ReadColumns)
    share = channel.scatter(f"load {checkpoint}: readers", assign, ReadShare)
    mover = None
    if device_type is not None and share is not None and share.any_on_device:
        mover = GroupMover(dist.group.WORLD if process_group is None else process_group, device_type)
    return SharedReads(channel.rank, plan.items, needed[0], share, mover)


def _type_of_devices(process_group: dist.ProcessGroup | None) -> str | None:
    """Between which devices the group that trains moves bytes directly: ``"cuda"`` for NCCL; ``None`` for gloo."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    # gloo would go by way of the host as well, and the channel's own group has a timeout that names ranks.
    direct = (device for device, backend in backends.items() if device != "cpu" and backend != "gloo")
    return next(direct, None)


def _columns_of(needed: SharableReads, node: int) -> ReadColumns:
    return ReadColumns(
        node=node,
        items=needed.items.astype("<i4").tobytes(),
        boxes=needed.boxes.astype("<u8").tobytes() if needed.boxes.any() else b"",
        nbytes=needed.nbytes.astype("<i8").tobytes(),
    )


class SharedReads:
    """What one rank gets from others, and what it reads for them."""

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
        """What other ranks read for this one."""
        return [self._items[place] for place in sorted(self._received)]

    def _unpack(self, share: ReadShare) -> None:
        needed = self._needed
        transfer_of = np.frombuffer(share.transfer_of, dtype="<i4")
        reader = np.array([reader for _, reader, _ in share.transfers] + [self._rank])[transfer_of]  # -1: itself
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
        """Read what no other rank reads for this one."""
        left = [item for place, item in enumerate(self._items) if place not in self._received]
        reader.read_data(LoadPlan(left), self._keeping_objects(planner)).wait()

    def _keeping_objects(self, planner: LoadPlanner) -> LoadPlanner:
        """``planner``; and the bytes of objects that other ranks need are kept for them."""
        places = self._needed.places.tolist()
        slots = {self._items[places[number]]: slot for number, slot in self._objects.items()}
        return _ObjectsKept(planner, slots) if slots else planner

    def relay(self) -> Relay:
        """For ``Channel.relay``, once this rank has read its share."""
        return Relay(self._buckets, self, _checksum, self._move_on_device)

    def load_objects(self, planner: LoadPlanner, directory: str) -> None:
        """Hand the objects that came from other ranks to ``planner``."""
        for number, slot in self._objects.items():
            place = int(self._needed.places[number])
            if place in self._received:
                planner.load_bytes(self._items[place], ObjectBytes(slot.numpy().tobytes(), directory))

    def outgoing(self, number: int) -> torch.Tensor:
        """The bytes of a bucket, as ``comm.relay.RelayContents`` says: one piece of a target, or several packed."""
        parts = self._parts(number)
        buffer = self._buffer(number, parts)
        if len(parts) > 1 or buffer.data_ptr() != parts[0].data_ptr():
            for part, where in _side_by_side(parts, buffer):
                where.copy_(_as_bytes(part.contiguous()))
        return buffer

    def incoming(self, number: int) -> torch.Tensor:
        return self._buffer(number, self._parts(number))

    def arrived(self, number: int, received: torch.Tensor) -> None:
        parts = self._parts(number)
        if len(parts) == 1 and received.data_ptr() == parts[0].data_ptr():
            return
        for part, where in _side_by_side(parts, received):
            if part.is_contiguous():
                _as_bytes(part).copy_(where)
            else:
                flat = torch.empty_like(part, memory_format=torch.contiguous_format)
                _as_bytes(flat).copy_(where)
                part.copy_(flat)

    def _parts(self, number: int) -> list[torch.Tensor]:
        """What a bucket holds, as parts of targets."""
        members, piece = self._contents[number]
        if len(members) == 1:
            whole = self._tensor(int(members[0]))
            size = whole.element_size()
            return list(_in_order(whole, piece.begin // size, piece.end // size))
        return [self._tensor(member) for member in members.tolist()]

    def _tensor(self, number: int) -> torch.Tensor:
        target = self._needed.targets[number]
        return self._objects[number] if target is None else target

    def _buffer(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where a bucket's bytes are while they travel: where they belong, if they can be sent from there."""
        bucket, first = self._buckets[number], parts[0]
        if len(parts) == 1 and first.is_contiguous() and (bucket.on_device or first.is_cpu):
            return _as_bytes(first)
        device = first.device if bucket.on_device else torch.device("cpu")
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)


class _ObjectsKept(DefaultLoadPlanner):
    """Hands all to another planner, which leaves ``commit_tensor`` as it is, and keeps the bytes of some objects."""

    def __init__(self, planner: LoadPlanner, slots: dict[ReadItem, torch.Tensor]) -> None:
        super().__init__()
        self._planner = planner
        self._slots = slots

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._planner.resolve_tensor(read_item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if read_item in self._slots:
            self._slots[read_item].copy_(torch.frombuffer(bytearray(value.getvalue()), dtype=torch.uint8))
        self._planner.load_bytes(read_item, value)


def _in_order(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of a tensor of any strides, counted row by row, as few of its parts."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[first:last]
        return
    row_numel = tensor[0].numel()
    row, end = -(-first // row_numel), last // row_numel
    if row > end:  # within one row
        yield from _in_order(tensor[end], first - end * row_numel, last - end * row_numel)
        return
    if row * row_numel > first:
        yield from _in_order(tensor[row - 1], first - (row - 1) * row_numel, row_numel)
    if end > row:
        yield tensor[row:end]
    if last > end * row_numel:
        yield from _in_order(tensor[end], 0, last - end * row_numel)


def _side_by_side(parts: Sequence[torch.Tensor], buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part, and its place in ``buffer``."""
    at = 0
    for part in parts:
        nbytes = part.numel() * part.element_size()
        yield part, buffer[at : at + nbytes]
        at += nbytes


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> int:
    return crc32(memoryview(tensor.numpy().data))
