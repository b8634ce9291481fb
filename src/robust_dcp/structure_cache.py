"""What this process remembers about state dicts from one save to the next, so that a repeated save is cheap.

Each table forgets the least recently used entries first; that rule is here. This module never decides whether an entry
is still valid. The code that owns a table checks that in every save, or compares by value.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["CACHE", "StructureCache", "Table"]

K = TypeVar("K")
V = TypeVar("V")


class Table(Generic[K, V]):
    """Entries of one kind, in the order of their last use. Several threads may use a table.

    Args:
        nbytes_of: returns roughly how much memory an entry takes. It is called when the entry is put in.
        max_nbytes: how much memory all entries may take together. The latest entry stays even if it is larger.
        max_entries: how many entries there may be, for tables in which each entry costs time in every save.
    """

    def __init__(self, nbytes_of: Callable[[K, V], int], *, max_nbytes: int, max_entries: int | None = None) -> None:
        self._nbytes_of = nbytes_of
        self._max_nbytes = max_nbytes
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Roughly how much memory all entries take."""
        return self._nbytes

    def get(self, key: K) -> V | None:
        """Return the value under ``key``, or ``None``. This counts as a use of the entry."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def latest_first(self) -> list[tuple[K, V]]:
        """All entries, the most recently used first. This does not count as a use."""
        with self._lock:
            return [(key, value) for key, (value, _) in reversed(self._entries.items())]

    def put(self, key: K, value: V) -> None:
        """Store ``value`` as the latest entry, and drop the oldest entries until the bounds hold."""
        nbytes = self._nbytes_of(key, value)
        with self._lock:
            self._remove(key)
            self._entries[key] = value, nbytes
            self._nbytes += nbytes
            while len(self._entries) > 1 and self._is_too_large():
                self._remove(next(iter(self._entries)))

    def _is_too_large(self) -> bool:
        return self._nbytes > self._max_nbytes or len(self._entries) > (self._max_entries or len(self._entries))

    def _remove(self, key: K) -> None:
        _, nbytes = self._entries.pop(key, (None, 0))
        self._nbytes -= nbytes

    def forget(self, key: K) -> None:
        """Drop the entry under ``key``, if there is one."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0


class StructureCache:
    """All tables of a process, by name."""

    def __init__(self) -> None:
        self._tables: dict[str, Table[object, object]] = {}

    def table(
        self, name: str, nbytes_of: Callable[[K, V], int], *, max_nbytes: int, max_entries: int | None = None
    ) -> Table[K, V]:
        """Make a table. The arguments are those of :class:`Table`."""
        table = Table(nbytes_of, max_nbytes=max_nbytes, max_entries=max_entries)
        self._tables[name] = table  # type: ignore[assignment]
        return table

    @property
    def nbytes(self) -> dict[str, int]:
        """Roughly how much memory each table takes."""
        return {name: table.nbytes for name, table in self._tables.items()}

    def clear(self) -> None:
        """Forget everything, as if this process had never saved."""
        for table in self._tables.values():
            table.clear()


CACHE = StructureCache()
"""The tables of this process. Because of them nobody has to keep a planner or writer between saves."""
