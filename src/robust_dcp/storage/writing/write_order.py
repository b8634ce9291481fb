"""In which order and in which pieces the bytes of a rank's files are written.

This is the same in all saves by one plan, so it is kept for the next save. This module does not decide places
(``layouts`` does) and does not write: ``engine`` writes, and calls this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import PlanConflict
from robust_dcp.storage.layouts import TORCH, Frame, Head, Layout, PlacedTensor
from robust_dcp.storage.layouts.footer import item_id
from robust_dcp.storage.layouts.places import PAGE_NBYTES, Placements
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors
from robust_dcp.storage.writing.pack import Block
from robust_dcp.structure_cache import CACHE, Table

__all__ = ["LargeRecord", "WriteOrder", "write_orders"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LargeRecord:
    """A record that is written by itself, in pieces.

    Attributes:
        place: its place in the plan.
        template: its frame.
        offset: where it begins in the file, in bytes.
        gap_before: bytes between the end of what comes before in the file and ``offset``; 0 if they are more than a
            page apart.
    """

    place: int
    template: Frame
    offset: int
    gap_before: int


@dataclass(frozen=True, eq=False)
class WriteOrder:
    """What is written to one file, from front to back.

    Attributes:
        fixed: the records with planned places.
        variable: places in the plan of the items of variable size, ascending. They come after all others.
        items: the :func:`~robust_dcp.storage.layouts.footer.item_id` of each record with a planned place, in order.
        variable_items: those of the items of variable size.
        head: the head of the file, which is written last; ``None`` if the file has none.
    """

    fixed: tuple[Block | LargeRecord, ...]
    variable: tuple[int, ...]
    items: tuple[int, ...] = ()
    variable_items: tuple[int, ...] = ()
    head: Head | None = None


_ITEM_NBYTES = 300
"""The memory that the order of one item takes, roughly."""

# Entries are immutable. If two saves by one plan run at the same time, an entry may be made twice, which does no harm.
_ORDERS: Table[tuple[Placements, int, int], tuple[WriteOrder, ...]] = CACHE.table(
    "write orders", lambda key, _: _ITEM_NBYTES * len(key[0].offset), max_nbytes=256 << 20
)


def write_orders(
    placements: Placements,
    source: ItemSource,
    block_nbytes: int,
    page_nbytes: int = PAGE_NBYTES,
    layout: Layout = TORCH,
) -> tuple[WriteOrder, ...]:
    """The write order of each file. It is made in the first save by a plan, and reused in later ones.

    Args:
        source: gives the expected dtypes and sizes when the order is made. Later saves do not ask again: a plan has one
            dtype and size for each item, and every save checks the data against them.
        block_nbytes: records are gathered into blocks of this size. What comes before them in their first page counts,
            too. A record that does not fit is written in pieces.
        page_nbytes: the page size of the files in bytes.
        layout: the layout that made ``placements``.

    Raises:
        PlanConflict: the expected length of an item is not the planned one.
        ValueError: there are more or fewer items than places.
    """
    if len(source) != len(placements.offset):
        raise ValueError(f"expected {len(placements.offset)} items, as many as the plan has places, got {len(source)}")
    key = placements, block_nbytes, page_nbytes
    orders = _ORDERS.get(key)
    if orders is None:
        orders = _make(placements, source, block_nbytes, page_nbytes, layout)
        if any(
            order.fixed for order in orders
        ):  # if none are fixed, another planner planned for this save only: nothing to keep
            _ORDERS.put(key, orders)
    return orders


def _make(
    placements: Placements, source: ItemSource, block_nbytes: int, page_nbytes: int, layout: Layout
) -> tuple[WriteOrder, ...]:
    frames = _frames(placements, source, layout)
    # An empty record comes before another one at the same place, so that each record ends where the next may begin.
    by_offset = np.lexsort((placements.nbytes, placements.offset))
    orders = []
    for number, head_nbytes in enumerate(placements.head_nbytes):
        members = by_offset[placements.file[by_offset] == number]
        n_variable = int((placements.offset[members] < 0).sum())
        fixed = members[n_variable:]
        orders.append(
            WriteOrder(
                fixed=tuple(_pieces(placements, fixed, frames, block_nbytes, page_nbytes, head_nbytes)),
                variable=tuple(members[:n_variable].tolist()),
                items=tuple(item_id(source.name(each), source.chunk_offset(each)) for each in fixed.tolist()),
                variable_items=tuple(
                    item_id(source.name(each), source.chunk_offset(each)) for each in members[:n_variable].tolist()
                ),
                head=_head(placements, fixed, frames, source, layout, head_nbytes) if head_nbytes else None,
            )
        )
    return tuple(orders)


def _frames(placements: Placements, source: ItemSource, layout: Layout) -> dict[int, Frame]:
    """The frame of each item of fixed size, by its place. Items of one dtype and size share one frame."""
    # The layouts have caches of frames, too, but these keep only a limited number.
    made: dict[tuple[torch.dtype, torch.Size, int], Frame] = {}
    frames: dict[int, Frame] = {}
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
                frame = layout.frame(key[0], tuple(key[1]), key[2])
            if frame is None or key is None or frame.nbytes != nbytes:
                name = source.name(place)
                raise PlanConflict(f"the record of {name!r} is not the one that was planned", key=name)
            frames[place] = made[key] = frame
    return frames


def _head(
    placements: Placements,
    places: Int64,
    frames: dict[int, Frame],
    source: ItemSource,
    layout: Layout,
    nbytes: int,
) -> Head:
    tensors = [
        PlacedTensor(
            place, source.name(place), frames[place].dtype, frames[place].shape, source.chunk_offset(place), offset
        )
        for place, offset in zip(places.tolist(), placements.offset[places].tolist(), strict=True)
    ]
    return layout.head(tensors, nbytes)


def _pieces(
    placements: Placements,
    places: Int64,
    templates: dict[int, Frame],
    block_nbytes: int,
    page_nbytes: int,
    begin: int,
) -> Iterator[Block | LargeRecord]:
    """Cut a file into blocks, and records that are too large for a block, from front to back.

    Args:
        places: int64 ``[n]``, the places of the items of fixed size in one file, by ascending offset.
        begin: where the file's head ends.
    """
    if not len(places):
        return
    template = [templates[place] for place in places.tolist()]
    start = placements.offset[places]
    end = start + placements.nbytes[places]
    gap = start - np.concatenate(([begin], end[:-1]))
    far = gap > PAGE_NBYTES  # a gap of more than a page is skipped, not written
    gap[far] = 0
    room = block_nbytes - start % page_nbytes
    large = end - start > room
    cuts = np.flatnonzero(large[1:] | large[:-1] | far[1:]) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(places)]):
        if large[first]:
            yield LargeRecord(int(places[first]), template[first], int(start[first]), int(gap[first]))
            continue
        while first < last:
            stop = first + int(np.searchsorted(end[first:last], start[first] + room[first], side="right"))
            yield Block.of(places[first:stop], start[first:stop], tuple(template[first:stop]), int(gap[first]))
            first = stop
