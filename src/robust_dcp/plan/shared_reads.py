"""Reads for other ranks: a rank reads what several ranks need, or what others cannot see, and passes it on to them.

Replicas on several nodes have each byte read once. And where nodes do not share the directory of the checkpoint, a rank
that sees a file reads it for the ranks that do not; it is asked for only after a load has failed, so a load from a
shared directory pays nothing for it. Both are one thing. A *need* is a part of a stored item that some ranks want and
some may read: in the first case those that want it, in the second one those that see its file. The coordinator gives
each need a reader (:func:`assign_readers`), and ``comm.relay`` moves the bytes in buckets.
"""

from __future__ import annotations

import hashlib
import io
import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Agreement, Bucket, Channel, Offer, Relay
from robust_dcp.environment import node_of
from robust_dcp.errors import (
    CorruptCheckpoint,
    ExchangeError,
    PlanConflict,
)
from robust_dcp.nodes.files import find_files
from robust_dcp.plan.global_plan import by_holders
from robust_dcp.staging.blocks import BlockLease, flat_bytes, is_plain, parts_in_order
from robust_dcp.storage.index.stored_index import index_of
from robust_dcp.storage.layouts.places import Places, deal, fill_up
from robust_dcp.storage.options import ranks_on_this_node
from robust_dcp.storage.pieces import boxes_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.comparing import Comparison
from robust_dcp.storage.reading.reads import PlannedItems, Read, item_name, may_ask_early, reads_of, target_of
from robust_dcp.storage.records.objects import ObjectBytes, check_object

logger = logging.getLogger(__name__)

BUCKET_NBYTES: Final = 8 << 20
"""The most bytes that are passed on at once. Smaller items are packed. It is a multiple of every element size."""

ROUND_NBYTES: Final = 64 << 20
"""The most bytes that a rank has on their way at the same time, in either direction."""

_LARGE_NBYTES: Final = 1 << 20
"""Smaller items are assigned in the order of their places. So one rank reads items that are next to each other, in one
read."""

_NOTHING: Final = Offer().same

_CAN: Final = 1
WISHES: Final = {True: 2, False: 4, None: 8}
"""Flags of an offer. A rank that offers none of them has no index to plan by."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]


# Whether ranks share their reads.


def sharing_offer(share_reads: bool | None, rank: int, items: Sequence[ReadItem], *, can_share: bool) -> Offer:
    """The offer of a rank with a ``RobustReader(share_reads=…)``.

    Args:
        rank: this process's rank in the group.
        items: everything that it reads. Equal items in the same order give the same offer.
        can_share: whether its planner lets other ranks fill its tensors.

    Raises:
        ValueError: the environment variable for nodes has a value without meaning.
    """
    flags = WISHES[share_reads] | (_CAN if can_share else 0)
    if not items:
        return Offer(value=node_of(rank), flags=flags)
    planned = PlannedItems.of(items)
    parts = (planned.names, planned.kinds, planned.kind_of.tobytes(), planned.others)
    encoded = msgspec.msgpack.encode(parts, enc_hook=str)  # a dtype is its name
    digest = hashlib.blake2b(encoded, digest_size=len(_NOTHING)).digest()
    return Offer(same=digest, value=node_of(rank), flags=flags)


def node_reads_the_same(agreement: Agreement) -> bool:
    """Whether the ranks of a node read exactly the same, as in data parallel training.

    This is known if all ranks of the load read the same, and several of them are on this node.
    """
    if agreement.n_ranks == 1 or not agreement.is_same or agreement.same == _NOTHING:
        return False
    return agreement.same_value or ranks_on_this_node() > 1


def ranks_share(agreement: Agreement) -> bool:
    """Whether this load reads once for all replicas. The answer is the same on all ranks.

    With ``share_reads=None`` it does so if the ranks are on several nodes. Ranks on one node read through one page
    cache or from one drive, which is faster than passing bytes on (docs/performance.md).

    Args:
        agreement: the combined offers of all ranks.

    Raises:
        PlanConflict: the ranks have different values of ``share_reads``. The error names the first rank of each.
    """
    wishes = {wish: agreement.first_rank(flag) for wish, flag in WISHES.items() if agreement.count(flag)}
    if len(wishes) > 1:
        words = ", ".join(
            f"{wish} on rank {rank}" for wish, rank in sorted(wishes.items(), key=lambda each: each[1] or 0)
        )
        raise PlanConflict(
            f"share_reads is {words}; pass the same to RobustReader on all ranks of a load",
            key="share_reads",
            ranks=sorted(rank for rank in wishes.values() if rank is not None),
        )
    if agreement.n_ranks == 1 or agreement.count(_CAN) < agreement.n_ranks:
        return False
    return True in wishes or (None in wishes and not agreement.same_value)


# What ranks need, and who reads it.


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A part of a stored item, for a rank that reads it without needing it.

    Attributes:
        file: the relative path of the file.
        name, chunk: the stored item: its key, and the offsets of its chunk.
        offsets, lengths: the part of the stored tensor; both empty for an object.
        dtype: of the tensor that it is read into, such as ``"bfloat16"``; empty for an object.
        nbytes: of the result.
        copy: tells boxes of one rank that are otherwise equal from each other.
    """

    file: str
    name: str
    chunk: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str
    nbytes: int
    copy: int = 0

    def read_item(self, place: int) -> ReadItem:
        """The item that reads this box. ``place`` tells items of equal boxes from each other."""
        offset = torch.Size(self.chunk) if self.dtype or self.chunk else None
        return ReadItem(
            type=LoadItemType.TENSOR if self.dtype else LoadItemType.BYTE_IO,
            dest_index=MetadataIndex(str(place)),
            dest_offsets=torch.Size((0,) * len(self.lengths)),
            storage_index=MetadataIndex(self.name, offset),
            storage_offsets=torch.Size(self.offsets),
            lengths=torch.Size(self.lengths),
        )


