"""Computes which parts of stored chunks lie in a box of their tensor.

If there are many chunks this is done in columns; a few are faster one by one. These are pure functions.
``stored_index`` finds the chunks that may overlap, and calls them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Overlap", "overlap_of_few", "overlap_of_many"]

Int64 = npt.NDArray[np.int64]
Size = torch.Size


class Overlap(NamedTuple):
    """The chunks that overlap with a box. Each list has one entry for each chunk.

    Attributes:
        chunks: the places of the chunks among the chunks of the tensor.
        offsets: where the chunks begin in the tensor.
        in_chunk: where the overlapping parts begin in their chunks.
        in_box: where the parts begin in the box.
        lengths: the sizes of the parts.
        numel: elements of all parts together.
    """

    chunks: list[int]
    offsets: list[Size]
    in_chunk: list[Size]
    in_box: list[Size]
    lengths: list[Size]
    numel: int


def overlap_of_few(chunks: Iterable[tuple[int, Size, Size]], whole: Size, box: Size, sizes: Size) -> Overlap | None:
    """Compare chunks with the box one by one.

    Args:
        chunks: place, offsets and sizes of each chunk.
        whole: the size of the tensor.
        box, sizes: where the box begins, and its size.

    Returns:
        ``None`` if a chunk does not lie within the tensor.
    """
    found = Overlap([], [], [], [], [], 0)
    numel = 0
    for place, offsets, extents in chunks:
        if not len(offsets) == len(extents) == len(whole):
            return None
        if any(offset + extent > size for offset, extent, size in zip(offsets, extents, whole, strict=True)):
            return None
        begins = [max(offset, low) for offset, low in zip(offsets, box, strict=True)]
        lengths = [
            min(offset + extent, low + size) - begin
            for offset, extent, low, size, begin in zip(offsets, extents, box, sizes, begins, strict=True)
        ]
        if lengths and min(lengths) <= 0:
            continue
        numel += math.prod(lengths)
        found.chunks.append(place)
        found.offsets.append(offsets)
        found.in_chunk.append(Size([begin - offset for begin, offset in zip(begins, offsets, strict=True)]))
        found.in_box.append(Size([begin - low for begin, low in zip(begins, box, strict=True)]))
        found.lengths.append(Size(lengths))
    return found._replace(numel=numel)


def overlap_of_many(first: int, offsets: Int64, extents: Int64, whole: Size, box: Size, sizes: Size) -> Overlap | None:
    """Compare chunks with the box in columns.

    Args:
        first: the place of the first chunk. The others follow it.
        offsets, extents: int64 ``[n, dimensions]``, offsets and sizes of the chunks.
        whole, box, sizes: as for :func:`overlap_of_few`.
    """
    if (extents > np.array(whole, dtype=np.int64) - offsets).any():
        return None
    low = np.array(box, dtype=np.int64)
    begins = np.maximum(offsets, low)
    lengths = np.minimum(offsets + extents, low + np.array(sizes, dtype=np.int64)) - begins
    kept = np.flatnonzero((lengths > 0).all(axis=1))
    offsets, begins, lengths = offsets[kept], begins[kept], lengths[kept]
    return Overlap(
        chunks=(kept + first).tolist(),
        offsets=_sizes(offsets),
        in_chunk=_sizes(begins - offsets),
        in_box=_sizes(begins - low),
        lengths=_sizes(lengths),
        numel=sum(lengths.prod(axis=1).tolist()),
    )


def _sizes(rows: Int64) -> list[Size]:
    """Each row as a tuple. Chunks of one shape usually have equal rows; then all rows share one object."""
    if len(rows) and (rows == rows[0]).all():
        return [Size(rows[0].tolist())] * len(rows)
    return list(map(Size, rows.tolist()))
