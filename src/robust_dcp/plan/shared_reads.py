"""Reads for other ranks: a rank reads what several ranks need, or what others cannot see, and passes it on to them.

Replicas on several nodes have each byte read once. And where nodes do not share the directory of the checkpoint, a rank
that sees a file reads it for the ranks that do not; it is asked for only after a load has failed, so a load from a
shared directory pays nothing for it. ``readers`` decides who reads what, and ``comm.relay`` moves the bytes. This
module runs the exchanges in which ranks agree on that, and knows where the bytes are in the tensors of this rank.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Agreement, Bucket, Channel, GroupMover, Offer, Relay, node_of
from robust_dcp.errors import CorruptCheckpoint, PlanConflict, RobustCheckpointError, UnsafeCheckpoint, ranks_in_words
from robust_dcp.plan.readers import BUCKET_NBYTES, Box, Needs, Piece, ReadShare, assign_readers, pieces_of
from robust_dcp.staging import flat_bytes, parts_in_order
from robust_dcp.storage.committing.save import NodeOfSave
from robust_dcp.storage.files.paths import writer_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.reads import Read, is_plain, may_ask_early, target_of
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.objects import ObjectBytes

__all__ = [
    "SharedReads",
    "all_have_plans",
    "find_elsewhere",
    "node_reads_the_same",
    "ranks_share",
    "ranks_with_metadata",
    "share_reads",
    "sharing_offer",
]

logger = logging.getLogger(__name__)

_SHOWN: Final = 8
_NOTHING: Final = Offer().plan_id

_CAN: Final = 1
_WISHES: Final = {True: 2, False: 4, None: 8}
"""Flags of an offer. A rank without any of them reads by itself."""


def sharing_offer(share_reads: bool | None, rank: int, items: Sequence[ReadItem], *, can_share: bool) -> Offer:
    """The offer of a rank with a ``RobustReader(share_reads=…)``.

    Args:
        rank: this process's rank in the group.
        items: everything that it reads. Equal items in the same order give the same offer.
        can_share: whether its planner lets other ranks fill its tensors.

    Raises:
        ValueError: the environment variable for nodes has a value without meaning.
    """
    flags = _WISHES[share_reads] | (_CAN if can_share else 0)
    return Offer(plan_id=_digest(items), value=node_of(rank), flags=flags)


def all_have_plans(agreement: Agreement) -> bool:
    """Whether all ranks have made a :func:`sharing_offer`. A rank that offers nothing has no index to plan by."""
    return sum(agreement.count(wish) for wish in _WISHES.values()) == agreement.n_ranks


def node_reads_the_same(agreement: Agreement) -> bool:
    """Whether the ranks of a node read exactly the same, as in data parallel training.

    This is known if all ranks of the load read the same, and several of them are on this node.
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
    """Whether this load reads once for all replicas. The answer is the same on all ranks.

    With ``share_reads=None`` it does so if the ranks are on several nodes. Ranks on one node read through one page
    cache or from one drive, which is faster than passing bytes on (docs/performance.md).

    Args:
        agreement: the combined offers of all ranks.

    Raises:
        PlanConflict: the ranks have different values of ``share_reads``. The error names the first rank of each.
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


class _Needed(NamedTuple):
    """What a rank needs and may get from another rank: for each need the place of its item in the plan, the tensor that
    it goes to (``None`` for an object), and its size.

    ``elsewhere`` has the places of the items that this rank cannot read by itself.
    """

    places: Sequence[int]
    targets: Sequence[torch.Tensor | None]
    nbytes: Sequence[int]
    elsewhere: Collection[int] = ()


def share_reads(
    channel: Channel,
    checkpoint: str,
    reader: RobustReader,
    plan: LoadPlan,
    planner: LoadPlanner,
    process_group: dist.ProcessGroup | None,
) -> SharedReads:
    """Agree on who reads what several ranks need.

    Args:
        checkpoint: the name in the names of phases.
        plan: this rank's plan, made with the metadata that ``reader`` has.
        process_group: the ranks that load together. This group moves bytes between devices.

    Raises:
        RobustCheckpointError: the same on all ranks.
    """
    device_type = _type_of_devices(process_group) if channel.size > 1 else None
    needed: list[_Needed] = []

    def tell() -> Needs | None:
        found = reader.sharable_reads(plan, planner, lambda device: device.type == device_type)
        needed.append(_Needed(found.places.tolist(), found.targets, found.nbytes.tolist()))
        if not len(found.places):
            return None
        return Needs(
            node=node_of(channel.rank),
            items=found.items.astype("<i4").tobytes(),
            boxes=found.boxes.astype("<u8").tobytes() if found.boxes.any() else b"",
            nbytes=found.nbytes.astype("<i8").tobytes(),
        )

    def assign() -> list[ReadShare | None]:
        across_nodes = reader.options.share_reads is None
        return assign_readers(told or [], reader.places_in_files(), across_nodes=across_nodes)

    told = channel.gather(f"load {checkpoint}: reads", tell, Needs)
    share = channel.scatter(f"load {checkpoint}: readers", assign, ReadShare)
    mover = None
    if device_type is not None and share is not None and share.any_on_device:
        mover = GroupMover(dist.group.WORLD if process_group is None else process_group, device_type)
    return SharedReads(channel.rank, reader, plan.items, needed[0], share, mover)


def _type_of_devices(process_group: dist.ProcessGroup | None) -> str | None:
    """The type of device between which the training group moves bytes directly: ``"cuda"`` for NCCL; ``None`` for
    gloo."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    # gloo also copies through the host, but its errors do not name ranks. The channel's own connections do that.
    direct = (device for device, backend in backends.items() if device != "cpu" and backend != "gloo")
    return next(direct, None)