class Needs(msgspec.Struct, frozen=True):
    """What a rank needs and could get from another rank: little-endian columns, ascending by (item, box).

    Attributes:
        node: the number of the rank's node.
        items: int32 ``[n]``, the place of the stored item in ``.metadata``, which is the same on all ranks.
        boxes: uint64 ``[n]``, which part of the item: 0 for all of it as it is stored, else a hash.
        nbytes: int64 ``[n]``, how many bytes are to be filled.
        unseen: in the place of the columns, if the rank does not see the files: the boxes, ascending.
    """

    node: int = 0
    items: bytes = b""
    boxes: bytes = b""
    nbytes: bytes = b""
    unseen: tuple[Box, ...] = ()


class ReadShare(msgspec.Struct, frozen=True):
    """What the coordinator tells one rank. A transfer is what one rank reads for one set of ranks.

    Attributes:
        groups: by number, sets of ranks that need the same; the ranks ascend.
        transfers: by number: the number of the group, and the rank that reads.
        transfer_of: int32 ``[n]``, the transfer of each of the rank's needs; -1 if the rank reads it only for itself.
        buckets: int64 ``[p, 6]``, in the order in which they are passed on: round, transfer, the first need of the
            transfer that the bucket holds and the end of these needs, and the first byte and the end of these bytes. A
            bucket holds several whole needs, or some bytes of one.
        to_read: for each transfer of which this rank needs nothing, what it has to read.
    """

    groups: dict[int, tuple[int, ...]] = {}
    transfers: dict[int, tuple[int, int]] = {}
    transfer_of: bytes = b""
    buckets: bytes = b""
    to_read: dict[int, tuple[Box, ...]] = {}


class _Transfer(NamedTuple):
    """``reader`` reads ``needs`` for all ranks of group ``group``. The needs ascend by (item, box)."""

    group: int
    reader: int
    needs: Rows


