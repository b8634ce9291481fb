"""The offsets and sizes of an index. Each distinct one is stored once; those with fewer dimensions come first.

This module turns a number into a ``torch.Size``, or many numbers into rows of an array. ``stored_index`` calls it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.storage.index.index_file import IndexFile

__all__ = ["StoredSizes"]

Int64 = npt.NDArray[np.int64]

_MAX_DIMENSIONS: Final = 64
_SIZES_KEPT: Final = 1 << 16


class StoredSizes:
    """The sizes of an index, by number.

    Args:
        file: an open index.

    Raises:
        DamagedIndex: something refers to what does not exist. All methods raise it, too.
    """

    def __init__(self, file: IndexFile) -> None:
        self._file = file
        self._values = file.column("sizes")
        self._first_of_ndim, self._at_of_ndim = self._places_of_sizes()
        self._known: dict[int, torch.Size] = {}

    def __getitem__(self, number: int) -> torch.Size:
        """The offsets or sizes with this number."""
        known = self._known.get(number)
        if known is not None:
            return known
        ndim = bisect_right(self._first_of_ndim, number) - 1
        if ndim < 0 or ndim >= len(self._at_of_ndim):
            raise self._file.damaged(f"size {number} of {self._first_of_ndim[-1]} is referred to")
        at = self._at_of_ndim[ndim] + (number - self._first_of_ndim[ndim]) * ndim
        values = self._values.rows(at, at + ndim).tolist()
        if any(value < 0 for value in values):
            raise self._file.damaged(f"size {number} is {values}")
        if len(self._known) >= _SIZES_KEPT:
            self._known.clear()
        known = self._known[number] = torch.Size(values)
        return known

    def rows(self, numbers: npt.NDArray[np.int32], ndim: int) -> Int64:
        """Sizes of ``ndim`` dimensions, one row for each of ``numbers``."""
        if not len(numbers) or not ndim:
            return np.empty((len(numbers), ndim), dtype=np.int64)
        lowest, highest = int(numbers.min()), int(numbers.max())
        if ndim >= len(self._at_of_ndim) or lowest < self._first_of_ndim[ndim]:
            raise self._file.damaged(f"size {lowest} has other dimensions than its tensor")
        if highest >= self._first_of_ndim[ndim + 1]:
            raise self._file.damaged(f"size {highest} has other dimensions than its tensor")
        if highest - lowest > 8 * len(numbers) + 1024:  # they lie far apart: look them up one by one
            return np.array([self[number] for number in numbers.tolist()], dtype=np.int64)
        at = self._at_of_ndim[ndim] + (lowest - self._first_of_ndim[ndim]) * ndim
        table = self._values.rows(at, at + (highest - lowest + 1) * ndim).reshape(-1, ndim)
        found: Int64 = table[numbers - lowest]
        if int(found.min()) < 0:
            raise self._file.damaged(f"one of the sizes {lowest} to {highest} is negative")
        return found

    def _places_of_sizes(self) -> tuple[list[int], list[int]]:
        """For each number of dimensions, the number of the first such size, and where it lies among the values."""
        counts = self._file.column("size_counts")
        if len(counts) > _MAX_DIMENSIONS + 1:
            raise self._file.damaged(f"it has sizes of {len(counts) - 1} dimensions")
        first, at = [0], [0]
        for ndim, count in enumerate(counts.rows(0, len(counts)).tolist()):
            first.append(first[-1] + count)
            at.append(at[-1] + count * ndim)
        if at[-1] != len(self._values):
            raise self._file.damaged(f"it has {len(self._values)} numbers in its sizes, not {at[-1]}")
        return first, at[:-1]
