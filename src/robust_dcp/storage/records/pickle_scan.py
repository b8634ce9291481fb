"""A look through a pickle before anything unpickles it: opcode by opcode, most of them a run at a time.

Owns the walk. Never builds anything of what it walks over. Called by ``metadata_file`` for files without a checksum.
"""

from __future__ import annotations

import io
import pickletools
import re
from functools import cache
from typing import Any, Final

__all__ = ["check_memo"]

_LONG_BINPUT: Final = ord("r")
_STOP: Final = ord(".")

_RUN_LENGTH: Final = 4096
"""Opcodes matched at once. The regular expression engine remembers each until its run has ended."""


def check_memo(pickled: bytes) -> None:
    """Refuse a memo index that no pickle of this length can have.

    A damaged byte may make an index of 4 billion, for which the unpickler would allocate, and fill, tens of GiB.

    Raises:
        ValueError: there is such an index, or this is no pickle.
    """
    run, others = _opcodes()
    stream = io.BytesIO(pickled)
    at = 0
    while True:
        # Opcodes whose arguments are of fixed length, and short strings: all but a few in a million.
        while (found := run.match(pickled, at)) is not None and found.end() > at:
            at = found.end()
        code = pickled[at] if at < len(pickled) else -1
        if code == _STOP:
            return
        opcode = others.get(code)
        if opcode is None:
            raise ValueError(f"byte {at} of {len(pickled)} is no opcode of a pickle, or the pickle ends there")
        stream.seek(at + 1)
        argument = opcode.arg.reader(stream)
        if code == _LONG_BINPUT and argument > len(pickled):
            raise ValueError(f"memo index {argument} in a pickle of {len(pickled)} bytes")
        at = stream.tell()


@cache
def _opcodes() -> tuple[re.Pattern[bytes], dict[int, Any]]:
    """What matches a run of opcodes that need no look at their arguments, and the other opcodes, by code."""
    by_length: dict[int, list[bytes]] = {}
    others: dict[int, Any] = {}
    short_strings: list[bytes] = []
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin-1")
        nbytes = 0 if opcode.arg is None else opcode.arg.n
        if opcode.name in ("SHORT_BINUNICODE", "SHORT_BINBYTES", "SHORT_BINSTRING"):
            short_strings.append(code)
        elif opcode.name == "LONG_BINPUT" or nbytes < 0:
            others[code[0]] = opcode
        elif code[0] != _STOP:
            by_length.setdefault(nbytes, []).append(code)
    fixed = [
        b"[" + b"".join(map(re.escape, codes)) + b"]" + b".{%d}" % nbytes for nbytes, codes in sorted(by_length.items())
    ]
    strings = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(256))
    string = b"[" + b"".join(map(re.escape, short_strings)) + b"](?:" + strings + b")"
    alternatives = b"|".join([*fixed, string])
    return re.compile(b"(?s:%s){0,%d}" % (alternatives, _RUN_LENGTH)), others
