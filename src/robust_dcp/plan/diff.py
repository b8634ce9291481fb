"""What changed between two structures, in words that name the keys: for the log, the report and the error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from robust_dcp.items import Form, Items
from robust_dcp.report import StructureDiff

Rows = npt.NDArray[np.intp]

_MAX_KEYS: Final = 200
"""How many keys of each kind travel, and are in an error. This bounds both if everything has changed."""

_SLAB_ROWS: Final = 1 << 15


def diff_items(old_of_ranks: Sequence[Items], new_of_ranks: Sequence[Items]) -> StructureDiff:
    """The keys that were added, removed and changed. A key counts once, however many ranks saw it change."""
    added: set[str] = set()
    removed: set[str] = set()
    changed: dict[str, str] = {}
    for old, new in zip(old_of_ranks, new_of_ranks, strict=True):
        if old is not new:
            places = {name: place for place, name in enumerate(old.names)}
            place_in_old = np.fromiter((places.get(name, -1) for name in new.names), np.intp, len(new.names))
            common_old, common_new = place_in_old[place_in_old >= 0], np.flatnonzero(place_in_old >= 0)
            differs = _hashes_of_names(old)[common_old] != _hashes_of_names(new)[common_new]
            was, now = _words_by_name(old, common_old[differs]), _words_by_name(new, common_new[differs])
            added.update(name for name in new.names if name not in places)
            removed.update(places.keys() - set(new.names))
            changed.update({name: f"{was[name]} -> {now[name]}" for name in now})
    # A key that one rank lost and another gained has moved between ranks.
    for key in added & removed:
        changed.setdefault(key, "moved to other ranks")
    return StructureDiff(
        added=tuple(sorted(added - changed.keys())),
        removed=tuple(sorted(removed - changed.keys())),
        changed=dict(sorted(changed.items())),
    )


def bounded(diff: StructureDiff) -> StructureDiff:
    """The first keys of each kind."""
    changed = dict(list(diff.changed.items())[:_MAX_KEYS])
    return StructureDiff(diff.added[:_MAX_KEYS], diff.removed[:_MAX_KEYS], changed)


def _hashes_of_names(items: Items) -> npt.NDArray[np.uint64]:
    """uint64 ``[names]``: a hash over the items and the path of each name. It is for words only, so equal hashes are
    taken as equal."""
    properties = np.array([hash(each) for each in items.properties], dtype=np.int64)
    sizes = np.array([hash(each) for each in items.sizes], dtype=np.int64)
    tensors = (properties[items.properties_of], sizes[items.shape], sizes[items.offset], sizes[items.size])
    hashes = _hashes_of_rows(items.kind, items.form, items.replica, *tensors)
    paths = [0] * len(items.names) if items.paths is None else list(map(hash, items.paths))
    of_names = _hashes_of_rows(np.array(paths, dtype=np.int64), np.bincount(items.name, minlength=len(items.names)))
    np.add.at(of_names, items.name, hashes)
    return of_names


def _hashes_of_rows(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A hash of 64 bits for each row of some columns of N integers each: a polynomial, and SplitMix64's finalizer."""
    hashes: npt.NDArray[np.uint64] = np.zeros(len(columns[0]), dtype=np.uint64)
    for at in range(0, len(hashes), _SLAB_ROWS):
        slab = hashes[at : at + _SLAB_ROWS]  # it stays in a cache
        for column in columns:
            slab *= np.uint64(0x9E3779B97F4A7C15)
            slab += column[at : at + _SLAB_ROWS].astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            slab ^= slab >> np.uint64(shift)
            slab *= np.uint64(factor)
        slab ^= slab >> np.uint64(31)
    return hashes


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
