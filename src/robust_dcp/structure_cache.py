"""What this process remembers of state dicts from one save to the next, so that a repeated save costs little.

Owns the one rule by which things are forgotten: of each table, what was used least recently goes first. Never says
whether what is remembered still holds: each owner of a table proves that in every save, or compares by value.
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
    """Things of one kind, the one used last at the end; safe to use from several threads.

    Args:
        nbytes_of: memory that an entry takes, about; asked for when it is put in.
        max_nbytes: that all entries may take together. The latest stays, whatever it takes.
        max_entries: a bound of their number as well, where each of them costs something in every save.
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
        """Memory that all entries take, about."""
        return self._nbytes

    def get(self, key: K) -> V | None:
        """What is known under ``key``, which is used by that."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def latest_first(self) -> list[tuple[K, V]]:
        """All entries, none of which is used by that."""
        with self._lock:
            return [(key, value) for key, (value, _) in reversed(self._entries.items())]

    def put(self, key: K, value: V) -> None:
        """Keep ``value`` as the latest; what is beyond the bounds goes."""
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
        """Drop an entry, if it is there."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0


class StructureCache:
    """Tables by name."""

    def __init__(self) -> None:
        self._tables: dict[str, Table[object, object]] = {}

    def table(
        self, name: str, nbytes_of: Callable[[K, V], int], *, max_nbytes: int, max_entries: int | None = None
    ) -> Table[K, V]:
        """A new table; the arguments are those of :class:`Table`."""
        table = Table(nbytes_of, max_nbytes=max_nbytes, max_entries=max_entries)
        self._tables[name] = table  # type: ignore[assignment]
        return table

    @property
    def nbytes(self) -> dict[str, int]:
        """Memory that each table takes, about."""
        return {name: table.nbytes for name, table in self._tables.items()}

    def clear(self) -> None:
        """Forget everything, as if this process had not saved yet."""
        for table in self._tables.values():
            table.clear()


CACHE = StructureCache()
"""Of this process: nothing depends on keeping a planner or writer between saves."""
