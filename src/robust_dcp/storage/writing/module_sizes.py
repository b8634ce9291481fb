"""How many bytes of a checkpoint belong to which module, by the names of its items.

This module makes a tree of bounded size out of any number of names. ``save_report`` puts it into the report of a save.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from robust_dcp.report_file import Modules, shortened

__all__ = ["module_sizes"]

_MOST_MODULES: Final = 400
_MOST_PARTS: Final = 64
"""How many parts of one module are listed, the largest first."""

_MOST_LOOKED_AT: Final = 20_000
"""A module with more parts than this has none listed: nobody could see them."""

_NAME_LENGTH: Final = 80

# It sorts before all other characters. So the names in a module stand together, though "a-b" would come between "a" and
# "a.b".
_SEPARATOR: Final = "\0"
_AFTER_SEPARATOR: Final = "\1"


def module_sizes(names: Sequence[str], nbytes: npt.NDArray[np.int64]) -> Modules:
    """The tree of modules, with at most 400 rows. Of every module that is listed, the largest parts are.

    Args:
        names: FQNs, such as ``layers.0.attention.wq.weight``.
        nbytes: int64 ``[N]``, the bytes of each.
    """
    pieces = sorted((name.replace(".", _SEPARATOR), place) for place, name in enumerate(names))
    ordered = [name for name, _ in pieces]
    until = np.concatenate(([0], np.cumsum(nbytes[[place for _, place in pieces]]))).tolist()

    def size(begin: int, end: int) -> int:
        return int(until[end] - until[begin])

    listed: list[tuple[str, int, int]] = [("", -1, size(0, len(ordered)))]
    # Modules to open, the largest first: (-bytes, row, prefix, first name, end).
    closed = [(-listed[0][2], 0, "", 0, len(ordered))]
    while closed and len(listed) < _MOST_MODULES:
        _, row, prefix, begin, end = heapq.heappop(closed)
        parts = _parts(ordered, prefix, begin, end)
        parts = heapq.nlargest(_MOST_PARTS, parts, key=lambda part: size(part[1], part[2]))
        for part, first, last in parts[: _MOST_MODULES - len(listed)]:
            own = size(first, last)
            if own == 0:
                break
            listed.append((_shown(part, prefix), row, own))
            heapq.heappush(closed, (-own, len(listed) - 1, part, first, last))
    return Modules(
        name=tuple(name for name, _, _ in listed),
        parent=tuple(parent for _, parent, _ in listed),
        nbytes=tuple(own for _, _, own in listed),
    )


def _parts(names: Sequence[str], prefix: str, begin: int, end: int) -> list[tuple[str, int, int]]:
    """The parts of a module: for each its full name, the place of its first name, and the end of its names.

    A chain of modules that hold nothing but each other counts as one part.
    """
    while True:
        found: list[tuple[str, int, int]] = []
        first = begin
        while first < end:
            if len(found) == _MOST_LOOKED_AT:
                return []
            part = _first_part(names[first], prefix)
            last = bisect_left(names, part + _AFTER_SEPARATOR, first, end)
            found.append((part, first, last))
            first = last
        if len(found) != 1 or found[0][0] == prefix or found[0][0] == names[begin]:
            return [part for part in found if part[0] != prefix]
        prefix = found[0][0]


def _first_part(name: str, prefix: str) -> str:
    """``a.b`` for the name ``a.b.c`` in the module ``a``."""
    start = len(prefix) + len(_SEPARATOR) if prefix else 0
    stop = name.find(_SEPARATOR, start)
    return name if stop < 0 else name[:stop]


def _shown(part: str, prefix: str) -> str:
    own = part[len(prefix) + len(_SEPARATOR) :] if prefix else part
    return shortened(own.replace(_SEPARATOR, "."), _NAME_LENGTH)