def assign_readers(
    needs_of_ranks: Sequence[Needs | None],
    place_of_item: Int64 | None = None,
    holders: Mapping[str, Sequence[int]] | None = None,
    *,
    across_nodes: bool = False,
) -> list[ReadShare | None]:
    """Choose readers, and return a share for each rank.

    Readers are chosen so that all ranks read about the same number of bytes, including what only one rank needs.

    Args:
        needs_of_ranks: what each rank needs; ``None`` for a rank that shares nothing.
        place_of_item: int64, where each stored item lies; it ascends with the file and the place in the file.
        holders: in the place of that, if ranks do not see the files of what they need: the ranks that see each file.
        across_nodes: if true, ranks that are all on one node share nothing.

    Returns:
        The shares in rank order; ``None`` for a rank that has nothing to do with others.

    Raises:
        ExchangeError: a rank's columns do not fit together.
    """
    needs = _AllNeeds(needs_of_ranks, place_of_item, is_unseen=holders is not None)
    load = np.zeros(len(needs_of_ranks), dtype=np.int64)
    if holders is None:
        alone = needs.counts == 1
        np.add.at(load, needs.ranks[needs.starts[:-1][alone]], needs.nbytes[alone])
    nodes = [0 if each is None else each.node for each in needs_of_ranks]
    groups: list[tuple[int, ...]] = []
    transfers: list[_Transfer] = []
    transfer_of_need = np.full(len(needs.counts), -1, dtype=np.int32)
    for group, ranks in by_holders(needs.ranks, needs.starts, np.flatnonzero(needs.is_shared)):
        if across_nodes and len({nodes[rank] for rank in ranks.tolist()}) == 1:
            load[ranks] += needs.nbytes[group].sum()
            continue
        by_readers: dict[tuple[int, ...], Any] = {tuple(ranks.tolist()): np.sort(group)}
        if holders is not None:
            by_readers = defaultdict(list)
            for need in np.sort(group).tolist():
                by_readers[tuple(holders[needs.boxes[need].file])].append(need)
        for readers, members in by_readers.items():
            members, some = np.array(members, dtype=np.intp), np.array(readers, dtype=np.intp)
            nbytes = needs.nbytes[members]
            large, reader = nbytes >= _LARGE_NBYTES, np.zeros(len(members), dtype=np.intp)
            reader[large], load[some] = deal(nbytes[large], load[some])
            if not large.all():
                reader[~large] = fill_up(nbytes[~large], load[some])
                np.add.at(load, some[reader[~large]], nbytes[~large])
            for place, rank in enumerate(readers):
                mine = members[reader == place]
                if len(mine):
                    transfer_of_need[mine] = len(transfers)
                    mine = mine[np.lexsort((needs.box[mine], needs.item[mine]))]  # as in `Needs`
                    transfers.append(_Transfer(len(groups), rank, mine))
        groups.append(tuple(ranks.tolist()))
    buckets = _in_rounds(needs.nbytes, groups, transfers, len(needs_of_ranks))
    read_by: dict[int, list[int]] = defaultdict(list)
    for number, transfer in enumerate(transfers):
        read_by[transfer.reader].append(number)
    share_of: dict[tuple[bytes, bytes], ReadShare | None] = {}  # replicas get one and the same share
    shares: list[ReadShare | None] = []
    for rank, of_rank in enumerate(needs.of_rank):
        transfer_of = transfer_of_need[of_rank]
        held = np.unique(np.append(transfer_of[transfer_of >= 0], np.array(read_by[rank], dtype=np.int32)))
        key = transfer_of.tobytes(), held.tobytes()
        if key not in share_of and not len(held):
            share_of[key] = None
        elif key not in share_of:
            of_held = {number: transfers[number] for number in held.tolist()}
            share_of[key] = ReadShare(
                groups={each.group: groups[each.group] for each in of_held.values()},
                transfers={number: each[:2] for number, each in of_held.items()},
                transfer_of=transfer_of.astype("<i4").tobytes(),
                buckets=buckets[np.isin(buckets[:, 1], held)].astype("<i8").tobytes(),
                to_read={
                    number: tuple(needs.boxes[need] for need in each.needs.tolist())
                    for number, each in of_held.items()
                    if rank not in groups[each.group]
                },
            )
        shares.append(share_of[key])
    return shares


