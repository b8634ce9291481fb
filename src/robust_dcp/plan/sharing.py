"""One read for replicas: of what several ranks of a load need, each byte is read by one and passed on to the others.

Owns the decision whether to, the exchange that deals the reads, and the bytes on their way. Who reads what is
``shared_reads``'s, how tensors travel ``comm.relay``'s. Called by ``api.load``.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Agreement, Channel, GroupMover, Offer, Parcel, Relay, node_of
from robust_dcp.errors import PlanConflict
from robust_dcp.plan.shared_reads import Piece, ReadColumns, ReadShare, deal_reads, pieces_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.common_reads import CommonReads
from robust_dcp.storage.records.checksum import crc32

__all__ = ["SharedReads", "all_have_plans", "deal_out", "node_reads_the_same", "ranks_share", "sharing_offer"]

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


def deal_out(
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
    mover, devices = _device_mover(process_group) if channel.size > 1 else (None, frozenset[str]())
    needed: list[CommonReads] = []

    def tell() -> ReadColumns | None:
        needed.append(reader.common_reads(plan, planner, lambda device: device.type in devices))
        return _columns_of(needed[0], node_of(channel.rank)) if len(needed[0].places) else None

    def deal() -> list[ReadShare | None]:
        return deal_reads(told or [], reader.places_in_files(), across_nodes=reader.options.share_reads is None)

    told = channel.gather(f"load {checkpoint}: reads", tell, ReadColumns)
    share = channel.scatter(f"load {checkpoint}: shares", deal, ReadShare)
    return SharedReads(channel.rank, needed[0], share, mover)


def _device_mover(process_group: dist.ProcessGroup | None) -> tuple[GroupMover | None, frozenset[str]]:
    """What moves tensors from device to device over the group that trains, and between which types of devices."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    # gloo would go by way of the host as well, and the channel's own group has a timeout that names ranks.
    direct = frozenset(device for device, backend in backends.items() if device != "cpu" and backend != "gloo")
    return (GroupMover(group), direct) if direct else (None, direct)


def _columns_of(needed: CommonReads, node: int) -> ReadColumns:
    return ReadColumns(
        node=node,
        items=needed.items.astype("<i4").tobytes(),
        boxes=needed.boxes.astype("<u8").tobytes() if needed.boxes.any() else b"",
        nbytes=needed.nbytes.astype("<i8").tobytes(),
    )


class SharedReads:
    """What one rank gets from others, and what it reads for them.

    Attributes:
        received: int64, places in the plan of the items that another rank reads.
        received_nbytes: of these items.
    """

    def __init__(
        self, rank: int, needed: CommonReads, share: ReadShare | None, move_on_device: GroupMover | None
    ) -> None:
        self._rank = rank
        self._targets = needed.targets
        self._move_on_device = move_on_device
        self._parcels: list[Parcel] = []
        self._contents: list[tuple[npt.NDArray[np.intp], Piece]] = []
        self.received = np.zeros(0, dtype=np.int64)
        self.received_nbytes = 0
        if share is not None:
            self._unpack(share, needed)

    def _unpack(self, share: ReadShare, needed: CommonReads) -> None:
        stream_of = np.frombuffer(share.stream_of, dtype="<i4")
        reader = np.array([reader for _, reader, _ in share.streams] + [self._rank])[stream_of]  # -1: itself
        from_others = reader != self._rank
        self.received = needed.places[from_others]
        self.received_nbytes = int(needed.nbytes[from_others].sum())
        members = [np.flatnonzero(stream_of == number) for number in range(len(share.streams))]
        pieces = [pieces_of(needed.nbytes[each]) for each in members]
        for number_of_round, stream, number in np.frombuffer(share.parcels, dtype="<i4").reshape(-1, 3).tolist():
            group, reader_rank, on_device = share.streams[stream]
            piece = pieces[stream][number]
            ranks = (reader_rank, *(rank for rank in share.groups[group] if rank != reader_rank))
            self._parcels.append(Parcel(number_of_round, ranks, piece.end - piece.begin, on_device))
            self._contents.append((members[stream][piece.first : piece.last], piece))

    def left_to_read(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Those of the plan's ``items`` that this rank reads itself."""
        received = set(self.received.tolist())
        return [item for place, item in enumerate(items) if place not in received]

    def relay(self) -> Relay:
        """For ``Channel.relay``, once this rank has read its share."""
        return Relay(self._parcels, self, _checksum, self._move_on_device)

    def outgoing(self, number: int) -> torch.Tensor:
        """The bytes of a parcel, as ``comm.relay.RelayContents`` says: one piece of a target, or several packed."""
        parts = self._parts(number)
        buffer = self._buffer(number, parts)
        if buffer is parts[0]:
            return buffer
        at = 0
        for part in parts:
            buffer[at : at + len(part)].copy_(part)
            at += len(part)
        return buffer

    def incoming(self, number: int) -> torch.Tensor:
        return self._buffer(number, self._parts(number))

    def arrived(self, number: int, received: torch.Tensor) -> None:
        parts = self._parts(number)
        if len(parts) == 1 and received.data_ptr() == parts[0].data_ptr():
            return
        at = 0
        for part in parts:
            part.copy_(received[at : at + len(part)])
            at += len(part)

    def _parts(self, number: int) -> list[torch.Tensor]:
        members, piece = self._contents[number]
        if len(members) == 1:
            return [self._targets[int(members[0])][piece.begin : piece.end]]
        return [self._targets[member] for member in members.tolist()]

    def _buffer(self, number: int, parts: list[torch.Tensor]) -> torch.Tensor:
        parcel = self._parcels[number]
        if len(parts) == 1 and (parcel.on_device or parts[0].is_cpu):
            return parts[0]
        device = parts[0].device if parcel.on_device else torch.device("cpu")
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=device)


def _checksum(tensor: torch.Tensor) -> int:
    return crc32(memoryview(tensor.numpy().data))
