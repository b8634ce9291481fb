"""What this process remembers from one save or load to the next, so that a repeated one is cheap.

There is one rule: the least recently used entries go first, when there are too many, or when all take too much memory.
So a hundred changes of a state dict take no more memory than eight. A cache never decides whether an entry is still
valid. The code that owns it checks that each time, or compares by value. Nobody has to keep a planner or a writer
between saves for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ALL: list[Cache[Any, Any]] = []


class Cache(Generic[K, V]):
    """Entries of one kind, in the order of their last use. Several threads may use it.

    Args:
        max_nbytes: how much memory all entries may take together. The latest entry stays even if it is larger.
        max_entries: how many entries there may be. A job saves and loads few kinds of state dicts in turn, and where
            none fits, each entry is looked at.
    """

    def __init__(self, *, max_nbytes: int, max_entries: int = 8) -> None:
        self._max_nbytes = max_nbytes
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        _ALL.append(self)

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

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Store ``value``, which takes roughly ``nbytes`` of memory, as the latest entry, and drop the oldest entries
        until the bounds hold.
        """
        with self._lock:
            self._nbytes += nbytes - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, nbytes
            while len(self._entries) > self._max_entries or (
                self._nbytes > self._max_nbytes and len(self._entries) > 1
            ):
                self._nbytes -= self._entries.popitem(last=False)[1][1]

    def forget(self, key: K) -> None:
        """Drop the entry under ``key``, if there is one."""
        with self._lock:
            self._nbytes -= self._entries.pop(key, (None, 0))[1]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0


def clear_caches() -> None:
    """Forget everything, as if this process had never saved."""
    for cache in _ALL:
        cache.clear()
