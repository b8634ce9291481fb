"""Dealing sizes out to bins so that all bins end up about equally full.

Pure arithmetic, for items over files (``places``), and for replicas over ranks that write or read.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

__all__ = ["deal", "fill_up"]

Int64 = npt.NDArray[np.int64]

_LARGEST_PER_BIN = 64
"""So many of the largest sizes for each bin are dealt one by one: what is left is too small to unbalance the bins."""


def deal(sizes: Int64, load: Int64) -> tuple[npt.NDArray[np.intp], Int64]:
    """A bin for each of ``sizes``, given how full the bins are.

    The largest go one by one into the least filled bin (Graham's LPT rule: at most 4/3 of the best possible maximum);
    the others, in order of size, in a row for each bin, up to the level that all bins then have.

    Args:
        sizes: int64 ``[n]``.
        load: int64 ``[bins]``, not changed.

    Returns:
        (bin of each size, how full the bins are afterwards).
    """
    load = load.copy()
    chosen = np.zeros(len(sizes), dtype=np.intp)
    order = np.argsort(-sizes, kind="stable")
    n_large = min(len(order), _LARGEST_PER_BIN * len(load))
    heap = [(filled, number) for number, filled in enumerate(load.tolist())]
    heapq.heapify(heap)
    for place, size in zip(order[:n_large].tolist(), sizes[order[:n_large]].tolist(), strict=True):
        filled, number = heap[0]
        chosen[place] = number
        heapq.heapreplace(heap, (filled + size, number))
    for filled, number in heap:
        load[number] = filled
    rest = order[n_large:]
    if len(rest):
        chosen[rest] = fill_up(sizes[rest], load)
        np.add.at(load, chosen[rest], sizes[rest])
    return chosen, load


def fill_up(sizes: Int64, load: Int64) -> npt.NDArray[np.intp]:
    """A bin for each of ``sizes``, in a row for each bin.

    Their running total is cut at the room that each bin has below the level of all of them.
    """
    total = int(sizes.sum())
    room = np.cumsum(np.maximum(_level(load, total) - load, 0.0))
    middle = np.cumsum(sizes) - sizes / 2
    scale = room[-1] / max(float(total), 1.0)
    bins: npt.NDArray[np.intp] = np.minimum(np.searchsorted(room, middle * scale, side="right"), len(load) - 1)
    return bins


def _level(load: Int64, total: int) -> float:
    """How full the bins that take part are once ``total`` has been poured over them; fuller ones get nothing."""
    filled = np.sort(load).astype(np.float64)
    levels = (np.cumsum(filled) + total) / np.arange(1, len(filled) + 1)
    # With the k least filled bins the level is levels[k - 1]; it must reach them all, and not the next.
    reaches = np.flatnonzero(levels >= filled)
    return float(levels[reaches[-1]])
