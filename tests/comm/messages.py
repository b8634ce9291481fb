"""Messages that the tests of this folder send."""

from __future__ import annotations

import msgspec


class Note(msgspec.Struct, frozen=True):
    rank: int
    data: bytes = b""


class OtherNote(msgspec.Struct, frozen=True):
    text: str