class _Committed(msgspec.Struct, frozen=True):
    """The digest of the ``.metadata`` that a rank sees; empty if it sees none."""

    fit: bytes


def ranks_with_metadata(channel: Channel, checkpoint: str, reader: RobustReader) -> list[int]:
    """For each ``.metadata`` that some rank sees, the first rank that sees it; the coordinator comes first."""
    told = channel.all_gather(
        f"load {checkpoint}: who has .metadata", lambda: _Committed(reader.source.fit()), _Committed
    )
    first: dict[bytes, int] = {}
    for rank in sorted(range(channel.size), key=lambda rank: rank != channel.coordinator_rank):
        if told[rank].fit:
            first.setdefault(told[rank].fit, rank)
    return list(first.values())


class _Files(msgspec.Struct, frozen=True):
    """Names of data files."""

    names: tuple[str, ...]


class _Seen(msgspec.Struct, frozen=True):
    """For each of some files, whether a rank sees it."""

    are_here: tuple[bool, ...]


class _Verdict(msgspec.Struct, frozen=True):
    """Whether there is something to fetch."""

    is_elsewhere: bool


def find_elsewhere(
    channel: Channel, checkpoint: str, reader: RobustReader, plan: LoadPlan, planner: LoadPlanner
) -> SharedReads | None:
    """Agree on who reads what for ranks that do not see it.

    Args:
        plan: this rank's plan, made with the metadata that ``reader`` has.

    Returns:
        ``None`` on all ranks if no rank misses a file, or if no other node is known that could have it.

    Raises:
        CorruptCheckpoint: no rank of the load sees a file that is needed. The error names the files, the nodes that
            wrote them, and the keys in them. Or an item that lies elsewhere can only be read by the rank that needs it.
        RobustCheckpointError: the same on all ranks.
    """
    phase = f"load {checkpoint}"
    reads: list[Read] = []

    def miss() -> _Files:
        reads.extend(reader.places_of(plan))
        return _Files(tuple(reader.missing_files({read.relative_path for read in reads})))

    missing = channel.all_gather(f"{phase}: missing files", miss, _Files)
    wanted = sorted({name for each in missing for name in each.names})
    if not wanted:
        return None

    def see() -> _Seen:
        lacks = set(reader.missing_files(wanted))
        return _Seen(tuple(name not in lacks for name in wanted))

    seen = channel.gather(f"{phase}: who has them", see, _Seen)
    holders: dict[str, list[int]] = {}

    def judge() -> _Verdict:
        for place, name in enumerate(wanted):
            holders[name] = [rank for rank, each in enumerate(seen or []) if each is not None and each.are_here[place]]
        lost = [name for name in wanted if not holders[name]]
        nodes = reader.nodes()
        if len(lost) == len(wanted) and not nodes:
            return _Verdict(is_elsewhere=False)  # one directory, from which a file is gone
        if lost:
            ranks = [rank for rank, each in enumerate(missing) if not set(lost).isdisjoint(each.names)]
            raise _lost(reader, lost, ranks, nodes)
        return _Verdict(is_elsewhere=True)

    if not channel.broadcast(f"{phase}: are they elsewhere", judge, _Verdict).is_elsewhere:
        return None
    needed: list[_Needed] = []

    def ask() -> Needs | None:
        boxes, of_rank = _unseen(reader, planner, reads, set(missing[channel.rank].names))
        needed.append(of_rank)
        return Needs(unseen=boxes) if boxes else None

    needs = channel.gather(f"{phase}: wanted parts", ask, Needs)
    share = channel.scatter(f"{phase}: parts to read", lambda: assign_readers(needs or [], holders=holders), ReadShare)
    if channel.is_coordinator:
        logger.info("%s: %d of its files are read by ranks on other nodes", checkpoint, len(wanted))
    return SharedReads(channel.rank, reader, plan.items, needed[0], share)


