"""Decodes what others have written: the JSON of small files, and the msgpack of messages and indices.

Nothing else in the package decodes either. So there is one bound for how deep a value may be nested, one answer to NaN
and to numbers that no float holds, and one error. How long the bytes may be is up to whoever reads them.
"""

from __future__ import annotations

import json
import math
import os
import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

MOST_DEPTH: Final = 64
"""Decoders call themselves for each level. With the recursion limits that some jobs set, the stack would overflow."""

_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{}'))
_AS_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

_TYPES: Final = threading.Lock()
"""msgspec inspects a type when it first meets it, and crashes if two threads do that at once."""

# No fork while another thread has it: the child would find it taken.
os.register_at_fork(before=_TYPES.acquire, after_in_parent=_TYPES.release, after_in_child=_TYPES.release)


class Undecodable(ValueError):
    """The bytes are not what was expected. The message says why."""


def from_json(data: str | bytes, kind: type[T]) -> T:
    """``data``, JSON in UTF-8, as a value of ``kind``.

    Raises:
        Undecodable: it is no JSON, nested too deep, holds a number that is not finite, or is of another kind.
    """
    try:
        _check_depth(data.encode(errors="surrogatepass") if isinstance(data, str) else data)
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if r"\u" in text:  # half of a pair is no character, but for the bytes of a path that is no UTF-8
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        raise Undecodable(f"{error}") from None
    return converted(value, kind)


def converted(value: object, kind: type[T]) -> T:
    """A value that was decoded, or a part of one, as a value of ``kind``.

    Raises:
        Undecodable: it is of another kind.
    """
    try:
        with _TYPES:
            return msgspec.convert(value, kind)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Undecodable(f"{error}") from None


def from_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """``data``, msgpack, as a value of ``kind``. Fields that ``kind`` does not have are refused or skipped, as it says.

    Raises:
        Undecodable: it is of another kind, malformed, or has bytes left over.
    """
    with _TYPES:
        if kind not in _decoders:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value: T = _decoders[kind].decode(data)
        return value
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:  # a text that is not UTF-8 is a ValueError
        raise Undecodable(f"{error}") from None


def _check_depth(data: bytes) -> None:
    """Make sure that brackets outside of texts are in pairs, and not too many in each other."""
    # An escaped quote ends no text. A backslash is in texts only, and the first of a run begins an escape.
    quotes = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
    left = b"".join(quotes.split(b'"')[::2]).translate(_AS_BRACKETS)
    for _ in range(MOST_DEPTH):
        if not left:
            return
        left = left.replace(b"[]", b"")
    if left:
        raise ValueError(f"its brackets are not in pairs, or more than {MOST_DEPTH} are in each other")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is larger than a float can be")
    return number
