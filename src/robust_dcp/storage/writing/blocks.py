"""In which blocks the bytes of a rank's files are written. A file is cut at multiples of the block:

    records  |head|====data====|tail|  |head|==data==|tail|  |head|=========data=========|tail|
    blocks   |              0              |              1              |           2

A block is whole pages of the file, and one thread writes it in one call. Small records lie whole in a block, and are
columns of it. A record that crosses the end of a block is cut: each block has a piece of it. A large one is a piece,
too. This is the same in all saves by one plan, so it is kept for the next save.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import PlanConflict
from robust_dcp.names import is_parameter
from robust_dcp.storage.layouts.footer import item_id
from robust_dcp.storage.layouts.places import LARGE_NBYTES, PAGE_NBYTES, Placements
from robust_dcp.storage.layouts.safetensors import ShardHead, StoredTensor
from robust_dcp.storage.records.record import Record, framed_record, raw_record
from robust_dcp.storage.writing.item_source import ItemSource, raise_named
from robust_dcp.structure_cache import Cache

Int64 = npt.NDArray[np.int64]

_HOT_NBYTES = 512 << 10
"""So much is copied before it is checksummed: half of a small second-level cache, so that the checksum finds it there.
"""


class Piece(NamedTuple):
    """What one block has of a record that is large or lies in several blocks.

    Attributes:
        place: the place of the item in the plan.
        record: the bytes around its data.
        start: where the record begins in the file, in bytes.
        begin, end: the piece, in bytes from the start of the file.
    """

    place: int
    record: Record
    start: int
    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether no other block has a piece of the record."""
        return self.end - self.begin == self.record.nbytes

    @property
    def data_range(self) -> tuple[int, int]:
        """The range of the record's data that lies in the piece; an empty one if there is none."""
        data_at, nbytes = self.start + self.record.data_offset, self.record.data_nbytes
        begin = min(max(self.begin - data_at, 0), nbytes)
        return begin, max(min(self.end - data_at, nbytes), begin)


class Block(msgspec.Struct, frozen=True, eq=False):
    """Whole pages of a file: n small records that lie whole in them, and pieces of others.

    Attributes:
        offset: where the block begins in the file, in bytes. All other offsets count from there.
        nbytes: its length. The last page of a file is filled up with zeros.
        pieces: of records that are large or lie in other blocks, too.
        zeros: ranges (begin, end) that no record covers, but for those in ``tails``.
        places: int64 ``[n]``, the places of the small items in the plan.
        records: the bytes around the data of each.
        tails: the bytes behind the data of each: the trailer without its checksum, and a short gap of zeros.
        data_at: int64 ``[n]``, where the data of each begins.
        data_nbytes: int64 ``[n]``.
        checked: int64 ``[m]``, which of the n records hold their CRC-32. The head of a file may hold it instead.
        crc32_at: int64 ``[m, 2]``, where these CRC-32s go: one in the header, one in the trailer.
        runs: how many records are copied before they are checksummed, from front to back: as many as fit into the
            processor's cache.
    """

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]
    zeros: tuple[tuple[int, int], ...]
    places: Int64
    records: tuple[Record, ...]
    tails: tuple[bytes, ...]
    data_at: Int64
    data_nbytes: Int64
    checked: Int64
    crc32_at: Int64
    runs: tuple[int, ...]

    @property
    def all_places(self) -> set[int]:
        """The places of all items in the block."""
        return {*self.places.tolist(), *(piece.place for piece in self.pieces)}


