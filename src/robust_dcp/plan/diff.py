"""What changed between two structures, in words that name the keys: for the log, the report and the error."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.items import Form, Items, padded
from robust_dcp.report import StructureDiff

__all__ = ["diff_items", "merge_diffs"]

Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def diff_items(old: Items, new: Items) -> StructureDiff:
    """The keys that were added, removed and changed from ``old`` to ``new``, both of one rank."""
    places = {name: place for place, name in enumerate(old.names)}
    place_in_old = np.fromiter((places.get(name, -1) for name in new.names), dtype=np.intp, count=len(new.names))
    common_old, common_new = place_in_old[place_in_old >= 0], np.flatnonzero(place_in_old >= 0)
    differs = _names_that_differ(old, new, common_old, common_new)
    was = _words_by_name(old, common_old[differs])
    now = _words_by_name(new, common_new[differs])
    return StructureDiff(
        added=tuple(name for name in new.names if name not in places),
        removed=tuple(sorted(places.keys() - set(new.names))),
        changed={name: f"{was[name]} -> {now[name]}" for name in now},
    )


def _names_that_differ(old: Items, new: Items, common_old: Rows, common_new: Rows) -> Mask:
    """For each name that both have: whether its items or its path differ."""
    counts_old = np.bincount(old.name, minlength=len(old.names))
    counts_new = np.bincount(new.name, minlength=len(new.names))
    differs: Mask = counts_old[common_old] != counts_new[common_new]
    differs |= _paths_differ(old, new, common_old, common_new)
    comparable = np.flatnonzero(~differs)
    counts = counts_new[common_new[comparable]]
    rows_old = _rows_of(common_old[comparable], counts_old, counts)
    rows_new = _rows_of(common_new[comparable], counts_new, counts)
    differs[np.repeat(comparable, counts)[_rows_differ(old, new, rows_old, rows_new)]] = True
    return differs


def _rows_of(names: Rows, all_counts: Rows, counts: Rows) -> Rows:
    """The rows of the given names, name after name. Items are sorted by name, so those of one name are consecutive."""
    starts = np.cumsum(all_counts) - all_counts
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts[names], counts) + within


def _rows_differ(old: Items, new: Items, rows_old: Rows, rows_new: Rows) -> Mask:
    differs: Mask = np.zeros(len(rows_new), dtype=np.bool_)
    for before, after in (
        (old.kind, new.kind),
        (old.form, new.form),
        (old.requires_grad, new.requires_grad),
        (old.ndim, new.ndim),
        (old.replica, new.replica),
        (_places_in(new.dtypes, old.dtypes)[old.dtype], new.dtype),
        (_places_in(new.layouts, old.layouts)[old.layout], new.layout),
    ):
        differs |= before[rows_old] != after[rows_new]
    width = min(old.shape.shape[1], new.shape.shape[1])  # beyond it, the numbers of dimensions differ
    for was, now in ((old.shape, new.shape), (old.offset, new.offset), (old.size, new.size)):
        differs |= (was[rows_old, :width] != now[rows_new, :width]).any(axis=1)
    return differs


def _places_in(table: tuple[str, ...], strings: tuple[str, ...]) -> npt.NDArray[np.int32]:
    """For each of ``strings`` its place in ``table``; -1 if it is not there."""
    return np.array([table.index(text) if text in table else -1 for text in strings], dtype=np.int32)


def _paths_differ(old: Items, new: Items, common_old: Rows, common_new: Rows) -> Mask:
    before, after = old.paths, new.paths
    if before is None or after is None:
        return np.full(len(common_new), before is not after, dtype=np.bool_)
    width = max(int(before.counts.max(initial=0)), int(after.counts.max(initial=0)))
    left = padded(before.lengths, before.counts, width)[common_old]
    right = padded(after.lengths, after.counts, width)[common_new]
    differs: Mask = before.counts[common_old] != after.counts[common_new]  # an empty part has length 0
    differs |= (left != right).any(axis=1)
    return differs


def _words_by_name(items: Items, names: Rows) -> dict[str, str]:
    """Describe the items of each name in words, by the first item of the name."""
    counts = np.bincount(items.name, minlength=len(items.names))
    first = np.cumsum(counts) - counts
    words: dict[str, str] = {}
    for place in names.tolist():
        name, row = items.names[place], int(first[place])
        form = "" if items.form[row] == Form.FIXED else " (variable size)"
        path = "" if items.paths is None else " at " + "/".join(map(repr, items.paths[place]))
        more = "" if counts[place] == 1 else f" and {counts[place] - 1} more"
        words[name] = items.describe(row) + form + path + more
    return words


def merge_diffs(diffs: Iterable[StructureDiff]) -> StructureDiff:
    """Join the differences of several ranks. A key counts once, however many ranks saw it change."""
    added: set[str] = set()
    removed: set[str] = set()
    changed: dict[str, str] = {}
    for diff in diffs:
        added.update(diff.added)
        removed.update(diff.removed)
        changed.update(diff.changed)
    # A key that one rank lost and another gained has moved between ranks.
    for key in added & removed:
        changed.setdefault(key, "moved to other ranks")
    return StructureDiff(
        added=tuple(sorted(added - changed.keys())),
        removed=tuple(sorted(removed - changed.keys())),
        changed=dict(sorted(changed.items())),
    )