class _AllNeeds:
    """The distinct needs of all ranks, in the order in which their bytes lie in the files.

    Attributes:
        ranks: int32 ``[K]``, the ranks that need each need, need after need; they ascend within a need.
        starts: int64 ``[G + 1]``, where each need begins in ``ranks``.
        counts, nbytes: int64 ``[G]``.
        item, box: as in :class:`Needs`.
        is_shared: bool ``[G]``.
        of_rank: for each rank int64 ``[n]``, the need of each of its rows.
        boxes: each need as a box, if ranks do not see the files.
    """

    def __init__(self, needs_of_ranks: Sequence[Needs | None], place_of_item: Int64 | None, *, is_unseen: bool) -> None:
        self.boxes = sorted({box for each in needs_of_ranks if each is not None for box in each.unseen})
        number_of = {box: number for number, box in enumerate(self.boxes)}
        place_of_item = np.arange(len(self.boxes)) if place_of_item is None else place_of_item
        rows = [_decoded(rank, each, number_of, len(place_of_item)) for rank, each in enumerate(needs_of_ranks)]
        sizes = [len(items) for items, _, _ in rows]
        ranks = np.repeat(np.arange(len(rows), dtype=np.int32), sizes)
        items, boxes, nbytes = (np.concatenate([row[column] for row in rows]) for column in range(3))
        order = np.lexsort((ranks, boxes, place_of_item[items]))
        differs = np.ones(len(order), dtype=np.bool_)
        differs[1:] = (items[order[1:]] != items[order[:-1]]) | (boxes[order[1:]] != boxes[order[:-1]])
        first = np.flatnonzero(differs)
        self.ranks = ranks[order]
        self.starts = np.append(first, len(order)).astype(np.intp)
        self.counts = np.diff(self.starts)
        self.nbytes = nbytes[order[first]]
        self.item, self.box = items[order[first]], boxes[order[first]]
        need_of_row = np.empty(len(order), dtype=np.intp)
        need_of_row[order] = need = np.cumsum(differs) - 1
        # A rank that needs something twice, or in another size than others, reads it itself.
        same_rank = ~differs
        same_rank[1:] &= self.ranks[1:] == self.ranks[:-1]
        odd = np.zeros(len(first), dtype=np.bool_)
        odd[need[same_rank]] = True
        odd[need[nbytes[order] != self.nbytes[need]]] = True
        self.is_shared = ((self.counts > 1) | is_unseen) & ~odd
        self.of_rank = np.split(need_of_row, np.cumsum(sizes)[:-1])


def _decoded(
    rank: int, needs: Needs | None, number_of: Mapping[Box, int], n_stored: int
) -> tuple[Int32, npt.NDArray[np.uint64], Int64]:
    """The columns of what ``rank`` needs: items, boxes, nbytes."""
    needs = needs or Needs()
    items = np.frombuffer(needs.items, dtype="<i4").astype(np.int32)
    nbytes = np.frombuffer(needs.nbytes, dtype="<i8").astype(np.int64)
    boxes = np.frombuffer(needs.boxes, dtype="<u8").astype(np.uint64)
    is_sorted = True
    if needs.unseen:
        items = np.array([number_of[box] for box in needs.unseen], dtype=np.int32)
        nbytes = np.array([box.nbytes for box in needs.unseen], dtype=np.int64)
        boxes, is_sorted = np.zeros(len(items), dtype=np.uint64), bool((np.diff(items) > 0).all())
    fits = is_sorted and len(items) == len(nbytes) == len(boxes)
    if not fits or (len(items) and not (items.min() >= 0 and items.max() < n_stored and nbytes.min() > 0)):
        raise ExchangeError(
            f"the reads of rank {rank} do not fit the checkpoint's {n_stored} stored items", ranks=[rank]
        )
    return items, boxes, nbytes


def _in_rounds(nbytes: Int64, groups: Sequence[tuple[int, ...]], transfers: Sequence[_Transfer], n_ranks: int) -> Int64:
    """The buckets of all transfers, as in :class:`ReadShare`. A rank's round is full at ``ROUND_NBYTES``."""
    members = [np.union1d(np.array(groups[each.group]), [each.reader]).astype(np.intp) for each in transfers]
    buckets = [
        (number, transfer_number, *piece)
        for transfer_number, transfer in enumerate(transfers)
        for number, piece in enumerate(
            # What a rank reads without needing it is cut already.
            _pieces_of(nbytes[transfer.needs].tolist(), cut=transfer.reader in groups[transfer.group])
        )
    ]
    buckets.sort()
    round_of = np.zeros(n_ranks, dtype=np.int64)
    filled = np.zeros_like(round_of)
    placed = np.empty((len(buckets), 6), dtype=np.int64)
    for row, (_, transfer_number, *piece) in enumerate(buckets):
        ranks, bucket_nbytes = members[transfer_number], piece[3] - piece[2]
        current = int(round_of[ranks].max())
        is_used = (round_of[ranks] == current) & (filled[ranks] > 0)
        if (is_used & (filled[ranks] + bucket_nbytes > ROUND_NBYTES)).any():
            current += 1
        filled[ranks] = np.where(round_of[ranks] == current, filled[ranks], 0) + bucket_nbytes
        round_of[ranks] = current
        placed[row] = current, transfer_number, *piece
    return placed[np.argsort(placed[:, 0], kind="stable")]


