"""Makes the columns of a ``.metadata`` after a patch from those before it, in one pass over numbers.

Example: one rank of 1,024 has one more tensor. Its items are now in other places, and one name is new. All other rows
stay as they are, and the new rows of that rank are inserted among them. No Python work is done for each item. This is
pure NumPy. ``plan.metadata`` calls it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.structure import Paths
from robust_dcp.storage.metadata.pickled import MetadataColumns

__all__ = ["patched_columns"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]
_T = TypeVar("_T", bound=np.generic)


def patched_columns(
    before: MetadataColumns, patch: MetadataColumns, is_new: Mask, is_stale: Mask, removed: Iterable[str]
) -> MetadataColumns:
    """The columns after a patch. The arguments are those of ``MetadataPickle.patched``.

    Args:
        before: the columns before it. Names ascend, and the rows of a name are sorted by their offsets.
        patch: the written items of the names that have changed, and all items in files that are replaced. They are in
            the same order. There are at least as many files as before.
        is_new: bool, for each name of ``patch`` whether it was added or has changed.
        is_stale: bool, for each file whether ``patch`` has all items in it.
        removed: the names that no longer exist.
    """
    names = _Names.of(before.names, patch.names, removed)
    properties = list(dict.fromkeys((*before.properties, *patch.properties)))
    own_properties = np.array([properties.index(each) for each in patch.properties], dtype=np.int32)
    sizes = _below(before.sizes, patch.sizes)
    n_sizes = len(before.sizes)

    def of_names(old: Int32, new: Int32) -> Int32:
        found = np.empty(len(names.names), dtype=np.int32)
        found[names.of_before[names.stays]] = old[names.stays]
        found[names.of_patch[is_new]] = new[is_new]
        return found

    stays = ~is_stale[before.file]
    told = is_stale[patch.file]
    name = names.of_before[before.name[stays]]
    offset = before.offset[stays]
    new_name, new_offset = names.of_patch[patch.name[told]], _moved(patch.offset[told], n_sizes)
    at = _places_among(sizes, name, offset, new_name, new_offset)

    def of_rows(old: npt.NDArray[_T], new: npt.NDArray[_T]) -> npt.NDArray[_T]:
        return np.insert(old[stays], at, new[told])

    return replace(
        before,
        names=names.names,
        paths=_paths(before.paths, patch.paths, names, is_new),
        properties=properties,
        name_properties=of_names(before.name_properties, _looked_up(own_properties, patch.name_properties)),
        name_size=of_names(before.name_size, _moved(patch.name_size, n_sizes)),
        sizes=sizes,
        size_ndims=np.append(before.size_ndims, patch.size_ndims),
        name=np.insert(name, at, new_name),
        offset=np.insert(offset, at, new_offset),
        size=of_rows(before.size, _moved(patch.size, n_sizes)),
        file=of_rows(before.file, patch.file),
        start=of_rows(before.start, patch.start),
        nbytes=of_rows(before.nbytes, patch.nbytes),
        n_files=patch.n_files,
    )


class _Names(NamedTuple):
    """The names after a patch.

    Attributes:
        names: sorted.
        of_before, of_patch: int32, for each name of the old columns and of the patch its place in ``names``. For a name
            that was removed the number means nothing.
        stays: bool, for each name of the old columns whether it still exists.
    """

    names: Sequence[str]
    of_before: Int32
    of_patch: Int32
    stays: Mask

    @classmethod
    def of(cls, before: Sequence[str], patch: Sequence[str], removed: Iterable[str]) -> _Names:
        stays = np.ones(len(before), dtype=np.bool_)
        stays[[at for at in (_place_of(before, name) for name in removed) if at is not None]] = False
        place = np.array([bisect_left(before, name) for name in patch], dtype=np.intp)
        is_added = np.array([_place_of(before, name) is None for name in patch], dtype=np.bool_)
        added_at = place[is_added]
        if stays.all() and not is_added.any():
            return cls(before, np.arange(len(before), dtype=np.int32), place.astype(np.int32), stays)
        added_before = np.searchsorted(added_at, np.arange(len(before)), side="right")
        of_before = (np.cumsum(stays) - 1 + added_before).astype(np.int32)
        stay_before = np.concatenate(([0], np.cumsum(stays)))
        of_patch = np.empty(len(patch), dtype=np.int32)
        of_patch[is_added] = stay_before[added_at] + np.arange(len(added_at))
        of_patch[~is_added] = of_before[place[~is_added]]
        names = np.empty(int(stays.sum()) + len(added_at), dtype=object)
        names[of_before[stays]] = np.array(before, dtype=object)[stays]
        names[of_patch] = np.array(patch, dtype=object)
        return cls(tuple(names.tolist()), of_before, of_patch, stays)


def _place_of(names: Sequence[str], name: str) -> int | None:
    at = bisect_left(names, name)
    return at if at < len(names) and names[at] == name else None


def _places_among(sizes: Int64, name: Int32, offset: Int32, new_name: Int32, new_offset: Int32) -> Places:
    """Where each new row goes among rows that are sorted by (name, offsets). All are bisected at once."""
    first = np.searchsorted(name, new_name, side="left")
    end = np.searchsorted(name, new_name, side="right")
    while (is_open := first < end).any():
        # For a row that is placed already, the middle may lie past the last row. That comparison is not used.
        middle = np.minimum((first + end) // 2, len(offset) - 1)
        is_behind = _are_less(sizes[new_offset], sizes[offset[middle]])
        end = np.where(is_open & is_behind, middle, end)
        first = np.where(is_open & ~is_behind, middle + 1, first)
    return first


def _are_less(one: Int64, other: Int64) -> Mask:
    """Whether each row of ``one`` comes before the same row of ``other``."""
    is_less = np.zeros(len(one), dtype=np.bool_)
    is_equal = np.ones(len(one), dtype=np.bool_)
    for first, second in zip(one.T, other.T, strict=True):
        is_less |= is_equal & (first < second)
        is_equal &= first == second
    return is_less


def _paths(before: Any, patch: Any, names: _Names, is_new: Mask) -> Paths | None:
    if before is None or patch is None:
        return None
    stays = names.stays.copy()
    is_told_anew = np.zeros(len(names.names), dtype=np.bool_)
    is_told_anew[names.of_patch[is_new]] = True
    stays &= ~is_told_anew[names.of_before]
    parts = (before.taken(np.flatnonzero(stays)), patch.taken(np.flatnonzero(is_new)))
    counts = np.concatenate([part.counts for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    order = np.argsort(np.concatenate((names.of_before[stays], names.of_patch[is_new])), kind="stable")
    starts = np.cumsum(counts, dtype=np.int64) - counts
    counts, starts = counts[order], starts[order]
    # The place of each part: the start of its path, plus its position within the path.
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    return Paths(tuple(names.names), counts, lengths[np.repeat(starts, counts) + within])


def _below(one: Int64, other: Int64) -> Int64:
    """The rows of both. Rows with fewer dimensions are padded with zeros."""
    width = max(one.shape[1], other.shape[1])
    return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in (one, other)])


def _moved(places: Int32, by: int) -> Int32:
    return np.where(places < 0, places, places + np.int32(by))


def _looked_up(table: Int32, places: Int32) -> Int32:
    return np.where(places < 0, places, table[places]) if len(table) else places
