"""Whether boxes fill their tensors: the one answer for plans, loads, ``verify``, and checkpoints made of shards.

Boxes fill a tensor, each element once, if they lie within it, do not overlap, and their volumes add up to that of the
tensor. So overlap is the costly question. Tensors that are cut along one dimension are decided on the columns of all
tensors at once. So are tensors with boxes that lie between the lines of a grid. Of the others all boxes are compared,
tensor by tensor. Where boxes overlap, volumes say nothing, and the boxes are taken out of the tensor one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.integer[Any]]

_NO_LINE: Final = np.iinfo(np.int64).max
_LARGE: Final = float(1 << 62)
_MAX_COMPARISONS: Final = 1 << 28


class Box(NamedTuple):
    """A part of a tensor.

    Attributes:
        offsets: where it begins.
        sizes: its shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.sizes)} at {list(self.offsets)}"


def columns_of(rows: Sequence[Sequence[int]], fill: int, ndim: int | None = None) -> Int64:
    """int64 ``[n, ndim]``: sizes, which are filled up with 1, or offsets, with 0.

    Args:
        ndim: to how many dimensions; otherwise to the most that a row has.
    """
    widths = set(map(len, rows))
    width = max(widths, default=0) if ndim is None else ndim
    if widths != {width}:
        rows = [(*row, *(fill,) * (width - len(row))) for row in rows]
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=len(rows) * width).reshape(len(rows), width)


