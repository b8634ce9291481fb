"""What changed between two structures, in words that name the keys.

``plan.planning`` uses it for the log line, the report and ``StructureChanged``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.structure.attributes import attributes_of
from robust_dcp.plan.structure.ragged import padded
from robust_dcp.plan.structure.table import Form, StructureTable

__all__ = ["StructureDiff", "diff_tables", "merge_diffs"]

_SHOWN = 8
"""How many keys of each kind the one-line summary names."""


@dataclass(frozen=True)
class StructureDiff:
    """The keys that only one of two structures has, and the keys that differ between them.

    ``changed`` maps a key to a text that says what it was and what it is now.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        parts = []
        if self.added:
            parts.append(f"added {_listed(self.added)}")
        if self.removed:
            parts.append(f"removed {_listed(self.removed)}")
        if self.changed:
            parts.append(f"changed {_listed(f'{key} ({how})' for key, how in self.changed.items())}")
        return "; ".join(parts) or "no change"


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + rest


Rows = npt.NDArray[np.intp]


def diff_tables(old: StructureTable, new: StructureTable) -> StructureDiff:
    """The keys that were added, removed and changed from ``old`` to ``new``."""
    common_old, common_new = _common_names(old, new)
    differs = _names_that_differ(old, new, common_old, common_new)
    changed = [new.names[name] for name in common_new[differs].tolist()]
    was = _words_by_name(old, common_old[differs])
    now = _words_by_name(new, common_new[differs])
    return StructureDiff(
        added=_others(new.names, common_new),
        removed=_others(old.names, common_old),
        changed={name: f"{was[name]} -> {now[name]}" for name in changed},
    )


def _common_names(old: StructureTable, new: StructureTable) -> tuple[Rows, Rows]:
    """For each name that is in both tables, its place in ``old`` and its place in ``new``, in the same order."""
    if old.names is new.names:
        same = np.arange(len(old.names))
        return same, same
    places = {name: place for place, name in enumerate(old.names)}
    found = np.fromiter((places.get(name, -1) for name in new.names), dtype=np.intp, count=len(new.names))
    return found[found >= 0], np.flatnonzero(found >= 0)


def _others(names: tuple[str, ...], common: Rows) -> tuple[str, ...]:
    is_other = np.ones(len(names), dtype=np.bool_)
    is_other[common] = False
    return tuple(names[place] for place in np.flatnonzero(is_other).tolist())


def _names_that_differ(
    old: StructureTable, new: StructureTable, common_old: Rows, common_new: Rows
) -> npt.NDArray[np.bool_]:
    """For each name in both tables: whether its items, its path or its facts differ."""
    counts_old = np.bincount(old.name_ids, minlength=len(old.names))
    counts_new = np.bincount(new.name_ids, minlength=len(new.names))
    differs: npt.NDArray[np.bool_] = counts_old[common_old] != counts_new[common_new]
    differs |= _paths_differ(old, new, common_old, common_new)
    comparable = np.flatnonzero(~differs)
    counts = counts_new[common_new[comparable]]
    rows_old = _items_of(common_old[comparable], counts_old, counts)
    rows_new = _items_of(common_new[comparable], counts_new, counts)
    row_differs = _rows_differ(old, new, rows_old, rows_new)
    differs[np.repeat(comparable, counts)[row_differs]] = True
    if old.attributes != new.attributes:
        before, after = _facts_by_name(old), _facts_by_name(new)
        names = [new.names[name] for name in common_new.tolist()]
        differs |= np.array([before.get(name) != after.get(name) for name in names], dtype=np.bool_)
    return differs


def _facts_by_name(table: StructureTable) -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {}
    for attribute, by_name in attributes_of(table.attributes).items():
        for name, fact in by_name.items():
            facts.setdefault(name, {})[attribute] = fact
    return facts


def _items_of(names: Rows, all_counts: Rows, counts: Rows) -> Rows:
    """The items of the given names, name after name. Items are sorted by name, so those of one name are consecutive."""
    starts = np.cumsum(all_counts) - all_counts
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts[names], counts) + within


def _rows_differ(old: StructureTable, new: StructureTable, rows_old: Rows, rows_new: Rows) -> npt.NDArray[np.bool_]:
    differs = np.zeros(len(rows_new), dtype=np.bool_)
    for before, after in (
        (old.kinds, new.kinds),
        (old.forms, new.forms),
        (old.requires_grad, new.requires_grad),
        (old.ndims, new.ndims),
        (old.replicas, new.replicas),
        (_shared_ids(old.dtypes, new.dtypes)[old.dtype_ids], new.dtype_ids),
        (_shared_ids(old.layouts, new.layouts)[old.layout_ids], new.layout_ids),
    ):
        differs |= before[rows_old] != after[rows_new]
    width = max(int(old.ndims.max(initial=0)), int(new.ndims.max(initial=0)))
    for was, now in ((old.shapes, new.shapes), (old.offsets, new.offsets), (old.sizes, new.sizes)):
        left, right = padded(was, old.ndims, width, fill=0), padded(now, new.ndims, width, fill=0)
        differs |= (left[rows_old] != right[rows_new]).any(axis=1)
    return differs


def _shared_ids(old: tuple[str, ...], new: tuple[str, ...]) -> npt.NDArray[np.int32]:
    """For each string of ``old`` its place in ``new``; -1 if it is not there."""
    return np.array([new.index(text) if text in new else -1 for text in old], dtype=np.int32)


def _paths_differ(
    old: StructureTable, new: StructureTable, common_old: Rows, common_new: Rows
) -> npt.NDArray[np.bool_]:
    before, after = old.paths, new.paths
    if before is None or after is None:
        return np.full(len(common_new), before is not after, dtype=np.bool_)
    width = max(int(before.counts.max(initial=0)), int(after.counts.max(initial=0)))
    left = padded(before.lengths, before.counts, width, fill=0)[common_old]
    right = padded(after.lengths, after.counts, width, fill=0)[common_new]
    differs: npt.NDArray[np.bool_] = before.counts[common_old] != after.counts[common_new]  # an empty part has length 0
    differs |= (left != right).any(axis=1)
    return differs


def _words_by_name(table: StructureTable, names: Rows) -> dict[str, str]:
    """Describe the items of each name in words, by the first item of the name."""
    counts = np.bincount(table.name_ids, minlength=len(table.names))
    first = np.cumsum(counts) - counts
    words: dict[str, str] = {}
    facts = _facts_by_name(table) if len(names) else {}
    for name in names.tolist():
        item = int(first[name])
        form = "" if table.forms[item] == Form.FIXED else " (variable size)"
        path = table.describe_path(item)
        more = "" if counts[name] == 1 else f" and {counts[name] - 1} more"
        told = "".join(f" with {what} {fact!r}" for what, fact in facts.get(table.names[name], {}).items())
        words[table.names[name]] = table.describe_item(item) + form + (f" at {path}" if path else "") + told + more
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
