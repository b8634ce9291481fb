"""Pickle opcodes, protocol 4, as bytes: what the records and fragments of ``.metadata`` are put together from.

Owns how values, memo references and frames are spelt; never knows of DCP's classes. Called by the rest of the package.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, Final

__all__ = [
    "FRAME_HEADER_NBYTES",
    "PROTOCOL_4",
    "frame_header",
    "memoized",
    "remembered",
    "spliced",
    "text",
    "tuple_of",
]

PROTOCOL_4: Final = pickle.PROTO + b"\x04"
FRAME_HEADER_NBYTES: Final = 9

_TUPLES: Final = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


def spliced(value: Any) -> bytes:
    """Opcodes that push ``value`` and leave the memo alone, so that memo indices around them stay what they are.

    By the real pickler, in protocol 3: its opcodes are valid in protocol 4, and it has no frames, which would have to
    be taken apart. No value may contain itself.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue().removeprefix(pickle.PROTO + b"\x03").removesuffix(pickle.STOP)


def text(value: str) -> bytes:
    """Opcodes that push ``value``."""
    encoded = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def memoized(pushed: bytes) -> bytes:
    """Opcodes that give the value that ``pushed`` pushes the next memo index, and leave the stack as it was."""
    return pushed + pickle.MEMOIZE + pickle.POP


def remembered(index: int) -> bytes:
    """Opcodes that push the value with memo index ``index``."""
    return pickle.BINGET + bytes([index]) if index < 256 else pickle.LONG_BINGET + struct.pack("<I", index)


def tuple_of(count: int) -> tuple[bytes, bytes]:
    """The opcodes before and behind those that push the ``count`` members of a tuple."""
    return (b"", _TUPLES[count]) if count < len(_TUPLES) else (pickle.MARK, pickle.TUPLE)


def frame_header(nbytes: int) -> bytes:
    """Says that the next ``nbytes`` bytes, all of whole opcodes, are to be read at once."""
    return pickle.FRAME + struct.pack("<Q", nbytes)
