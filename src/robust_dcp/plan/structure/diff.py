"""What changed between two structures, in words that name keys.

Pure; used by ``plan.planning`` for the log line, the report and ``StructureChanged``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from robust_dcp.plan.structure.table import Form, StructureTable

__all__ = ["StructureDiff", "diff_tables", "merge_diffs"]

_SHOWN = 8
"""Keys of each kind that the one-line summary spells out."""


@dataclass(frozen=True)
class StructureDiff:
    """The keys that one structure has and another does not, and those that both have but not alike.

    ``changed`` maps a key to what it was and what it is.
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


Rows = dict[str, list[tuple[object, ...]]]


def _rows_by_name(table: StructureTable) -> Rows:
    """What stands in the columns, by name: compared as it is, put into words only where it differs."""
    starts = (table.starts * 8).tolist()
    shapes, offsets, sizes = table.shapes.tobytes(), table.offsets.tobytes(), table.sizes.tobytes()
    dtypes = [table.dtypes[n] for n in table.dtype_ids.tolist()]
    layouts = [table.layouts[n] for n in table.layout_ids.tolist()]
    flags = zip(table.kinds.tolist(), table.forms.tolist(), table.requires_grad.tolist(), strict=True)
    rows: Rows = defaultdict(list)
    for item, (name, flag) in enumerate(zip(table.name_ids.tolist(), flags, strict=True)):
        dims = slice(starts[item], starts[item + 1])
        rows[table.names[name]].append(
            (flag, dtypes[item], layouts[item], shapes[dims], offsets[dims], sizes[dims], table.paths[name])
        )
    return rows


def diff_tables(old: StructureTable, new: StructureTable) -> StructureDiff:
    """The keys that were added, removed and changed from ``old`` to ``new``."""
    before, after = _rows_by_name(old), _rows_by_name(new)
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    was, now = _words_by_name(old, changed), _words_by_name(new, changed)
    return StructureDiff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed={name: f"{was[name]} -> {now[name]}" for name in sorted(changed)},
    )


def _words_by_name(table: StructureTable, names: set[str]) -> dict[str, str]:
    """The items called ``names`` in words, each name by its first item."""
    wanted = np.flatnonzero(np.array([name in names for name in table.names], dtype=np.bool_)[table.name_ids])
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for item in wanted.tolist():
        name = table.names[table.name_ids[item]]
        counts[name] += 1
        if name not in first:
            form = "" if table.forms[item] == Form.FIXED else " (variable size)"
            path = table.describe_path(item)
            first[name] = f"{table.describe_item(item)}{form}" + (f" at {path}" if path else "")
    return {
        name: words if counts[name] == 1 else f"{words} and {counts[name] - 1} more" for name, words in first.items()
    }


def merge_diffs(diffs: Iterable[StructureDiff]) -> StructureDiff:
    """One diff for several ranks: a key counts once, however many ranks saw it change."""
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
