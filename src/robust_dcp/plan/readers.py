"""Decides which rank reads what other ranks need, and how the bytes reach them. The coordinator decides.

There are two cases. Replicas need the same boxes, and one of them reads each box for all. And where nodes do not share
the directory of the checkpoint, a rank that sees a file reads for the ranks that do not. In both, a *need* is a box of
a stored item that some ranks want, and some may read: in the first case the ranks that want it, in the second one those
that see its file. This module works on columns, and never reads or sends anything; ``shared_reads`` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.global_plan import by_holders
from robust_dcp.storage.layouts.places import deal, fill_up
from robust_dcp.storage.reading.reads import ON_DEVICE

__all__ = ["BUCKET_NBYTES", "ROUND_NBYTES", "Box", "Needs", "Piece", "ReadShare", "assign_readers", "pieces_of"]

BUCKET_NBYTES: Final = 8 << 20
"""The most bytes that are passed on at once. Smaller items are packed. It is a multiple of every element size."""

ROUND_NBYTES: Final = 64 << 20
"""The most bytes that a rank has on their way at the same time, in either direction."""

_LARGE_NBYTES: Final = 1 << 20
"""Smaller items are assigned in the order of their places. So one rank reads items that are next to each other, in one
read."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A part of a stored item, for a rank that reads it without needing it.

    Attributes:
        file: the relative path of the file.
        name, chunk: the stored item: its key, and the offsets of its chunk.
        offsets, lengths: the part of the stored tensor; both empty for an object.
        dtype: of the tensor that it is read into, such as ``"bfloat16"``; empty for an object.
        nbytes: of the result.
        trusted: whether objects may be of any class.
        copy: tells boxes of one rank that are otherwise equal from each other.
        number: the number of the chunk among those of its tensor; -1 if it is not known. Only a hint.
    """

    file: str
    name: str
    chunk: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str
    nbytes: int
    trusted: bool = False
    copy: int = 0
    number: int = -1


class Needs(msgspec.Struct, frozen=True):
    """What a rank needs and could get from another rank: little-endian columns, ascending by (item, box).

    Attributes:
        node: the number of the rank's node.
        items: int32 ``[n]``, the place of the stored item in ``.metadata``, which is the same on all ranks.
        boxes: uint64 ``[n]``, which part of the item. ``ON_DEVICE`` is set if its bytes stay on devices. The column is
            empty if all values are 0.
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
        groups: sets of ranks that need the same; the ranks ascend.
        transfers: for each the place in ``groups``, the rank that reads, and whether the bytes stay on devices.
        transfer_of: int32 ``[n]``, the transfer of each of the rank's needs; -1 if the rank reads it only for itself.
        buckets: int32 ``[p, 3]``, for each bucket its round, transfer, and number within the transfer. They are in the
            order in which they are passed on.
        any_on_device: whether any transfer of any rank stays on devices.
        to_read: for each transfer of which this rank needs nothing, what it has to read.
        n_rounds: the number of rounds, if ranks read for others what they do not need; all ranks take part in each.
    """

    groups: tuple[tuple[int, ...], ...]
    transfers: tuple[tuple[int, int, bool], ...]
    transfer_of: bytes
    buckets: bytes
    any_on_device: bool
    to_read: dict[int, tuple[Box, ...]] = {}
    n_rounds: int = 0


class Piece(NamedTuple):
    """What a bucket holds: needs ``first`` to ``last`` of a transfer. If it is one, bytes ``begin`` to ``end``."""

    first: int
    last: int
    begin: int
    end: int


def pieces_of(nbytes: Sequence[int], *, cut: bool = True) -> list[Piece]:
    """The buckets of a transfer with needs of ``nbytes`` each. A bucket has several, or a piece of one.

    Args:
        cut: whether a need that is larger than a bucket is cut into pieces.
    """
    pieces: list[Piece] = []
    first, filled = 0, 0
    for number, size in enumerate(nbytes):
        if filled and filled + size > BUCKET_NBYTES:
            pieces.append(Piece(first, number, 0, filled))
            filled = 0
        if cut and size > BUCKET_NBYTES:
            pieces += [
                Piece(number, number + 1, begin, min(size, begin + BUCKET_NBYTES))
                for begin in range(0, size, BUCKET_NBYTES)
            ]
            continue
        if not filled:
            first = number
        filled += size
    if filled:
        pieces.append(Piece(first, len(nbytes), 0, filled))
    return pieces


class _Transfer(NamedTuple):
    """``reader`` reads ``needs`` for all ranks of group ``group``. The needs ascend by (item, box)."""

    group: int
    reader: int
    on_device: bool
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
    needs = _AllNeeds(needs_of_ranks, place_of_item, holders)
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
        for members, readers in needs.by_readers(np.sort(group), ranks):
            reader, load[readers] = _balanced(needs.nbytes[members], load[readers])
            for place, rank in enumerate(readers.tolist()):
                for on_device in (False, True):
                    mine = members[(reader == place) & (needs.on_device[members] == on_device)]
                    if len(mine):
                        transfer_of_need[mine] = len(transfers)
                        transfers.append(_Transfer(len(groups), rank, on_device, needs.as_ranks_sort(mine)))
        groups.append(tuple(ranks.tolist()))
    buckets = _in_rounds(needs, groups, transfers, len(needs_of_ranks))
    any_on_device = any(each.on_device for each in transfers)
    n_rounds = int(buckets[-1, 0]) + 1 if holders is not None and len(buckets) else 0
    shares: list[ReadShare | None] = []
    for rank, of_rank in enumerate(needs.of_rank):
        transfer_of = transfer_of_need[of_rank]
        read = [number for number, each in enumerate(transfers) if each.reader == rank]
        held = np.union1d(transfer_of[transfer_of >= 0], np.array(read, dtype=np.int32)).astype(np.intp)
        if not len(held) and not any_on_device and not n_rounds:
            shares.append(None)
            continue
        # The rank numbers its groups and transfers anew.
        local_transfer: Int32 = np.full(len(transfers) + 1, -1, dtype=np.int32)  # the last entry is for transfer -1
        local_transfer[held] = np.arange(len(held))
        of_held = [transfers[number] for number in held.tolist()]
        local_group = {group: number for number, group in enumerate(sorted({each.group for each in of_held}))}
        own_buckets = buckets[local_transfer[buckets[:, 1]] >= 0].copy()
        own_buckets[:, 1] = local_transfer[own_buckets[:, 1]]
        share = ReadShare(
            groups=tuple(groups[group] for group in local_group),
            transfers=tuple((local_group[each.group], each.reader, each.on_device) for each in of_held),
            transfer_of=local_transfer[transfer_of].astype("<i4").tobytes(),
            buckets=own_buckets.astype("<i4").tobytes(),
            any_on_device=any_on_device,
            to_read={
                number: tuple(needs.boxes[need] for need in each.needs.tolist())
                for number, each in enumerate(of_held)
                if rank not in groups[each.group]
            },
            n_rounds=n_rounds,
        )
        shares.append(share)
    return shares


class _AllNeeds:
    """The distinct needs of all ranks, in the order in which their bytes lie in the files.

    Attributes:
        ranks: int32 ``[K]``, the ranks that need each need, need after need; they ascend within a need.
        starts: int64 ``[G + 1]``, where each need begins in ``ranks``.
        counts, nbytes: int64 ``[G]``.
        is_shared, on_device: bool ``[G]``.
        of_rank: for each rank int64 ``[n]``, the need of each of its rows.
        boxes: each need as a box, if ranks do not see the files.
    """

    def __init__(
        self,
        needs_of_ranks: Sequence[Needs | None],
        place_of_item: Int64 | None,
        holders: Mapping[str, Sequence[int]] | None,
    ) -> None:
        self._holders = holders
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
        self._items, self._boxes = items[order[first]], boxes[order[first]]
        self.on_device = self._boxes >= np.uint64(ON_DEVICE)
        need_of_row = np.empty(len(order), dtype=np.intp)
        need_of_row[order] = need = np.cumsum(differs) - 1
        # A rank that needs something twice, or in another size than others, reads it itself.
        same_rank = ~differs
        same_rank[1:] &= self.ranks[1:] == self.ranks[:-1]
        odd = np.zeros(len(first), dtype=np.bool_)
        odd[need[same_rank]] = True
        odd[need[nbytes[order] != self.nbytes[need]]] = True
        self.is_shared = ((self.counts > 1) | (holders is not None)) & ~odd
        self.of_rank = np.split(need_of_row, np.cumsum(sizes)[:-1])

    def by_readers(self, members: Rows, ranks: Int32) -> Iterator[tuple[Rows, Int32]]:
        """Yield needs of ``ranks`` by the ranks that may read them: (needs, ranks)."""
        if self._holders is None:
            yield members, ranks
            return
        by_readers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for need in members.tolist():
            by_readers[tuple(self._holders[self.boxes[need].file])].append(need)
        for readers, needs in by_readers.items():
            yield np.array(needs, dtype=np.intp), np.array(readers, dtype=np.int32)

    def as_ranks_sort(self, needs: Rows) -> Rows:
        """``needs`` in the order of :class:`Needs`, which all ranks know."""
        return needs[np.lexsort((self._boxes[needs], self._items[needs]))]


def _decoded(
    rank: int, needs: Needs | None, number_of: Mapping[Box, int], n_stored: int
) -> tuple[Int32, npt.NDArray[np.uint64], Int64]:
    if needs is None:
        return np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.int64)
    if needs.unseen:
        items = np.array([number_of[box] for box in needs.unseen], dtype=np.int32)
        nbytes = np.array([box.nbytes for box in needs.unseen], dtype=np.int64)
    else:
        items = np.frombuffer(needs.items, dtype="<i4").astype(np.int32)
        nbytes = np.frombuffer(needs.nbytes, dtype="<i8").astype(np.int64)
    boxes = np.frombuffer(needs.boxes, dtype="<u8").astype(np.uint64) if needs.boxes else np.zeros_like(items, "<u8")
    fits = len(items) == len(nbytes) == len(boxes)
    if needs.unseen:
        fits = fits and bool((np.diff(items) > 0).all())
    if not fits or (len(items) and not (items.min() >= 0 and items.max() < n_stored and nbytes.min() > 0)):
        raise ExchangeError(
            f"the reads of rank {rank} do not fit the checkpoint's {n_stored} stored items", ranks=[rank]
        )
    return items, boxes, nbytes


def _balanced(nbytes: Int64, load: Int64) -> tuple[Rows, Int64]:
    large = nbytes >= _LARGE_NBYTES
    chosen = np.zeros(len(nbytes), dtype=np.intp)
    chosen[large], load = deal(nbytes[large], load)
    if not large.all():
        chosen[~large] = fill_up(nbytes[~large], load)
        np.add.at(load, chosen[~large], nbytes[~large])
    return chosen, load


def _in_rounds(
    needs: _AllNeeds, groups: Sequence[tuple[int, ...]], transfers: Sequence[_Transfer], n_ranks: int
) -> Int32:
    """int32 ``[P, 3]``: round, transfer and number of each bucket. A rank's round is full at ``ROUND_NBYTES``."""
    members = [np.union1d(np.array(groups[each.group]), [each.reader]).astype(np.intp) for each in transfers]
    buckets = [
        (number, transfer_number, piece.end - piece.begin)
        for transfer_number, transfer in enumerate(transfers)
        for number, piece in enumerate(
            pieces_of(needs.nbytes[transfer.needs].tolist(), cut=transfer.reader in groups[transfer.group])
        )
    ]
    buckets.sort()
    round_of = np.zeros(n_ranks, dtype=np.int64)
    filled = np.zeros_like(round_of)
    found = np.empty((len(buckets), 3), dtype=np.int32)
    for row, (number, transfer_number, nbytes) in enumerate(buckets):
        ranks = members[transfer_number]
        current = int(round_of[ranks].max())
        is_used = (round_of[ranks] == current) & (filled[ranks] > 0)
        if (is_used & (filled[ranks] + nbytes > ROUND_NBYTES)).any():
            current += 1
        filled[ranks] = np.where(round_of[ranks] == current, filled[ranks], 0) + nbytes
        round_of[ranks] = current
        found[row] = current, transfer_number, number
    return found[np.argsort(found[:, 0], kind="stable")]
