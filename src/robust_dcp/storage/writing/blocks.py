"""In which blocks the bytes of a rank's files are written. A file is cut at multiples of the block:

    records  |head|====data====|tail|  |head|==data==|tail|  |head|=========data=========|tail|
    blocks   |              0              |              1              |           2

A block is whole pages of the file, and one thread writes it in one call. Most records lie whole in a block. One that
crosses the end of a block is cut: each block has a piece of it. This is the same in all saves by one plan, so it is
kept for the next save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import PlanConflict
from robust_dcp.storage.layouts import PlacedTensor
from robust_dcp.storage.layouts.footer import item_id
from robust_dcp.storage.layouts.places import LARGE_NBYTES, PAGE_NBYTES, Placements
from robust_dcp.storage.layouts.safetensors import ShardHead
from robust_dcp.storage.records.record import Record, framed_record, raw_record
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors
from robust_dcp.structure_cache import CACHE, Table

__all__ = ["Block", "Cut", "FileOrder", "cut_into_blocks", "file_orders"]

Int64 = npt.NDArray[np.int64]

_HOT_NBYTES = 512 << 10
"""So much is copied before it is checksummed: half of a small second-level cache, so that the checksum finds it there.
"""


class Cut(NamedTuple):
    """A piece of a record that lies in several blocks.

    Attributes:
        place: the place of the item in the plan.
        frame: the bytes around its data.
        start: where the record begins in the file, in bytes.
        begin, end: the piece, in bytes from the start of the file.
    """

    place: int
    frame: Record
    start: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Block:
    """Whole pages of a file: n records that lie whole in them, and pieces of others.

    Attributes:
        offset: where the block begins in the file, in bytes. All other offsets count from there.
        nbytes: its length. The last page of a file is filled up with zeros.
        cuts: the pieces of records that lie in other blocks, too.
        zeros: ranges (begin, end) that no record covers, but for those in ``tails``.
        places: int64 ``[n]``, the places of the whole items in the plan.
        frames: the bytes around the data of each.
        tails: the bytes behind the data of each: the trailer without its checksum, and a short gap of zeros.
        payload: int64 ``[n]``, where the data of each begins.
        payload_nbytes: int64 ``[n]``.
        checked: int64 ``[m]``, which of the n records hold their CRC-32. The head of a file may hold it instead.
        crc: int64 ``[m, 2]``, where these CRC-32s go: one in the header, one in the trailer.
        runs: how many records are copied before they are checksummed, from front to back: as many as fit into the
            processor's cache.
        large: which of the n records have so much data that it may be written from the tensor itself.
    """

    offset: int
    nbytes: int
    cuts: tuple[Cut, ...]
    zeros: tuple[tuple[int, int], ...]
    places: Int64
    frames: tuple[Record, ...]
    tails: tuple[bytes, ...]
    payload: Int64
    payload_nbytes: Int64
    checked: Int64
    crc: Int64
    runs: tuple[int, ...]
    large: tuple[int, ...]


def cut_into_blocks(
    places: Int64,
    starts: Int64,
    frames: Sequence[Record],
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
        frames: of each record.
        begin: where the first block begins.
        end: where the last block ends at most.
        block_nbytes: a multiple of ``page_nbytes``, which is the unit of writes.
    """
    ends = starts + np.array([frame.nbytes for frame in frames], dtype=np.int64)
    behind = np.maximum(ends, starts + 1)  # an empty record lies in the block in which it begins
    blocks = []
    for low in range(begin, end, block_nbytes):
        high = low + block_nbytes
        first = int(np.searchsorted(behind, low, side="right"))
        last = int(np.searchsorted(starts, high, side="left"))
        if first < last:
            stop = min(high, -(-int(ends[last - 1]) // page_nbytes) * page_nbytes)
            blocks.append(_block(places, starts, ends, frames, first, last, low, stop))
    return blocks


def _block(
    places: Int64,
    starts: Int64,
    ends: Int64,
    frames: Sequence[Record],
    first: int,
    last: int,
    low: int,
    high: int,
) -> Block:
    begins, stops = np.maximum(starts[first:last], low), np.minimum(ends[first:last], high)
    is_whole = (starts[first:last] >= low) & (ends[first:last] <= high)
    gaps = np.append(begins[1:], high) - stops
    in_tail = is_whole & (gaps <= PAGE_NBYTES)
    zeros = [(0, int(begins[0]) - low)] if begins[0] > low else []
    uncovered = np.flatnonzero(~in_tail & (gaps > 0))
    zeros += zip((stops[uncovered] - low).tolist(), (stops + gaps - low)[uncovered].tolist(), strict=True)
    cuts = tuple(
        Cut(int(places[n]), frames[n], int(starts[n]), int(begins[n - first]), int(stops[n - first]))
        for n in (first + np.flatnonzero(~is_whole)).tolist()
    )
    whole = np.flatnonzero(is_whole)
    numbers = (first + whole).tolist()
    of_block = tuple(frames[n] for n in numbers)
    header = np.array([frame.data_offset for frame in of_block], dtype=np.int64)
    payload_nbytes = np.array([frame.data_nbytes for frame in of_block], dtype=np.int64)
    start = starts[numbers] - low
    checked = np.array([n for n, frame in enumerate(of_block) if frame.crc32_at], dtype=np.int64)
    crc = np.array([of_block[n].crc32_at for n in checked.tolist()], dtype=np.int64).reshape(-1, 2)
    gap_of = np.where(in_tail, gaps, 0)[whole].tolist()
    return Block(
        offset=low,
        nbytes=max(high - low, 0),
        cuts=cuts,
        zeros=tuple(zeros),
        places=places[numbers],
        frames=of_block,
        tails=tuple(_tail(frame.trailer, gap) for frame, gap in zip(of_block, gap_of, strict=True)),
        payload=start + header,
        payload_nbytes=payload_nbytes,
        checked=checked,
        crc=start[checked, None] + crc,
        runs=tuple(np.unique((start + header + payload_nbytes) // _HOT_NBYTES, return_counts=True)[1].tolist()),
        large=tuple(np.flatnonzero(payload_nbytes >= LARGE_NBYTES).tolist()),
    )


@lru_cache(maxsize=4096)
def _tail(trailer: bytes, gap: int) -> bytes:
    """The bytes after a payload. All records of a kind share one object."""
    return trailer + bytes(gap)


@dataclass(frozen=True, eq=False)
class FileOrder:
    """What is written to one file.

    Attributes:
        blocks: from front to back. There are none if the file has items of variable size: these get their places while
            the file is written, and then the file is cut.
        places, starts, frames: the records of fixed size of such a file, as for :func:`cut_into_blocks`.
        variable: places in the plan of the items of variable size, ascending. They come after all others.
        items: the :func:`~robust_dcp.storage.layouts.footer.item_id` of each record of fixed size, in order.
        variable_items: those of the items of variable size.
        head: the head of the file, which is written last; ``None`` if the file has none.
    """

    blocks: tuple[Block, ...]
    places: Int64
    starts: Int64
    frames: tuple[Record, ...]
    variable: tuple[int, ...]
    items: tuple[int, ...]
    variable_items: tuple[int, ...]
    head: ShardHead | None


_ITEM_NBYTES = 300
"""The memory that the order of one item takes, roughly."""

# Entries are immutable. If two saves by one plan run at the same time, an entry may be made twice, which does no harm.
_ORDERS: Table[tuple[Placements, int, int], tuple[FileOrder, ...]] = CACHE.table(
    "write orders", lambda key, _: _ITEM_NBYTES * len(key[0].offset), max_nbytes=256 << 20
)


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
        orders = tuple(_orders(placements, source, block_nbytes, page_nbytes))
        if len(placements.variable) < len(placements.offset):  # else another planner planned for this save only
            _ORDERS.put(key, orders)
    return orders


def _orders(placements: Placements, source: ItemSource, block_nbytes: int, page_nbytes: int) -> list[FileOrder]:
    frames = _frames(placements, source)
    # An empty record comes before another one at the same place, so that each record ends where the next may begin.
    by_offset = np.lexsort((placements.nbytes, placements.offset))
    orders = []
    for number, head_nbytes in enumerate(placements.head_nbytes):
        members = by_offset[placements.file[by_offset] == number]
        n_variable = int((placements.offset[members] < 0).sum())
        variable, fixed = members[:n_variable].tolist(), members[n_variable:]
        starts = placements.offset[fixed]
        of_file = tuple(frames[place] for place in fixed.tolist())
        blocks: list[Block] = []
        if not variable and len(fixed):
            blocks = cut_into_blocks(
                fixed.astype(np.int64),
                starts,
                of_file,
                begin=head_nbytes // page_nbytes * page_nbytes,
                end=placements.file_nbytes[number] + 1,
                block_nbytes=block_nbytes,
                page_nbytes=page_nbytes,
            )
        orders.append(
            FileOrder(
                blocks=tuple(blocks),
                places=fixed.astype(np.int64) if variable else np.empty(0, dtype=np.int64),
                starts=starts if variable else np.empty(0, dtype=np.int64),
                frames=of_file if variable else (),
                variable=tuple(variable),
                items=tuple(item_id(source.name(each), source.chunk_offset(each)) for each in fixed.tolist()),
                variable_items=tuple(item_id(source.name(each), source.chunk_offset(each)) for each in variable),
                head=_head(placements, fixed, frames, source, head_nbytes) if head_nbytes else None,
            )
        )
    return orders


def _frames(placements: Placements, source: ItemSource) -> dict[int, Record]:
    """The frame of each item of fixed size, by its place. Items of one dtype and size share one frame."""
    # The layouts have caches of frames, too, but these keep only a limited number.
    made: dict[tuple[torch.dtype, torch.Size, int], Record] = {}
    frames: dict[int, Record] = {}
    heads = placements.head_nbytes
    with NamedErrors(source, 0) as current:
        for place, (nbytes, file) in enumerate(zip(placements.nbytes.tolist(), placements.file.tolist(), strict=True)):
            if nbytes < 0:
                continue
            current.place = place
            expected = source.expected(place)
            key = None if expected is None else (*expected, heads[file])
            frame = None if key is None else made.get(key)
            if frame is None and key is not None:
                frame = (raw_record if key[2] else framed_record)(key[0], tuple(key[1]))
            if frame is None or key is None or frame.nbytes != nbytes:
                name = source.name(place)
                raise PlanConflict(f"the record of {name!r} is not the one that was planned", key=name)
            frames[place] = made[key] = frame
    return frames


def _head(
    placements: Placements,
    places: npt.NDArray[np.intp],
    frames: dict[int, Record],
    source: ItemSource,
    nbytes: int,
) -> ShardHead:
    tensors = [
        PlacedTensor(
            place, source.name(place), frames[place].dtype, frames[place].shape, source.chunk_offset(place), offset
        )
        for place, offset in zip(places.tolist(), placements.offset[places].tolist(), strict=True)
    ]
    return ShardHead(tensors, nbytes)