def _pieces_of(nbytes: Sequence[int], *, cut: bool) -> Iterator[tuple[int, int, int, int]]:
    """What the buckets of a transfer with needs of ``nbytes`` each hold: first need, end, first byte, end.

    Args:
        cut: whether a need that is larger than a bucket is cut into pieces.
    """
    first, filled = 0, 0
    for number, size in enumerate(nbytes):
        if filled and filled + size > BUCKET_NBYTES:
            yield first, number, 0, filled
            filled = 0
        if cut and size > BUCKET_NBYTES:
            for begin in range(0, size, BUCKET_NBYTES):
                yield number, number + 1, begin, min(size, begin + BUCKET_NBYTES)
            continue
        if not filled:
            first = number
        filled += size
    if filled:
        yield first, len(nbytes), 0, filled


# The exchanges in which ranks agree on it.


class _Needed(NamedTuple):
    """What a rank needs and may get from another rank: for each need the place of its item in the plan, the tensor that
    it goes to (``None`` for an object), and its size.

    ``elsewhere`` has the places of the items that this rank cannot read by itself. Then ``boxes`` has the part of the
    stored item that each need is.
    """

    places: Sequence[int]
    targets: Sequence[torch.Tensor | None]
    nbytes: Sequence[int]
    elsewhere: Collection[int] = ()
    boxes: Sequence[Box] = ()


def share_reads(
    channel: Channel, checkpoint: str, reader: RobustReader, plan: LoadPlan, planner: LoadPlanner
) -> SharedReads:
    """Agree on who reads what several ranks need.

    Args:
        checkpoint: the name in the names of phases.
        plan: this rank's plan, made with the metadata that ``reader`` has.

    Raises:
        RobustCheckpointError: the same on all ranks.
    """

    def find() -> tuple[list[Any], _Needed]:
        index = index_of(reader.metadata)
        number_of: Callable[[MetadataIndex], int | None] = (
            {stored: number for number, stored in enumerate(reader.metadata.storage_data or {})}.get
            if index is None
            else index.row
        )
        rows: list[tuple[Any, int, torch.Tensor | None, int]] = []
        reads = reads_of(plan.items, reader.metadata, reader.path)
        for place, read, target in _that_others_may_read(enumerate(reads), planner):
            number = number_of(read.item.storage_index)
            if target is None and read.nbytes:
                rows.append(((number, 0), place, None, read.nbytes))
            elif target is not None and is_plain(target):
                box = _number_of_box(read, target)
                rows.append(((number, box), place, target, target.numel() * target.element_size()))
        return _in_order(rows)

    def message(keys_and_needs: tuple[list[Any], _Needed]) -> Needs | None:
        keys, needed = keys_and_needs
        if not keys:
            return None
        items, boxes = zip(*keys, strict=True)
        return Needs(
            node=node_of(channel.rank),
            items=np.array(items, dtype="<i4").tobytes(),
            boxes=np.array(boxes, dtype="<u8").tobytes(),
            nbytes=np.array(needed.nbytes, dtype="<i8").tobytes(),
        )

    def assign() -> list[ReadShare | None]:
        across_nodes = reader.options.share_reads is None
        return assign_readers(needs or [], _places_in_files(reader.metadata), across_nodes=across_nodes)

    (_, needed), needs = channel.gather(f"load {checkpoint}: reads", find, Needs, message=message)
    _, share = channel.scatter(f"load {checkpoint}: readers", assign, ReadShare)
    return SharedReads(channel.rank, reader, plan.items, needed, share)


def _that_others_may_read(
    reads: Iterable[tuple[int, Read]], planner: LoadPlanner
) -> Iterator[tuple[int, Read, torch.Tensor | None]]:
    """Find what another rank may read for this one: tensors and objects, each with the tensor that it is read into,
    ``None`` for an object.

    A rank reads two kinds of items for itself: those where the planner has to be called for each item, and those that
    were stored through a transform.
    """
    for place, read in reads if may_ask_early(planner) else ():
        target = None if read.item.type == LoadItemType.BYTE_IO else target_of(planner, read.item, early=True)
        if not read.transforms and (target is None or target.numel()):
            yield place, read, target