def _unseen(
    reader: RobustReader, planner: LoadPlanner, reads: Sequence[Read], missing: Collection[str]
) -> tuple[tuple[Box, ...], _Needed]:
    """What this rank needs of files that it does not see: as boxes, and where they go.

    Raises:
        CorruptCheckpoint: an item can only be read by this rank itself.
    """
    rows: dict[Box, tuple[int, torch.Tensor | None]] = {}
    elsewhere = [place for place, read in enumerate(reads) if read.relative_path in missing]

    def add(box: Box, place: int, target: torch.Tensor | None) -> None:
        while box in rows:
            box = msgspec.structs.replace(box, copy=box.copy + 1)
        rows[box] = place, target

    for place in elsewhere:
        read = reads[place]
        if read.transforms or not may_ask_early(planner):
            why = "was saved through a transform" if read.transforms else f"is filled by {type(planner).__name__}"
            raise CorruptCheckpoint(
                f"{read.relative_path}, which holds item {read.name!r}, lies on another node, and the item {why}: only "
                "the rank that needs it can read it; copy the files of all nodes into one directory and load that",
                file=read.relative_path,
                item=read.name,
                expected="a file in this rank's directory",
                found="a file on another node",
            )
        index = read.item.storage_index
        file, name, chunk = read.relative_path, index.fqn, tuple(index.offset or ())
        number = -1 if index.index is None else index.index
        if read.item.type == LoadItemType.BYTE_IO:
            add(Box(file, name, chunk, (), (), "", read.nbytes, reader.options.trusted, number=number), place, None)
            continue
        target = target_of(planner, read.item, early=True)
        if not target.numel():
            continue
        # A tensor that is no plain memory is filled by ``copy_``, which takes all of it at once.
        whole = ((0,) * target.dim(), tuple(target.shape))
        dtype = str(target.dtype).removeprefix("torch.")
        for offsets, lengths in _parts_of(target.shape, target.element_size()) if is_plain(target) else [whole]:
            part = target
            for axis, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
                part = part.narrow(axis, first, length)
            stored = tuple(a + b for a, b in zip(read.item.storage_offsets, offsets, strict=True))
            nbytes = part.numel() * part.element_size()
            add(Box(file, name, chunk, stored, lengths, dtype, nbytes, number=number), place, part)
    boxes = tuple(sorted(rows))
    places, targets = [rows[box][0] for box in boxes], [rows[box][1] for box in boxes]
    return boxes, _Needed(places, targets, [box.nbytes for box in boxes], frozenset(elsewhere))


