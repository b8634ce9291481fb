"""DCP's ``planner_data``: where in the nested state dict each name lies.

Owns the opcodes of that dict; called by ``emit``. The only part of ``.metadata`` that costs a turn of a Python loop for
each name (about 1 us), because paths are ragged and come as tuples.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Final

from robust_dcp.storage.metadata.pickled.columns import MetadataColumns
from robust_dcp.storage.metadata.pickled.memo import Memo
from robust_dcp.storage.metadata.pickled.opcodes import frame_header, spliced, text, tuple_of

__all__ = ["planner_data_items"]

_SHARED_PARTS: Final = 1 << 16
"""Distinct parts of paths that go into the memo. Keys such as ``weight`` occur all over and early; beyond these, parts
are mostly whole names of one tensor each, of which a table would cost more than it saves."""

_FRAME_PIECES: Final = 1 << 16
"""Pieces of opcodes in a frame, which is then of about 1 MiB."""

_REMEMBERED: Final = struct.Struct("<cI")
_INT32: Final = struct.Struct("<ci")
_IS_INT32: Final = range(-(1 << 31), 1 << 31)


def planner_data_items(columns: MetadataColumns, memo: Memo) -> Iterator[bytes]:
    """Add each name and its path to the dict on the stack."""
    if columns.paths is None:
        return
    parts = _Parts(memo.end)
    own_path = pickle.TUPLE1 + pickle.SETITEM
    out: list[bytes] = []
    for index, (name, path) in enumerate(zip(columns.names, columns.paths, strict=True), start=memo.name):
        own = _REMEMBERED.pack(pickle.LONG_BINGET, index)
        if len(path) == 1 and path[0] == name:
            out += (own, own, own_path)
        else:
            before, behind = tuple_of(len(path))
            out += (own, before, *map(parts.push, path), behind, pickle.SETITEM)
        if len(out) > _FRAME_PIECES:
            yield _framed(out)
            out = []
    yield _framed(out)


class _Parts:
    """Parts of paths, those that were pushed before by their place in the memo."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._known: dict[str, bytes] = {}

    def push(self, part: str | int) -> bytes:
        """Opcodes that push ``part``."""
        if not isinstance(part, str):
            if type(part) is int and part in _IS_INT32:
                return _INT32.pack(pickle.BININT, part)
            return spliced(part)
        known = self._known.get(part)
        if known is not None:
            return known
        if len(self._known) == _SHARED_PARTS:
            return text(part)
        self._known[part] = _REMEMBERED.pack(pickle.LONG_BINGET, self._next)
        self._next += 1
        return text(part) + pickle.MEMOIZE


def _framed(opcodes: list[bytes]) -> bytes:
    joined = b"".join(opcodes)
    return frame_header(len(joined)) + joined