def _in_order(
    rows: list[tuple[Any, int, torch.Tensor | None, int]], elsewhere: Collection[int] = ()
) -> tuple[list[Any], _Needed]:
    """The keys of some needs, sorted, and the needs in that order. Each row has a key and what :class:`_Needed` has."""
    rows.sort(key=lambda row: row[:2])
    keys, places, targets, nbytes = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
    return keys, _Needed(places, targets, nbytes, elsewhere)


def _number_of_box(read: Read, target: torch.Tensor) -> int:
    """A number of 64 bits for the part of a stored item that is read and for the target's dtype.

    It is 0 if the whole item is read in its stored dtype.
    """
    if read.is_whole and target.dtype == read.dtype:
        return 0
    offsets, lengths = read.item.storage_offsets, read.item.lengths
    encoded = struct.pack(f"<{2 * len(offsets)}q", *offsets, *lengths) + str(target.dtype).encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") or 1


def _places_in_files(metadata: Metadata) -> Int64:
    """The place of each stored item when all are sorted by file and offset: int64 ``[n]``."""
    index = index_of(metadata)
    if index is None:
        infos: list[Any] = list((metadata.storage_data or {}).values())
        where = np.array([(info.offset, info.length) for info in infos], dtype=np.int64).reshape(-1, 2).T
        at = Places([info.relative_path for info in infos], np.arange(len(infos)), *where)
    else:
        at = index.places(np.arange(index.n_rows))
    places: Int64 = np.empty(len(at.file), dtype=np.int64)
    places[at.sorted()[0]] = np.arange(len(places))
    return places


def find_elsewhere(
    channel: Channel, checkpoint: str, reader: RobustReader, plan: LoadPlan, planner: LoadPlanner, source: int
) -> SharedReads | None:
    """Agree on who reads what for ranks that do not see it.

    Args:
        plan: this rank's plan, made with the metadata that ``reader`` has.
        source: a rank that sees the ``.metadata`` that is loaded.

    Returns:
        ``None`` on all ranks if no rank has missed a file, or if no other node is known that could have it.

    Raises:
        CorruptCheckpoint: no rank of the load sees a file that is needed. The error names the files, the nodes that
            wrote them, and the keys in them. Or an item that lies elsewhere can only be read by the rank that needs it.
        RobustCheckpointError: the same on all ranks.
    """
    phase = f"load {checkpoint}"

    @cache
    def reads() -> list[Read]:  # in an exchange, so that all ranks hear of an error
        return reads_of(plan.items, reader.metadata, reader.path)

    elsewhere = find_files(channel, phase, reader, lambda: {read.relative_path for read in reads()}, source)
    if elsewhere is None:
        return None
    if not elsewhere.holders:
        return SharedReads(channel.rank, reader, plan.items, _Needed((), (), ()), None)
    (_, needed), needs = channel.gather(
        f"{phase}: wanted parts",
        lambda: _unseen(planner, reads(), elsewhere.missing),
        Needs,
        message=lambda boxes_and_needs: Needs(unseen=boxes_and_needs[0]) if boxes_and_needs[0] else None,
    )
    _, share = channel.scatter(
        f"{phase}: parts to read", lambda: assign_readers(needs or [], holders=elsewhere.holders), ReadShare
    )
    if channel.is_coordinator:
        logger.info("%s: %d of its files are read by ranks on other nodes", checkpoint, len(elsewhere.holders))
    return SharedReads(channel.rank, reader, plan.items, needed, share, getattr(planner, "comparison", None))


