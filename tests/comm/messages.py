"""Messages that the tests of this folder send."""

from __future__ import annotations

import msgspec


class Note(msgspec.Struct, frozen=True):
    rank: int
    data: bytes = b""


class OtherNote(msgspec.Struct, frozen=True):
    text: str


class Columns(msgspec.Struct, frozen=True):
    """``shared`` is equal on several ranks, ``own`` on none."""

    names: tuple[str, ...]
    shared: bytes
    own: bytes
    note: str | None = None
