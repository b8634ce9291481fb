"""What changed between two structures, in words that name keys.

Pure; used by ``plan.agreement`` for the log line, the report and ``StructureChanged``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from robust_dcp.plan.structure.table import StructureTable

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


def _rows_by_name(table: StructureTable) -> dict[str, tuple[str, ...]]:
    rows: dict[str, list[str]] = defaultdict(list)
    for item in range(len(table)):
        form = "" if table.forms[item] == 0 else " (variable size)"
        path = table.describe_path(item)
        rows[table.names[table.name_ids[item]]].append(
            f"{table.describe_item(item)}{form}" + (f" at {path}" if path else "")
        )
    return {name: tuple(sorted(found)) for name, found in rows.items()}


def diff_tables(old: StructureTable, new: StructureTable) -> StructureDiff:
    """The keys that were added, removed and changed from ``old`` to ``new``."""
    before, after = _rows_by_name(old), _rows_by_name(new)
    return StructureDiff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed={
            name: f"{_brief(before[name])} -> {_brief(after[name])}"
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        },
    )


def _brief(rows: tuple[str, ...]) -> str:
    return rows[0] if len(rows) == 1 else f"{rows[0]} and {len(rows) - 1} more"


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
