"""Sorts the items of all ranks by name, offsets and rank. Every check uses this order; a plan computes it once.

The offsets of a chunk are turned into one number, so that the sort has two keys for any number of dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.global_plan.columns import GlobalColumns

__all__ = ["order_of"]

_MAX_CELLS = 2.0**62
"""How many positions of a tensor can be numbered with 63 bits."""


def order_of(columns: GlobalColumns) -> npt.NDArray[np.intp]:
    """int64 ``[M]``: the rows of ``columns`` sorted by (name, offsets, rank).

    The offsets of every row must lie within its tensor (``coverage.check_bounds``), or at its end.
    """
    # An empty chunk may begin at the end of the tensor. So each dimension has one more position.
    extents = columns.shape + 1
    if (extents.astype(np.float64).prod(axis=1) >= _MAX_CELLS).any():
        offsets = [columns.offset[:, dim] for dim in reversed(range(columns.offset.shape[1]))]
        keys: list[npt.NDArray[Any]] = [columns.rank, *offsets, columns.name]
        return np.lexsort(keys)
    position = np.zeros(len(columns), dtype=np.int64)
    for dim in range(columns.offset.shape[1]):
        position *= extents[:, dim]
        position += columns.offset[:, dim]
    positions = int(position.max(initial=0)) + 1
    if positions * (len(columns.names) + 1) < _MAX_CELLS:
        return np.argsort(columns.name * np.int64(positions) + position, kind="stable")
    return np.lexsort((position, columns.name))  # lexsort is stable too, and rows are in the order of ranks
