"""Ragged columns as rectangles, and rows of rectangles as numbers: what columns of dimensions are compared by.

Pure NumPy; used where the items of one rank or of all ranks are compared, sorted or counted at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["padded", "unique_rows"]

Int64 = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]


def padded(ragged: npt.NDArray[np.integer], counts: npt.NDArray[np.integer], width: int, fill: int) -> Int64:
    """int64 ``[N, width]``: ``counts[n]`` entries of ``ragged`` in row ``n``, then ``fill``."""
    rows = len(counts)
    if len(ragged) == rows * width:  # no row is shorter
        return ragged.reshape(rows, width).astype(np.int64)
    out = np.full((rows, width), fill, dtype=np.int64)
    out[np.arange(width) < counts[:, None]] = ragged
    return out


def unique_rows(rows: Int64) -> tuple[Places, Places]:
    """The distinct rows of ``rows``, int64 ``[N, W]``.

    Returns:
        ``(first, which)``: ``rows[first]`` are distinct, and ``rows[first][which]`` are ``rows``. Exact: rows are told
        apart by 64-bit hashes, and compared afterwards; if two rows with one hash differ, by sorting.
    """
    n_rows, width = rows.shape
    if not n_rows or not width:
        return np.zeros(min(n_rows, 1), dtype=np.intp), np.zeros(n_rows, dtype=np.intp)
    hashes = np.zeros(n_rows, dtype=np.uint64)
    for column in range(width):
        hashes = _mixed(hashes ^ rows[:, column].astype(np.uint64))
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    if (rows[first][which] != rows).any():
        _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first.astype(np.intp, copy=False), which.reshape(-1).astype(np.intp, copy=False)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit integers whose bits all depend on each other (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
