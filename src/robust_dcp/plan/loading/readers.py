"""Decides which rank reads what several ranks need, and how the bytes reach the others. The coordinator decides.

This module owns the messages, the choice of readers by bytes, and the rounds in which their bytes are passed on. It
works on columns, and never reads or sends anything. ``plan.loading.sharing`` calls it.

Ranks need the same if they read the same box of the same stored item into the same dtype. All ranks have the same bytes
of metadata, so the place of an item in the metadata identifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.global_plan import by_holders
from robust_dcp.storage.layouts.balance import deal, fill_up
from robust_dcp.storage.reading.sharable_reads import ON_DEVICE

__all__ = ["BUCKET_NBYTES", "ROUND_NBYTES", "Piece", "ReadColumns", "ReadShare", "assign_readers", "pieces_of"]

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


class ReadColumns(msgspec.Struct, frozen=True):
    """What a rank needs and could get from another rank: little-endian columns, ascending by (item, box).

    Attributes:
        node: the number of the rank's node.
        items: int32 ``[n]``, the place of the stored item in ``.metadata``.
        boxes: uint64 ``[n]``, which part of the item. ``ON_DEVICE`` is set if its bytes stay on devices. The column is
            empty if all values are 0.
        nbytes: int64 ``[n]``, how many bytes are to be filled.
    """

    node: int
    items: bytes
    boxes: bytes
    nbytes: bytes


class ReadShare(msgspec.Struct, frozen=True):
    """What the coordinator tells one rank. A transfer is what one rank reads for one set of ranks.

    Attributes:
        groups: sets of ranks that need the same; the ranks ascend.
        transfers: for each the place in ``groups``, the rank that reads, and whether the bytes stay on devices.
        transfer_of: int32 ``[n]``, the transfer of each of the rank's items; -1 if the rank reads the item only for
            itself.
        buckets: int32 ``[p, 3]``, for each bucket its round, transfer, and number within the transfer. They are in the
            order in which they are passed on.
        any_on_device: whether any transfer of any rank stays on devices.
    """

    groups: tuple[tuple[int, ...], ...]
    transfers: tuple[tuple[int, int, bool], ...]
    transfer_of: bytes
    buckets: bytes
    any_on_device: bool


class Piece(NamedTuple):
    """What a bucket holds: items ``first`` to ``last`` of a transfer. If it is one item, bytes ``begin`` to ``end``."""

    first: int
    last: int
    begin: int
    end: int


def pieces_of(nbytes: Int64) -> list[Piece]:
    """The buckets of a transfer with items of ``nbytes`` each. A bucket has several items, or a piece of one."""
    pieces: list[Piece] = []
    first, filled = 0, 0
    for number, size in enumerate(nbytes.tolist()):
        if filled and filled + size > BUCKET_NBYTES:
            pieces.append(Piece(first, number, 0, filled))
            filled = 0
        if size > BUCKET_NBYTES:
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
    columns: Sequence[ReadColumns | None], place_of_item: Int64, *, across_nodes: bool = False
) -> list[ReadShare | None]:
    """Choose readers, and return a share for each rank.

    One rank reads what several ranks need. Readers are chosen so that all ranks read about the same number of bytes,
    including what only one rank needs.

    Args:
        columns: what each rank needs; ``None`` for a rank that shares nothing.
        place_of_item: int64, where each stored item lies; it ascends with the file and the place in the file.
        across_nodes: if true, ranks that are all on one node share nothing.

    Returns:
        The shares in rank order; ``None`` for a rank that has nothing in common with others.

    Raises:
        ExchangeError: a rank's columns do not fit together.
    """
    needs = _Needs(columns, place_of_item)
    load = np.zeros(len(columns), dtype=np.int64)
    alone = needs.counts == 1
    np.add.at(load, needs.ranks[needs.starts[:-1][alone]], needs.nbytes[alone])
    nodes = [0 if each is None else each.node for each in columns]
    groups: list[tuple[int, ...]] = []
    transfers: list[_Transfer] = []
    transfer_of_need = np.full(len(needs.counts), -1, dtype=np.int32)
    for members, ranks in by_holders(needs.ranks, needs.starts, np.flatnonzero(needs.is_shared)):
        if across_nodes and len({nodes[rank] for rank in ranks.tolist()}) == 1:
            load[ranks] += needs.nbytes[members].sum()
            continue
        members = np.sort(members)
        reader, load[ranks] = _balanced(needs.nbytes[members], load[ranks])
        for place, rank in enumerate(ranks.tolist()):
            for on_device in (False, True):
                mine = members[(reader == place) & (needs.on_device[members] == on_device)]
                if len(mine):
                    transfer_of_need[mine] = len(transfers)
                    transfers.append(_Transfer(len(groups), rank, on_device, needs.as_ranks_sort(mine)))
        groups.append(tuple(ranks.tolist()))
    rounds = _in_rounds(needs, groups, transfers)
    plan = _Plan(groups, transfers, transfer_of_need, rounds, any(each.on_device for each in transfers))
    return [_share_of(rank, needs, plan) for rank in range(len(columns))]


class _Plan(NamedTuple):
    """The parts of :class:`ReadShare` for all ranks. ``transfer_of_need`` is -1 for what each rank reads for itself."""

    groups: Sequence[tuple[int, ...]]
    transfers: Sequence[_Transfer]
    transfer_of_need: Int32
    buckets: Int32
    any_on_device: bool


class _Needs:
    """The distinct needs of all ranks, in the order in which their bytes lie in the files.

    Attributes:
        ranks: int32 ``[K]``, the ranks that need each need, need after need; they ascend within a need.
        starts: int64 ``[G + 1]``, where each need begins in ``ranks``.
        counts, nbytes: int64 ``[G]``.
        is_shared, on_device: bool ``[G]``.
        of_rank: for each rank int64 ``[n]``, the need of each of its items.
    """

    def __init__(self, columns: Sequence[ReadColumns | None], place_of_item: Int64) -> None:
        rows = [_decoded(rank, each, len(place_of_item)) for rank, each in enumerate(columns)]
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
        self.is_shared = (self.counts > 1) & ~odd
        self.of_rank = np.split(need_of_row, np.cumsum(sizes)[:-1])

    def as_ranks_sort(self, needs: Rows) -> Rows:
        """``needs`` in the order of :class:`ReadColumns`, which all ranks know."""
        return needs[np.lexsort((self._boxes[needs], self._items[needs]))]


def _decoded(rank: int, columns: ReadColumns | None, n_stored: int) -> tuple[Int32, npt.NDArray[np.uint64], Int64]:
    if columns is None:
        return np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.int64)
    items = np.frombuffer(columns.items, dtype="<i4").astype(np.int32)
    nbytes = np.frombuffer(columns.nbytes, dtype="<i8").astype(np.int64)
    boxes = (
        np.frombuffer(columns.boxes, dtype="<u8").astype(np.uint64) if columns.boxes else np.zeros_like(items, "<u8")
    )
    fits = len(items) == len(nbytes) == len(boxes)
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


def _in_rounds(needs: _Needs, groups: Sequence[tuple[int, ...]], transfers: Sequence[_Transfer]) -> Int32:
    """int32 ``[P, 3]``: round, transfer and number of each bucket. A rank's round is full at ``ROUND_NBYTES``."""
    buckets = [
        (number, transfer_number, piece.end - piece.begin)
        for transfer_number, transfer in enumerate(transfers)
        for number, piece in enumerate(pieces_of(needs.nbytes[transfer.needs]))
    ]
    buckets.sort()
    members = [np.array(group, dtype=np.intp) for group in groups]
    round_of = np.zeros(int(needs.ranks.max(initial=0)) + 1, dtype=np.int64)
    filled = np.zeros_like(round_of)
    found = np.empty((len(buckets), 3), dtype=np.int32)
    for row, (number, transfer_number, nbytes) in enumerate(buckets):
        ranks = members[transfers[transfer_number].group]
        current = int(round_of[ranks].max())
        if ((round_of[ranks] == current) & (filled[ranks] + nbytes > ROUND_NBYTES)).any():
            current += 1
        filled[ranks] = np.where(round_of[ranks] == current, filled[ranks], 0) + nbytes
        round_of[ranks] = current
        found[row] = current, transfer_number, number
    return found[np.argsort(found[:, 0], kind="stable")]


def _share_of(rank: int, needs: _Needs, plan: _Plan) -> ReadShare | None:
    """The part of the plan that one rank has to know. It numbers its groups and transfers anew."""
    transfer_of = plan.transfer_of_need[needs.of_rank[rank]]
    held = np.unique(transfer_of[transfer_of >= 0])
    if not len(held) and not plan.any_on_device:
        return None
    local_transfer = np.full(len(plan.transfers) + 1, -1, dtype=np.int32)  # the last entry is for transfer -1
    local_transfer[held] = np.arange(len(held))
    transfers = [plan.transfers[number] for number in held.tolist()]
    groups = sorted({transfer.group for transfer in transfers})
    local_group = {group: number for number, group in enumerate(groups)}
    buckets = plan.buckets[local_transfer[plan.buckets[:, 1]] >= 0].copy()
    buckets[:, 1] = local_transfer[buckets[:, 1]]
    return ReadShare(
        groups=tuple(plan.groups[number] for number in groups),
        transfers=tuple((local_group[each.group], each.reader, each.on_device) for each in transfers),
        transfer_of=local_transfer[transfer_of].astype("<i4").tobytes(),
        buckets=buckets.astype("<i4").tobytes(),
        any_on_device=plan.any_on_device,
    )
