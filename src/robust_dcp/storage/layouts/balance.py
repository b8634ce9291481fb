"""Distributes sizes over bins so that all bins end up about equally full.

The bins are files (in ``places``), or ranks that write or read replicas. This is pure arithmetic.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

__all__ = ["deal", "fill_up"]

Int64 = npt.NDArray[np.int64]

_LARGEST_PER_BIN = 64
"""This many of the largest sizes for each bin are placed one by one. The rest is too small to unbalance the bins."""


def deal(sizes: Int64, load: Int64) -> tuple[npt.NDArray[np.intp], Int64]:
    """Choose a bin for each of ``sizes``, given how full the bins are.

    The largest sizes go one by one into the least filled bin. This is Graham's LPT rule: the fullest bin holds at most
    4/3 of the best possible maximum. The others are sorted by size, and each bin takes a row of neighbours, up to the
    level that all bins then have.

    Args:
        sizes: int64 ``[n]``.
        load: int64 ``[bins]``, how full the bins are; not changed.

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
    """Choose a bin for each of ``sizes``, such that each bin takes a row of neighbours.

    The running total of the sizes is cut where a bin has reached the common level.
    """
    total = int(sizes.sum())
    room = np.cumsum(np.maximum(_level(load, total) - load, 0.0))
    middle = np.cumsum(sizes) - sizes / 2
    scale = room[-1] / max(float(total), 1.0)
    bins: npt.NDArray[np.intp] = np.minimum(np.searchsorted(room, middle * scale, side="right"), len(load) - 1)
    return bins


def _level(load: Int64, total: int) -> float:
    """How full the bins are once ``total`` has been spread over them. Bins that are fuller than that already get
    nothing.
    """
    filled = np.sort(load).astype(np.float64)
    levels = (np.cumsum(filled) + total) / np.arange(1, len(filled) + 1)
    # If the k least filled bins share the total, their level is levels[k - 1]. It must reach all k bins, and not the
    # next.
    reaches = np.flatnonzero(levels >= filled)
    return float(levels[reaches[-1]])
