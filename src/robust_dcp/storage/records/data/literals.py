"""Numbers, text and bytes in a pickle: reads the argument of an opcode and returns its value.

Before anything is taken, every length is compared with the bytes that are left. ``machine`` calls this module.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

from robust_dcp.storage.records.data.limits import Malformed

__all__ = ["LITERALS", "UINT32", "UINT64", "Cursor", "int_of"]

_MAX_DIGITS: Final = 4300  # in a number in text; Python has the same limit

_UINT16: Final = struct.Struct("<H")
_INT32: Final = struct.Struct("<i")
UINT32: Final = struct.Struct("<I")
UINT64: Final = struct.Struct("<Q")
_FLOAT64: Final = struct.Struct(">d")


class Cursor:
    """A place in the bytes of a pickle.

    Args:
        data: holds the pickle. More may follow it.
        at: the place of the next byte.
        encoding: the encoding of strings that Python 2 pickled.
    """

    __slots__ = ("at", "data", "encoding", "nbytes")

    def __init__(self, data: bytes, at: int, encoding: str) -> None:
        self.data = data
        self.at = at
        self.encoding = encoding
        self.nbytes = len(data)

    def take(self, nbytes: int) -> bytes:
        """The next bytes. Raises :class:`Malformed` if there are fewer."""
        end = self.at + nbytes
        if nbytes < 0 or end > self.nbytes:
            raise Malformed(f"an opcode asks for {nbytes} bytes where {self.nbytes - self.at} are left")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, form: struct.Struct) -> Any:
        """The next number, in this format."""
        (value,) = form.unpack(self.take(form.size))
        return value

    def line(self) -> bytes:
        """The bytes up to the end of the line. The cursor moves past it."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise Malformed("a line of text in the pickle has no end")
        line = self.data[self.at : end]
        self.at = end + 1
        return line


def int_of(text: bytes) -> int:
    """The number with the decimal digits ``text``."""
    if len(text) > _MAX_DIGITS or not text.removeprefix(b"-").isdigit():
        raise Malformed("a number in the pickle is not written in decimal digits")
    return int(text)


def _int_text(cursor: Cursor) -> int:
    text = cursor.line()
    return {b"00": False, b"01": True}[text] if text in (b"00", b"01") else int_of(text)


def _text(counted: Callable[[Cursor], int]) -> Callable[[Cursor], str]:
    return lambda cursor: str(cursor.take(counted(cursor)), "utf-8", "surrogatepass")


def _bytes(counted: Callable[[Cursor], int]) -> Callable[[Cursor], bytes]:
    return lambda cursor: cursor.take(counted(cursor))


def _string(counted: Callable[[Cursor], int]) -> Callable[[Cursor], str]:
    return lambda cursor: str(cursor.take(counted(cursor)), cursor.encoding)


def _long(counted: Callable[[Cursor], int]) -> Callable[[Cursor], int]:
    return lambda cursor: int.from_bytes(cursor.take(counted(cursor)), "little", signed=True)


def _in_1(cursor: Cursor) -> int:
    return cursor.take(1)[0]


def _in_4(cursor: Cursor) -> int:
    return int(cursor.number(UINT32))


def _in_4_signed(cursor: Cursor) -> int:
    return int(cursor.number(_INT32))


def _in_8(cursor: Cursor) -> int:
    return int(cursor.number(UINT64))


_LITERALS: Final[dict[bytes, Callable[[Cursor], Any]]] = {
    pickle.NONE: lambda _: None,
    pickle.NEWTRUE: lambda _: True,
    pickle.NEWFALSE: lambda _: False,
    pickle.EMPTY_TUPLE: lambda _: (),
    pickle.EMPTY_LIST: lambda _: [],
    pickle.EMPTY_DICT: lambda _: {},
    pickle.BININT1: _in_1,
    pickle.BININT2: lambda cursor: cursor.number(_UINT16),
    pickle.BININT: _in_4_signed,
    pickle.INT: _int_text,
    pickle.LONG: lambda cursor: int_of(cursor.line().removesuffix(b"L")),
    pickle.LONG1: _long(_in_1),
    pickle.LONG4: _long(_in_4_signed),
    pickle.BINFLOAT: lambda cursor: cursor.number(_FLOAT64),
    pickle.FLOAT: lambda cursor: float(cursor.line()),
    pickle.SHORT_BINUNICODE: _text(_in_1),
    pickle.BINUNICODE: _text(_in_4),
    pickle.BINUNICODE8: _text(_in_8),
    pickle.UNICODE: lambda cursor: str(cursor.line(), "raw-unicode-escape"),
    pickle.SHORT_BINBYTES: _bytes(_in_1),
    pickle.BINBYTES: _bytes(_in_4),
    pickle.BINBYTES8: _bytes(_in_8),
    pickle.BYTEARRAY8: lambda cursor: bytearray(cursor.take(_in_8(cursor))),
    pickle.SHORT_BINSTRING: _string(_in_1),
    pickle.BINSTRING: _string(_in_4_signed),
}

LITERALS: Final = {code[0]: read for code, read in _LITERALS.items()}
"""The opcodes that push a value of their own. Each reads its value at the cursor."""