def _unseen(planner: LoadPlanner, reads: Sequence[Read], missing: Collection[str]) -> tuple[tuple[Box, ...], _Needed]:
    """What this rank needs of the ``missing`` files, which it does not see: as boxes, and where they go.

    Raises:
        CorruptCheckpoint: an item can only be read by this rank itself.
    """
    elsewhere = {place: read for place, read in enumerate(reads) if read.relative_path in missing}
    for read in elsewhere.values():
        if read.transforms or not may_ask_early(planner):
            name = item_name(read.item)
            why = "was saved through a transform" if read.transforms else f"is filled by {type(planner).__name__}"
            raise CorruptCheckpoint(
                f"{read.relative_path}, which holds item {name!r}, lies on another node, and the item {why}: only "
                "the rank that needs it can read it; copy the files of all nodes into one directory and load that",
                file=read.relative_path,
                item=name,
                expected="a file in this rank's directory",
                found="a file on another node",
            )
    rows: list[tuple[Any, int, torch.Tensor | None, int]] = []
    n_equal: Counter[Box] = Counter()

    def add(box: Box, place: int, part: torch.Tensor | None) -> None:
        rows.append((msgspec.structs.replace(box, copy=n_equal[box]), place, part, box.nbytes))
        n_equal[box] += 1

    for place, read, target in _that_others_may_read(elsewhere.items(), planner):
        index = read.item.storage_index
        file, name, chunk = read.relative_path, index.fqn, tuple(index.offset or ())
        if target is None:
            add(Box(file, name, chunk, (), (), "", read.nbytes), place, None)
            continue
        # A tensor that is no plain memory is filled by ``copy_``, which takes all of it at once.
        most = BUCKET_NBYTES // target.element_size() if is_plain(target) else target.numel()
        for offsets, lengths in boxes_of(tuple(target.shape), most):
            part = target[tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))]
            stored = tuple(a + b for a, b in zip(read.item.storage_offsets, offsets, strict=True))
            dtype, nbytes = str(target.dtype).removeprefix("torch."), part.numel() * part.element_size()
            add(Box(file, name, chunk, stored, lengths, dtype, nbytes), place, part)
    boxes, needed = _in_order(rows, elsewhere.keys())
    return tuple(boxes), needed._replace(boxes=boxes)


# Reading, and passing on.