class Coverage:
    """What boxes fill of their tensors.

    Args:
        tensor: int ``[n]``: the number of each box's tensor.
        offset, size: int64 ``[n, D]``: each box.
        whole: int64 ``[T, D]``: the size of each tensor. Those of fewer dimensions have D, as :func:`columns_of` says.

    Attributes:
        outside: the places of the boxes that reach out of their tensor, ascending. They count in nothing else.
    """

    def __init__(self, tensor: Numbers, offset: Int64, size: Int64, whole: Int64) -> None:
        self._whole, self._tensors, self._boxes = whole, tensor, (offset, size)
        is_outside = np.zeros(len(tensor), dtype=np.bool_)
        is_filled = np.ones(len(tensor), dtype=np.bool_)
        for begin, length, sizes in zip(offset.T, size.T, whole.T, strict=True):
            is_filled &= length > 0
            is_outside |= (length < 0) | (begin < 0) | (length > sizes[tensor] - begin)
        self.outside: Rows = np.flatnonzero(is_outside)
        self._rows = np.flatnonzero(is_filled & ~is_outside)
        if len(self._rows) < len(tensor):
            tensor, offset, size = tensor[self._rows], offset[self._rows], size[self._rows]
        order = _order(tensor, offset)
        if order is not None:
            self._rows, tensor, offset, size = self._rows[order], tensor[order], offset[order], size[order]
        self._tensor, self._offset, self._size = tensor, offset, size

    @cached_property
    def overlaps(self) -> dict[int, tuple[int, int]]:
        """The tensors in which boxes overlap, ascending, with the places of two that do."""
        found = _overlaps(self._tensor, self._offset, self._size)
        return {tensor: (int(self._rows[first]), int(self._rows[second])) for tensor, first, second in found}

    @cached_property
    def volumes(self) -> Int64:
        """int64 ``[T]``: how many elements the boxes of each tensor have."""
        volumes = np.zeros(len(self._whole), dtype=np.int64)
        starts = np.flatnonzero(np.diff(self._tensor, prepend=-1))
        if len(starts):
            volumes[self._tensor[starts]] = np.add.reduceat(self._size.prod(axis=1), starts)
        return volumes

    @cached_property
    def with_gaps(self) -> Rows:
        """The tensors that have elements that are in no box, ascending."""
        is_short = self.volumes != self._whole.prod(axis=1)
        undecided = set(self.overlaps) | set(np.flatnonzero(self._whole.prod(axis=1, dtype=float) > _LARGE).tolist())
        for each in undecided:
            is_short[each] = self.gap(each) is not None
        return np.flatnonzero(is_short)

    def gap(self, tensor: int, ndim: int | None = None) -> Box | None:
        """A part of a tensor, of ``ndim`` dimensions, that is in no box; ``None`` if there is none.

        If boxes overlap in so many ways that looking on would take too long, it may be a part that is only not known to
        be in one.
        """
        first, last = np.searchsorted(self._tensor, [tensor, tensor + 1])
        begin = self._offset[first:last]
        end = begin + self._size[first:last]
        whole = self._whole[tensor]
        regions = [(np.zeros_like(whole), whole, np.arange(len(begin)))] if (whole > 0).all() else []
        n_comparisons = 0
        while regions:
            low, high, boxes = regions.pop()
            n_comparisons += len(boxes)
            boxes = boxes[((begin[boxes] < high) & (end[boxes] > low)).all(axis=1)]
            if not len(boxes) or n_comparisons > _MAX_COMPARISONS:
                return Box(tuple(low[:ndim].tolist()), tuple((high - low)[:ndim].tolist()))
            taken, boxes = boxes[len(boxes) // 2], np.delete(boxes, len(boxes) // 2)
            # What of the region lies beside the box: before it and after it, dimension by dimension.
            for dim in range(len(whole)):
                before, after = high.copy(), low.copy()
                before[dim], after[dim] = begin[taken, dim], end[taken, dim]
                regions += [(low, before, boxes)] if low[dim] < before[dim] else []
                regions += [(after, high, boxes)] if after[dim] < high[dim] else []
                low, high = low.copy(), high.copy()
                low[dim], high[dim] = max(low[dim], begin[taken, dim]), min(high[dim], end[taken, dim])
        return None

    def problem(self, tensor: int, ndim: int | None = None) -> tuple[str, str] | None:
        """What is expected and what is there, in words, if the boxes do not fill a tensor, each element once."""
        if not (len(self.outside) or self.overlaps or len(self.with_gaps)):
            return None
        shape = self._whole[tensor, :ndim].tolist()
        outside = self.outside[self._tensors[self.outside] == tensor]
        if len(outside):
            return f"chunks within {shape}", f"a chunk {self._box(outside[0], ndim)}"
        if tensor in self.overlaps:
            first, second = (self._box(place, ndim) for place in self.overlaps[tensor])
            return "chunks that do not overlap", f"{first} and {second}"
        if tensor in self.with_gaps:
            return f"chunks with all {prod(shape)} elements of {shape}", f"none that holds {self.gap(tensor, ndim)}"
        return None

    def _box(self, place: int, ndim: int | None) -> Box:
        offset, size = (tuple(column[place, :ndim].tolist()) for column in self._boxes)
        return Box(offset, size)


def _order(tensor: Numbers, offset: Int64) -> Rows | None:
    """The order by tensor and offsets; ``None`` if the boxes have it already."""
    is_sorted, is_equal = tensor[1:] > tensor[:-1], tensor[1:] == tensor[:-1]
    for begin in offset.T:
        is_sorted |= is_equal & (begin[1:] > begin[:-1])
        is_equal &= begin[1:] == begin[:-1]
    return None if (is_sorted | is_equal).all() else np.lexsort((*offset.T[::-1], tensor))


def _overlaps(tensor: Numbers, offset: Int64, size: Int64) -> list[tuple[int, int, int]]:
    """Of each tensor in which boxes overlap its number, and the places of two that do.

    Args:
        tensor, offset, size: as for :class:`Coverage`, sorted by tensor and offsets. No size is 0.
    """
    if len(tensor) < 2:
        return []
    same_tensor = tensor[1:] == tensor[:-1]
    starts = np.append(0, np.flatnonzero(~same_tensor) + 1)
    ends = np.append(starts[1:], len(tensor))
    n_cut = np.zeros(len(starts), dtype=np.intp)  # along how many dimensions the boxes of a tensor differ
    meets = same_tensor.copy()
    for begin, length in zip(offset.T, size.T, strict=True):
        differs = same_tensor & ((begin[1:] != begin[:-1]) | (length[1:] != length[:-1]))
        n_cut += np.logical_or.reduceat(np.append(False, differs), starts)
        meets &= begin[1:] < (begin + length)[:-1]
    # In a tensor that is cut along one dimension, each box must end before the next begins. So it is most of the time.
    is_suspect = np.append(False, meets)
    rest = np.flatnonzero(np.repeat(n_cut > 1, ends - starts))
    is_suspect[rest] |= _crosses_a_line(tensor[rest], offset[rest], size[rest]) if len(rest) else False
    suspects = np.searchsorted(starts, np.flatnonzero(is_suspect), side="right") - 1
    found = []
    for each in sorted(set(suspects.tolist())):
        first, last = int(starts[each]), int(ends[each])
        pair = _first_pair(offset[first:last], size[first:last])
        if pair is not None:
            found.append((int(tensor[first]), first + pair[0], first + pair[1]))
    return found


def _crosses_a_line(tensor: Numbers, offset: Int64, size: Int64) -> Bool:
    """For each box, whether in some dimension it reaches beyond the next offset at which a box of its tensor begins.

    Boxes that do not, and that have different offsets, cannot overlap. Each is a cell, or a part of a cell, of the grid
    that all offsets form.
    """
    crosses = np.zeros(len(tensor), dtype=np.bool_)
    for dim in range(offset.shape[1]):
        order = np.lexsort((offset[:, dim], tensor))
        of_tensor, begin = tensor[order], offset[order, dim]
        # For each box, find the next line of its tensor, by looking from the back.
        is_last_of_line = np.append((of_tensor[1:] != of_tensor[:-1]) | (begin[1:] != begin[:-1]), True)
        last = np.flatnonzero(is_last_of_line)
        following = np.append(begin[1:], _NO_LINE)
        following[np.append(of_tensor[1:] != of_tensor[:-1], True)] = _NO_LINE
        line = np.repeat(following[last], np.diff(np.append(-1, last)))
        crosses[order] |= begin + size[order, dim] > line
    return crosses


def _first_pair(offset: Int64, size: Int64) -> tuple[int, int] | None:
    """Two boxes of one tensor that overlap. A box is compared with those that reach as far along one dimension: the one
    along which most begin somewhere else.
    """
    along = int(np.argmax([len(np.unique(begin)) for begin in offset.T])) if offset.size else 0
    order = np.argsort(offset[:, along], kind="stable") if offset.size else np.arange(len(offset))
    end = offset + size
    open_boxes = order[:0]
    for row in order.tolist():
        if offset.size:
            open_boxes = open_boxes[end[open_boxes, along] > offset[row, along]]
        hit = ((offset[open_boxes] < end[row]) & (offset[row] < end[open_boxes])).all(axis=1)
        if hit.any():
            other = int(open_boxes[hit.argmax()])
            return min(other, row), max(other, row)
        open_boxes = np.append(open_boxes, row)
    return None