def cut_into_blocks(
    places: Int64,
    starts: Int64,
    records: Sequence[Record],
    *,
    begin: int,
    end: int,
    block_nbytes: int,
    page_nbytes: int,
) -> list[Block]:
    """The blocks of a part of a file. A block without a record is left out: the file has a hole there.

    Args:
        places: int64 ``[n]``, the places of the items in the plan.
        starts: int64 ``[n]``, where the records begin in the file, ascending; an empty record before another one at the
            same place.
        records: the bytes around the data of each.
        begin: where the first block begins.
        end: where the last block ends at most.
        block_nbytes: a multiple of ``page_nbytes``, which is the unit of writes.
    """
    of_records = [(record.nbytes, record.data_offset, record.data_nbytes) for record in records]
    lengths = np.array(of_records, dtype=np.int64).reshape(-1, 3)
    ends = starts + lengths[:, 0]
    behind = np.maximum(ends, starts + 1)  # an empty record lies in the block in which it begins
    blocks = []
    for low in range(begin, end, block_nbytes):
        first = int(np.searchsorted(behind, low, side="right"))
        last = int(np.searchsorted(starts, low + block_nbytes, side="left"))
        if first < last:
            some = slice(first, last)
            high = min(low + block_nbytes, -(-int(ends[last - 1]) // page_nbytes) * page_nbytes)
            blocks.append(_block(places[some], starts[some], lengths[some], records[some], low, high))
    return blocks


def _block(places: Int64, starts: Int64, lengths: Int64, records: Sequence[Record], low: int, high: int) -> Block:
    nbytes, data_offset, data_nbytes = lengths.T
    ends = starts + nbytes
    begins, stops = np.maximum(starts, low), np.minimum(ends, high)
    is_small = (starts >= low) & (ends <= high) & (data_nbytes < LARGE_NBYTES)
    gaps = np.append(begins[1:], high) - stops
    in_tail = is_small & (gaps <= PAGE_NBYTES)
    zeros = [(0, int(begins[0]) - low)] if begins[0] > low else []
    uncovered = np.flatnonzero(~in_tail & (gaps > 0))
    zeros += zip((stops[uncovered] - low).tolist(), (stops + gaps - low)[uncovered].tolist(), strict=True)
    small = np.flatnonzero(is_small)
    of_block = tuple(records[n] for n in small.tolist())
    tails = zip(of_block, np.where(in_tail, gaps, 0)[small].tolist(), strict=True)
    start = starts[small] - low
    data_at = start + data_offset[small]
    with_crc32 = [(n, *record.crc32_at) for n, record in enumerate(of_block) if record.crc32_at]
    checked, crc32_at = np.hsplit(np.array(with_crc32, dtype=np.int64).reshape(-1, 3), [1])
    return Block(
        offset=low,
        nbytes=max(high - low, 0),
        pieces=tuple(
            Piece(int(places[n]), records[n], int(starts[n]), int(begins[n]), int(stops[n]))
            for n in np.flatnonzero(~is_small).tolist()
        ),
        zeros=tuple(zeros),
        places=places[small],
        records=of_block,
        tails=tuple(_tail(record.trailer, gap) for record, gap in tails),
        data_at=data_at,
        data_nbytes=data_nbytes[small],
        checked=checked[:, 0],
        crc32_at=start[checked] + crc32_at,
        runs=tuple(np.unique((data_at + data_nbytes[small]) // _HOT_NBYTES, return_counts=True)[1].tolist()),
    )


@lru_cache(maxsize=4096)
def _tail(trailer: bytes, gap: int) -> bytes:
    """The bytes after a record's data. All records of a kind share one object."""
    return trailer + bytes(gap)


class FileOrder(msgspec.Struct, frozen=True, eq=False):
    """What is written to one file.

    Attributes:
        places, starts, records: the n records of fixed size, as for :func:`cut_into_blocks`.
        items: the :func:`~robust_dcp.storage.layouts.footer.item_id` of each.
        are_parameters: bool ``[n]``.
        blocks: from front to back. There are none if the file has items of variable size: these get their places while
            the file is written, and then the file is cut.
        variable: places in the plan of the items of variable size, ascending. They come after all others.
        variable_items: the ``item_id`` of each.
        head: the head of the file, which is written last; ``None`` if the file has none.
    """

    places: Int64
    starts: Int64
    records: tuple[Record, ...]
    items: tuple[int, ...]
    are_parameters: npt.NDArray[np.bool_]
    blocks: tuple[Block, ...]
    variable: tuple[int, ...]
    variable_items: tuple[int, ...]
    head: ShardHead | None


_ITEM_NBYTES = 300
"""The memory that the order of one item takes, roughly."""

# Entries are immutable. If two saves by one plan run at the same time, an entry may be made twice, which does no harm.
_ORDERS: Cache[tuple[Placements, int, int], tuple[FileOrder, ...]] = Cache(max_nbytes=256 << 20)


def file_orders(
    placements: Placements, source: ItemSource, block_nbytes: int, page_nbytes: int
) -> tuple[FileOrder, ...]:
    """The order of each file. It is made in the first save by a plan, and reused in later ones.

    Args:
        source: gives the expected dtypes and sizes when the order is made. Later saves do not ask again: a plan has one
            dtype and size for each item, and every save checks the data against them.

    Raises:
        PlanConflict: the expected length of an item is not the planned one.
        ValueError: there are more or fewer items than places.
    """
    if len(source) != len(placements.offset):
        raise ValueError(f"expected {len(placements.offset)} items, as many as the plan has places, got {len(source)}")
    key = placements, block_nbytes, page_nbytes
    orders = _ORDERS.get(key)
    if orders is None:
        records = _records(placements, source)
        # An empty record comes before another one at the same place, so that each ends where the next may begin.
        by_offset = np.lexsort((placements.nbytes, placements.offset))
        orders = tuple(
            _order(number, by_offset[placements.file[by_offset] == number], records, placements, source, *key[1:])
            for number in range(placements.n_files)
        )
        if len(placements.variable) < len(placements.offset):  # else another planner planned for this save only
            _ORDERS.put(key, orders, _ITEM_NBYTES * len(source))
    return orders


def _order(
    number: int,
    members: npt.NDArray[np.intp],
    record_of: dict[int, Record],
    placements: Placements,
    source: ItemSource,
    block_nbytes: int,
    page_nbytes: int,
) -> FileOrder:
    """The order of one file, whose ``members`` are places by ascending offset."""

    def ids(places: Sequence[int]) -> tuple[int, ...]:
        return tuple(item_id(source.names[place], source.offsets[place]) for place in places)

    n_variable = int((placements.offset[members] < 0).sum())
    variable, fixed = members[:n_variable].tolist(), members[n_variable:]
    places, starts = fixed.astype(np.int64), placements.offset[fixed]
    records = tuple(record_of[place] for place in fixed.tolist())
    head_nbytes = placements.head_nbytes[number]
    head = None
    if head_nbytes > 0:
        rows = zip(fixed.tolist(), records, starts.tolist(), strict=True)
        tensors = {
            source.names[n]: StoredTensor(record.dtype, record.shape, start, record.nbytes, source.offsets[n])
            for n, record, start in rows
        }
        head = ShardHead(tensors, head_nbytes)
    blocks: list[Block] = []
    if not variable and len(fixed):
        blocks = cut_into_blocks(
            places,
            starts,
            records,
            begin=max(head_nbytes, 0) // page_nbytes * page_nbytes,
            end=placements.file_nbytes[number] + 1,
            block_nbytes=block_nbytes,
            page_nbytes=page_nbytes,
        )
    return FileOrder(
        places,
        starts,
        records,
        ids(fixed.tolist()),
        np.fromiter((is_parameter(source.names[n], record_of[n].dtype) for n in fixed.tolist()), np.bool_, len(fixed)),
        tuple(blocks),
        tuple(variable),
        ids(variable),
        head,
    )


def _records(placements: Placements, source: ItemSource) -> dict[int, Record]:
    """The record of each item of fixed size, by its place. Items of one dtype and size share one."""
    # The layouts have caches of records, too, but these keep only a limited number.
    made: dict[tuple[torch.dtype, torch.Size, bool], Record] = {}
    records: dict[int, Record] = {}
    has_head = [nbytes > 0 for nbytes in placements.head_nbytes]
    place = 0
    try:
        for place, (nbytes, file) in enumerate(zip(placements.nbytes.tolist(), placements.file.tolist(), strict=True)):
            if nbytes < 0:
                continue
            expected = source.expected[place]
            key = None if expected is None else (*expected, has_head[file])
            record = None if key is None else made.get(key)
            if record is None and key is not None:
                record = (raw_record if key[2] else framed_record)(key[0], tuple(key[1]))
            if record is None or key is None or record.nbytes != nbytes:
                name = source.names[place]
                raise PlanConflict(f"the record of {name!r} is not the one that was planned", key=name)
            records[place] = made[key] = record
    except Exception as error:
        raise_named(error, source, place)
    return records