class SharedReads:
    """What one rank reads for others, and what it gets from them.

    Args:
        items: everything that this rank needs.
        needed: what of that other ranks may read.
        share: what the coordinator has decided; ``None`` if this rank has nothing to do with others.
        comparison: compare what others have read with its target, in the place of filling that.
    """

    def __init__(
        self,
        rank: int,
        reader: RobustReader,
        items: Sequence[ReadItem],
        needed: _Needed,
        share: ReadShare | None,
        comparison: Comparison | None = None,
    ) -> None:
        self._rank = rank
        self._reader = reader
        self._items = items
        share = share or ReadShare()
        self._received: set[int] = set(needed.elsewhere)
        self._objects: dict[int, torch.Tensor] = {}  # by the place of the item
        self._buckets: list[Bucket] = []
        self._parts: list[list[torch.Tensor]] = []  # of each bucket: the tensors that it holds, or the parts of one
        self._compared: list[list[ReadItem]] = []  # and what each of them is of the checkpoint, if it is compared
        self._comparison = comparison
        self._to_read: dict[int, Sequence[Box]] = {}
        self._check_stop: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None
        # Find out what each bucket holds: needs of this rank (or a piece of one), or what it only reads.
        transfer_of = np.frombuffer(share.transfer_of, dtype="<i4")
        members = {number: np.flatnonzero(transfer_of == number).tolist() for number in share.transfers}
        for number, (_, reader_rank) in share.transfers.items():
            if reader_rank != self._rank:
                self._received.update(needed.places[need] for need in members[number])
        targets = list(needed.targets)
        for number in np.flatnonzero(transfer_of >= 0).tolist():
            if targets[number] is None:
                targets[number] = slot = torch.empty(needed.nbytes[number], dtype=torch.uint8)
                self._objects[needed.places[number]] = slot
        for row in np.frombuffer(share.buckets, dtype="<i8").reshape(-1, 6).tolist():
            number_of_round, transfer, first, last, begin, end = row
            group, reader_rank = share.transfers[transfer]
            ranks = (reader_rank, *(rank for rank in share.groups[group] if rank != reader_rank))
            if transfer in share.to_read:
                self._to_read[len(self._buckets)] = share.to_read[transfer][first:last]
            self._buckets.append(Bucket(number_of_round, ranks, end - begin))
            numbers = members[transfer][first:last]
            parts: list[Any] = [targets[number] for number in numbers]
            if comparison is not None:
                places = [(items[needed.places[number]], needed.boxes[number].offsets) for number in numbers]
                self._compared.append([replace(item, storage_offsets=torch.Size(at)) for item, at in places])
            if len(parts) == 1 and reader_rank in share.groups[group]:  # it may be cut
                size = parts[0].element_size()
                parts = list(parts_in_order(parts[0], begin // size, end // size))
            self._parts.append(parts)

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
        slots = {self._items[place]: slot for place, slot in self._objects.items()}
        self._reader.read_data(LoadPlan(left), _IntoSlots(slots, planner) if slots else planner).wait()  # type: ignore[arg-type]

    def share(self, channel: Channel, phase: str, check_stop: Callable[[int, int], None]) -> None:
        """Pass on what this rank has read, and get what others have. All ranks call this together.

        What a rank passes on without needing it, it reads just before that, so that the memory for what is on its way
        is bounded, however much other ranks lack.

        Raises:
            RobustCheckpointError: the same on all ranks.
        """
        self._check_stop = check_stop
        with closing(BlockLease(BUCKET_NBYTES, 1, of_load=True)) as self._blocks:
            channel.relay(phase, Relay(self._buckets, self.outgoing, self.incoming, self.arrived))

    def load_objects(self, planner: LoadPlanner, directory: str) -> None:
        """Pass the objects that came from other ranks to ``planner``.

        Raises:
            UnsafeCheckpoint, CorruptCheckpoint: as for an object that this rank has read.
        """
        for place, slot in self._objects.items():
            if place in self._received:
                item, data = self._items[place], ObjectBytes(slot.numpy().tobytes(), directory)
                if not self._reader.options.trusted:  # the rank that read it may trust the checkpoint
                    check_object(data, file=directory, item=item.dest_index.fqn)
                planner.load_bytes(item, data)

    # The functions of a relay.

    def outgoing(self, number: int) -> torch.Tensor:
        parts = self._parts[number]
        if number in self._to_read:
            slots: dict[ReadItem, torch.Tensor] = {}
            for box in self._to_read[number]:
                dtype = getattr(torch, box.dtype) if box.dtype else torch.uint8
                slots[box.read_item(len(slots))] = torch.empty(box.lengths if box.dtype else box.nbytes, dtype=dtype)
            with self._reader.checking(self._check_stop):
                self._reader.read_data(LoadPlan(list(slots)), _IntoSlots(slots)).wait()
            parts = list(slots.values())
        buffer = _buffer_for(self._buckets[number], parts)
        if len(parts) > 1 or buffer.data_ptr() != parts[0].data_ptr():
            for part, where in _side_by_side(parts, buffer):
                where.copy_(flat_bytes(part))
        return buffer

    def incoming(self, number: int) -> torch.Tensor:
        if self._comparison is not None:
            return torch.empty(self._buckets[number].nbytes, dtype=torch.uint8)
        return _buffer_for(self._buckets[number], self._parts[number])

    def arrived(self, number: int, received: torch.Tensor) -> None:
        parts = self._parts[number]
        if len(parts) == 1 and received.data_ptr() == parts[0].data_ptr():
            return
        for place, (part, where) in enumerate(_side_by_side(parts, received)):
            # torch views only memory that is aligned as elements of another dtype.
            aligned = where if where.storage_offset() % part.itemsize == 0 else where.clone()
            stored = aligned.view(part.dtype).view(part.shape)
            item = self._compared[number][place] if self._comparison is not None else None
            if self._comparison is None or item is None or item.type == LoadItemType.BYTE_IO:
                self._blocks.fill_from(stored, part)
            else:
                self._comparison.add_tensor(item, part, stored)


class _IntoSlots(DefaultLoadPlanner):
    """Reads items into tensors of their own, objects as their bytes.

    Args:
        planner: gets everything, and has the targets of tensors. Its ``commit_tensor`` is not called; it must have
            stock's, which does nothing.
    """

    def __init__(self, slots: Mapping[ReadItem, torch.Tensor], planner: LoadPlanner | None = None) -> None:
        super().__init__()
        self._slots = slots
        self._planner = planner
        self.comparison: Comparison | None = getattr(planner, "comparison", None)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._slots[read_item] if self._planner is None else self._planner.resolve_tensor(read_item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if read_item in self._slots:
            self._slots[read_item].copy_(torch.frombuffer(value.getbuffer(), dtype=torch.uint8))
        if self._planner is not None:
            self._planner.load_bytes(read_item, value)


def _buffer_for(bucket: Bucket, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where a bucket's bytes are while they travel. This is their target itself, if it can be sent from there."""
    first = parts[0]
    if len(parts) == 1 and is_plain(first) and first.is_contiguous() and first.is_cpu:
        return flat_bytes(first)
    return torch.empty(bucket.nbytes, dtype=torch.uint8)


def _side_by_side(parts: Sequence[torch.Tensor], buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part with its place in ``buffer``, one after the other."""
    at = 0
    for part in parts:
        nbytes = part.numel() * part.element_size()
        yield part, buffer[at : at + nbytes]
        at += nbytes