def _parts_of(lengths: Sequence[int], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into parts of at most ``BUCKET_NBYTES``: the offsets and lengths of each."""
    nbytes = itemsize
    for length in lengths:
        nbytes *= length
    if nbytes <= BUCKET_NBYTES:
        yield (0,) * len(lengths), tuple(lengths)
        return
    axis = next(axis for axis, length in enumerate(lengths) if length > 1)
    rows = max(1, BUCKET_NBYTES // (nbytes // lengths[axis]))
    for first in range(0, lengths[axis], rows):
        some = [*lengths]
        some[axis] = min(rows, lengths[axis] - first)
        for offsets, part in _parts_of(some, itemsize):
            yield (*offsets[:axis], first + offsets[axis], *offsets[axis + 1 :]), part


def _lost(
    reader: RobustReader, lost: Sequence[str], ranks: Sequence[int], nodes: Sequence[NodeOfSave]
) -> RobustCheckpointError:
    """The error for files that no rank of the load sees."""
    keys = reader.keys_in(lost)
    files = ", ".join(f"{name}{_written_on(name, nodes)}" for name in lost[:_SHOWN])
    return CorruptCheckpoint(
        f"{reader.path} has its files on several nodes, and {len(lost)} of them are on no node of this load: {files}"
        f"{_more(lost)}. They are wanted by {ranks_in_words(ranks)} and hold parts of {len(keys)} keys: "
        f"{', '.join(map(repr, keys[:_SHOWN]))}{_more(keys)}. Load with a rank on each node that has files, copy the "
        "files of all nodes into one directory, or take another checkpoint",
        file=lost[0],
        item=keys[0] if keys else None,
        expected="the file on a node of this load",
        found="none",
    )


def _more(things: Collection[str]) -> str:
    return f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""


def _written_on(name: str, nodes: Sequence[NodeOfSave]) -> str:
    writer = writer_of(name)
    host = next((node.host for node in nodes if writer is not None and writer.rank in node.ranks), None)
    return "" if host is None or writer is None else f" (written by rank {writer.rank} on {host})"


class SharedReads:
    """What one rank reads for others, and what it gets from them.

    Args:
        items: everything that this rank needs.
        needed: what of that other ranks may read.
        share: what the coordinator has decided; ``None`` if this rank has nothing to do with others.
        move_on_device: moves bytes between devices.
    """

    def __init__(
        self,
        rank: int,
        reader: RobustReader,
        items: Sequence[ReadItem],
        needed: _Needed,
        share: ReadShare | None,
        move_on_device: GroupMover | None = None,
    ) -> None:
        self._rank = rank
        self._reader = reader
        self._items = items
        self._needed = needed
        self._move_on_device = move_on_device
        self._n_rounds = 0 if share is None else share.n_rounds
        self._objects: dict[int, torch.Tensor] = {}
        self._buckets: list[Bucket] = []
        self._contents: list[tuple[Sequence[int], Piece | None]] = []
        self._to_read: dict[int, Sequence[Box]] = {}
        self._read: dict[int, list[torch.Tensor]] = {}
        self._first = 0
        self._received: set[int] = set(needed.elsewhere)
        if share is not None:
            self._unpack(share)

    def _unpack(self, share: ReadShare) -> None:
        """Find out what each bucket holds: needs of this rank (or a piece of one), or what it only reads."""
        needed = self._needed
        transfer_of = np.frombuffer(share.transfer_of, dtype="<i4")
        reader = np.array([reader for _, reader, _ in share.transfers] + [self._rank])[transfer_of]  # -1: this rank
        self._received.update(needed.places[number] for number in np.flatnonzero(reader != self._rank).tolist())
        for number in np.flatnonzero(transfer_of >= 0).tolist():
            if needed.targets[number] is None:
                self._objects[number] = torch.empty(needed.nbytes[number], dtype=torch.uint8)
        members = [np.flatnonzero(transfer_of == number).tolist() for number in range(len(share.transfers))]
        are_needed = [reader in share.groups[group] for group, reader, _ in share.transfers]  # by their reader
        pieces = [
            pieces_of(
                [box.nbytes for box in share.to_read[number]]
                if number in share.to_read
                else [needed.nbytes[each] for each in members[number]],
                cut=are_needed[number],
            )
            for number in range(len(share.transfers))
        ]
        for number_of_round, transfer, number in np.frombuffer(share.buckets, dtype="<i4").reshape(-1, 3).tolist():
            group, reader_rank, on_device = share.transfers[transfer]
            piece = pieces[transfer][number]
            ranks = (reader_rank, *(rank for rank in share.groups[group] if rank != reader_rank))
            if transfer in share.to_read:
                self._to_read[len(self._buckets)] = share.to_read[transfer][piece.first : piece.last]
            self._buckets.append(Bucket(number_of_round, ranks, piece.end - piece.begin, on_device))
            self._contents.append(
                (members[transfer][piece.first : piece.last], piece if are_needed[transfer] else None)
            )

    @property
    def received(self) -> list[ReadItem]:
        """The items that other ranks read for this one."""
        return [self._items[place] for place in sorted(self._received)]

    def read(self, planner: LoadPlanner) -> None:
        """Read everything that no other rank reads for this one."""
        left = self._items
        if self._received:
            left = [item for place, item in enumerate(self._items) if place not in self._received]
        # The bytes of objects that other ranks need are kept.
        slots = {self._items[self._needed.places[number]]: slot for number, slot in self._objects.items()}
        self._reader.read_data(LoadPlan(left), _ObjectsKept(planner, slots) if slots else planner).wait()  # type: ignore[arg-type]

    def share(self, channel: Channel, phase: str, check_stop: Callable[[int, int], None]) -> None:
        """Pass on what this rank has read, and get what others have. All ranks call this together.

        Where ranks read for others what they do not need, each round is read just before it is passed on, so that the
        memory for what is on its way is bounded, however much a rank lacks.

        Raises:
            RobustCheckpointError: the same on all ranks.
        """
        if not self._n_rounds:
            channel.relay(phase, Relay(self._buckets, self, _checksum_of, self._move_on_device))
        for number in range(self._n_rounds):
            self._first = sum(bucket.round < number for bucket in self._buckets)  # they are in the order of rounds
            buckets = [bucket for bucket in self._buckets if bucket.round == number]
            channel.barrier(f"{phase}: read for other nodes", partial(self._read_for_others, len(buckets), check_stop))
            channel.relay(phase, Relay(buckets, self, _checksum_of))
            self._read.clear()

    def _read_for_others(self, n_buckets: int, check_stop: Callable[[int, int], None]) -> None:
        """Read what this rank passes on in a round without needing it."""
        targets: list[torch.Tensor] = []
        items: list[ReadItem] = []
        for number in range(self._first, self._first + n_buckets):
            for box in self._to_read.get(number, ()):
                if self._reader.options.trusted and not box.dtype and not box.trusted:
                    raise UnsafeCheckpoint(
                        f"rank {self._rank} loads with trusted=True, and reads {box.name!r} for ranks that do not; "
                        "pass the same to RobustReader on all ranks",
                        file=box.file,
                        what=f"{box.name!r}, unchecked",
                    )
                dtype = getattr(torch, box.dtype) if box.dtype else torch.uint8
                items.append(_item_of(box, len(targets)))
                targets.append(torch.empty(box.lengths if box.dtype else box.nbytes, dtype=dtype))
                self._read.setdefault(number, []).append(targets[-1])
        if items:
            with self._reader.checking(check_stop):
                self._reader.read_data(LoadPlan(items), _IntoTargets(targets)).wait()

    def load_objects(self, planner: LoadPlanner, directory: str) -> None:
        """Pass the objects that came from other ranks to ``planner``."""
        for number, slot in self._objects.items():
            place = self._needed.places[number]
            if place in self._received:
                planner.load_bytes(self._items[place], ObjectBytes(slot.numpy().tobytes(), directory))

    # Where the bytes of a bucket are (``comm.relay.RelayContents``). Buckets are counted from the first of the round.

    def outgoing(self, number: int) -> torch.Tensor:
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
            if part.is_contiguous() and is_plain(part):
                flat_bytes(part).copy_(where)
            else:
                flat = torch.empty(part.shape, dtype=part.dtype, device=part.device)
                flat_bytes(flat).copy_(where)
                part.copy_(flat)

    def _parts(self, number: int) -> list[torch.Tensor]:
        """The tensors that a bucket holds, or the parts of one tensor."""
        number += self._first
        if number in self._read:
            return self._read[number]
        members, piece = self._contents[number]
        if len(members) == 1 and piece is not None:
            whole = self._tensor(members[0])
            size = whole.element_size()
            return list(parts_in_order(whole, piece.begin // size, piece.end // size))
        return [self._tensor(member) for member in members]

    def _tensor(self, number: int) -> torch.Tensor:
        target = self._needed.targets[number]
        return self._objects[number] if target is None else target

    def _buffer(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where a bucket's bytes are while they travel. This is their target itself, if it can be sent from there."""
        bucket, first = self._buckets[self._first + number], parts[0]
        if len(parts) == 1 and is_plain(first) and first.is_contiguous() and (bucket.on_device or first.is_cpu):
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


def _item_of(box: Box, number: int) -> ReadItem:
    offset = torch.Size(box.chunk) if box.dtype or box.chunk else None
    return ReadItem(
        type=LoadItemType.TENSOR if box.dtype else LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(str(number)),  # for the planner below
        dest_offsets=torch.Size((0,) * len(box.lengths)),
        storage_index=MetadataIndex(box.name, offset, None if box.number < 0 else box.number),
        storage_offsets=torch.Size(box.offsets),
        lengths=torch.Size(box.lengths),
    )


class _IntoTargets(DefaultLoadPlanner):
    """Reads boxes into tensors."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._targets[int(read_item.dest_index.fqn)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.resolve_tensor(read_item).copy_(torch.frombuffer(value.getbuffer(), dtype=torch.uint8))


def _checksum_of(tensor: torch.Tensor) -> int:
    return crc32(memoryview(tensor.numpy().data))
