"""Decides which rank reads what for ranks that cannot see the file, and when. The coordinator decides.

This module owns the messages, the choice of readers among the ranks that see a file, and the windows: how much is on
its way at a time. It never reads or sends anything. ``fetched_reads`` calls it.

A *box* is a part of a stored tensor, of at most ``BUCKET_NBYTES``, or a whole object. A *bucket* holds several boxes
that one rank reads for the same ranks. In a *window* a rank reads, sends and receives at most ``WINDOW_NBYTES``, so the
memory for what is on its way is bounded, however much a rank lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from robust_dcp.plan.loading.readers import BUCKET_NBYTES

__all__ = ["FetchBox", "FetchBucket", "FetchShare", "Requests", "parts_of", "plan_fetch", "room_for"]

WINDOW_NBYTES: Final = 64 << 20
_ALIGNMENT: Final = 16
"""A box begins at a multiple of this in its bucket, so that its bytes can be viewed as elements of any dtype."""


class FetchBox(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants from a file that it does not see.

    Attributes:
        file: the relative path of the file.
        name, chunk, number: the stored item: its key, the offsets of its chunk (``None`` for an object), and the number
            of the chunk, if that is known.
        offsets, lengths: the part of the stored tensor; both empty for an object.
        dtype: of the tensor that it is read into, such as ``"bfloat16"``; empty for an object.
        nbytes: of the result.
        trusted: whether objects may be of any class.
    """

    file: str
    name: str
    chunk: tuple[int, ...] | None
    number: int | None
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str
    nbytes: int
    trusted: bool = False


class Requests(msgspec.Struct, frozen=True):
    """All that one rank wants."""

    boxes: tuple[FetchBox, ...]


class FetchBucket(msgspec.Struct, frozen=True, array_like=True):
    """A bucket, as one of its ranks is told.

    Attributes:
        window: the number of its window.
        ranks: the rank that reads it, and then those that get it.
        nbytes: of the bucket.
        boxes: on the rank that reads it, what is in it.
        requests: on the other ranks, the places of these boxes in the rank's requests.
    """

    window: int
    ranks: tuple[int, ...]
    nbytes: int
    boxes: tuple[FetchBox, ...] = ()
    requests: tuple[int, ...] = ()


class FetchShare(msgspec.Struct, frozen=True):
    """What the coordinator tells one rank. All ranks take part in all windows."""

    n_windows: int
    buckets: tuple[FetchBucket, ...]


def room_for(box_nbytes: int) -> int:
    """How many bytes of a bucket a box takes."""
    return -(-box_nbytes // _ALIGNMENT) * _ALIGNMENT


def parts_of(lengths: Sequence[int], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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
        for offsets, part in parts_of(some, itemsize):
            yield (*offsets[:axis], first + offsets[axis], *offsets[axis + 1 :]), part


@dataclass(eq=False)
class _Bucket:
    window: int
    ranks: tuple[int, ...]
    file: str
    nbytes: int = 0
    boxes: list[FetchBox] = field(default_factory=list)


def plan_fetch(requests: Sequence[Requests | None], holders: Mapping[str, Sequence[int]]) -> list[FetchShare]:
    """Choose who reads what and when. Returns the share of each rank, in rank order.

    Args:
        requests: what each rank wants; ``None`` for nothing.
        holders: for each file the ranks that see it, at least one.
    """
    wanted: dict[FetchBox, dict[int, int]] = {}
    for rank, request in enumerate(requests):
        for place, box in enumerate(() if request is None else request.boxes):
            wanted.setdefault(box, {})[rank] = place
    windows = _Windows(len(requests))
    buckets: list[_Bucket] = []
    for box in sorted(wanted, key=lambda each: (each.file, each.name, each.chunk or (), each.offsets)):
        needers = tuple(sorted(wanted[box]))
        room = room_for(box.nbytes)
        last = buckets[-1] if buckets else None
        fits = last is not None and (last.file, last.ranks[1:]) == (box.file, needers)
        if last is None or not fits or last.nbytes + room > BUCKET_NBYTES or not windows.has_room(last, room):
            reader = min(holders[box.file], key=lambda rank: (windows.read_nbytes[rank], rank))
            ranks = (reader, *needers)
            last = _Bucket(windows.first_with_room(ranks, room), ranks, box.file)
            buckets.append(last)
        windows.fill(last, room)
        last.boxes.append(box)
    buckets.sort(key=lambda each: each.window)
    n_windows = buckets[-1].window + 1 if buckets else 0
    told: list[list[FetchBucket]] = [[] for _ in requests]
    for bucket in buckets:
        for rank in bucket.ranks:
            told[rank].append(_told(rank, bucket, wanted))
    return [FetchShare(n_windows, tuple(each)) for each in told]


class _Windows:
    """How full the window of each rank is. A rank's window never goes back."""

    def __init__(self, n_ranks: int) -> None:
        self.read_nbytes = [0] * n_ranks
        self._window = [0] * n_ranks
        self._filled = [0] * n_ranks

    def has_room(self, bucket: _Bucket, nbytes: int) -> bool:
        return all(
            self._window[rank] == bucket.window and self._filled[rank] + nbytes <= WINDOW_NBYTES
            for rank in bucket.ranks
        )

    def first_with_room(self, ranks: Sequence[int], nbytes: int) -> int:
        window = max(self._window[rank] for rank in ranks)
        is_full = any(
            self._window[rank] == window and self._filled[rank] and self._filled[rank] + nbytes > WINDOW_NBYTES
            for rank in ranks
        )
        return window + is_full

    def fill(self, bucket: _Bucket, nbytes: int) -> None:
        bucket.nbytes += nbytes
        self.read_nbytes[bucket.ranks[0]] += nbytes
        for rank in bucket.ranks:
            if self._window[rank] < bucket.window:
                self._window[rank], self._filled[rank] = bucket.window, 0
            self._filled[rank] += nbytes


def _told(rank: int, bucket: _Bucket, wanted: Mapping[FetchBox, Mapping[int, int]]) -> FetchBucket:
    is_reader = rank == bucket.ranks[0]
    return FetchBucket(
        window=bucket.window,
        ranks=bucket.ranks,
        nbytes=bucket.nbytes,
        boxes=tuple(bucket.boxes) if is_reader else (),
        requests=() if is_reader else tuple(wanted[box][rank] for box in bucket.boxes),
    )
