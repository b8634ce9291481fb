"""Helpers for columns of dimensions: pad ragged columns to rectangles, and number the distinct rows of rectangles.

They are pure NumPy. Other modules use them to compare, sort or count the items of one rank or of all ranks at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["padded", "unique_rows"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.integer[Any]]
Places = npt.NDArray[np.intp]

_SMALL_TABLE_BITS = 16
_LARGEST_TABLE = 1 << 25


def padded(ragged: npt.NDArray[np.integer], counts: npt.NDArray[np.integer], width: int, fill: int) -> Int64:
    """int64 ``[N, width]``: row ``n`` has the next ``counts[n]`` entries of ``ragged``, and is filled up with
    ``fill``."""
    rows = len(counts)
    if len(ragged) == rows * width:  # all rows are full
        return ragged.reshape(rows, width).astype(np.int64)
    out = np.full((rows, width), fill, dtype=np.int64)
    out[np.arange(width) < counts[:, None]] = ragged
    return out


def unique_rows(*columns: Ints) -> tuple[Places, Places]:
    """The distinct rows of some columns of N integers each.

    Returns:
        ``(first, which)``: the rows ``first`` are distinct, and the rows ``first[which]`` are all rows. The result is
        exact. Rows are grouped by 64-bit hashes and then compared. If two different rows have one hash, the rows are
        sorted instead.
    """
    hashes: UInt64 = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        hashes ^= column.astype(np.uint64)
        hashes = _mixed(hashes)
    same = _first_of_each(hashes)
    if any((column[same] != column).any() for column in columns):
        _, first, which = np.unique(np.column_stack(columns), axis=0, return_index=True, return_inverse=True)
        return first.astype(np.intp, copy=False), which.reshape(-1).astype(np.intp, copy=False)
    first = np.flatnonzero(same == np.arange(len(same)))
    number = np.empty(len(same), dtype=np.intp)
    number[first] = np.arange(len(first))
    return first, number[same]


def _first_of_each(values: UInt64) -> Int32:
    """For each value, the place of an equal value. Equal values get the same place.

    This is a hash table without chains. Of all values in one slot, one stays. The values that differ from it try again
    in a larger table, where most have a slot to themselves. It is several times as fast as sorting if few values are
    distinct, and never slower.
    """
    same: Int32 = np.arange(len(values), dtype=np.int32)
    left, mine = same, values
    table: Int32 = np.empty(1 << _SMALL_TABLE_BITS, dtype=np.int32)
    while len(left):
        slots = (mine & np.uint64(len(table) - 1)).astype(np.int32)
        table[slots] = left
        found = table[slots]
        is_other = values[found] != mine
        if len(left) == len(values) and not is_other.any():
            return found
        same[left[~is_other]] = found[~is_other]
        left, mine = left[is_other], mine[is_other]
        if len(left) > len(table) // 2:
            table = np.empty(1 << min(2 * len(left) - 1, _LARGEST_TABLE - 1).bit_length(), dtype=np.int32)
    return same


def _mixed(values: UInt64) -> UInt64:
    """Mix 64-bit integers in place, so that all bits depend on each other. It is a bijection, SplitMix64's
    finalizer."""
    values += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values
