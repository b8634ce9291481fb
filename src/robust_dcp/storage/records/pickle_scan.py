"""Scans a pickle before anything unpickles it: opcode by opcode, most of them in runs.

It never builds anything of what it scans. ``metadata_file`` calls it for ``.metadata``, which Python's own unpickler
loads, and ``objects`` for bytes that may not be a pickle.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from functools import cache
from typing import Final, NamedTuple

__all__ = ["check_lengths", "dicts_in", "is_inert"]

_RUN_LENGTH: Final = 4096
"""So many opcodes are matched at a time. The regular expression engine remembers each of them until the match ends."""

# Opcodes by which a pickle imports, calls, or hashes values that it has built.
_ACTIVE: Final = frozenset(
    code[0]
    for code in (
        *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.INST, pickle.OBJ, pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ),
        *(pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BINPERSID),
        *(pickle.DICT, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS, pickle.FROZENSET),
    )
)
_STOP: Final = pickle.STOP[0]
_DUP: Final = pickle.DUP[0]
_EMPTY_DICT: Final = pickle.EMPTY_DICT[0]
_HASHES: Final = frozenset(code[0] for code in (pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET))
_FRAME: Final = pickle.FRAME[0]
_LONG_BINPUT: Final = pickle.LONG_BINPUT[0]
_PUT: Final = pickle.PUT[0]
_TWO_LINES: Final = frozenset({pickle.GLOBAL[0], pickle.INST[0]})


class _EndsThere(ValueError):
    """A byte that is not an opcode, or an argument that is cut off. No unpickler gets any further."""


def check_lengths(pickled: bytes) -> None:
    """Refuse lengths and memo indexes that no pickle of this length can have.

    Python's unpickler would believe them. For example, one damaged byte makes a memo index of 4 billion, and the
    unpickler allocates and fills tens of GiB.

    Raises:
        ValueError: there is such a number, or this is not a pickle.
    """
    run = _run_of(frozenset({_DUP}))
    at = 0
    while True:
        at = _after_run(run, pickled, at)
        if at < len(pickled) and pickled[at] == _STOP:
            return
        at = _after_other(pickled, at)


def dicts_in(pickled: bytes) -> list[int]:
    """Where a pickle makes dicts: the places of its EMPTY_DICT opcodes.

    Raises:
        ValueError: as :func:`check_lengths`; or it makes sets, or dicts in the way of protocol 0. No writer of
            metadata does that, and nobody could look at their keys before they are hashed.
    """
    run = _run_of(frozenset({_DUP, _EMPTY_DICT, *_HASHES}))
    places = []
    at = 0
    while True:
        at = _after_run(run, pickled, at)
        code = pickled[at] if at < len(pickled) else None
        if code == _EMPTY_DICT:
            places.append(at)
            at += 1
        elif code == _STOP:
            return places
        elif code in _HASHES:
            raise ValueError(f"byte {at} of a pickle makes a set, or a dict as protocol 0 does")
        else:
            at = _after_other(pickled, at)


def is_inert(data: bytes) -> bool:
    """Whether an unrestricted unpickler of ``data`` would fail before it could do harm.

    Harm is to import, call, hash, or take more memory than there is data. What follows the first pickle counts, too.
    """
    run = _run_of(_ACTIVE)
    at = 0
    try:
        while at < len(data):
            at = _after_run(run, data, at)
            if at < len(data) and data[at] in _ACTIVE:
                return False
            is_end = at < len(data) and data[at] == _STOP
            at = at + 1 if is_end else _after_other(data, at)
    except _EndsThere:
        return True
    except ValueError:
        return False
    return True


def _after_run(run: re.Pattern[bytes], pickled: bytes, at: int) -> int:
    """Where a run of opcodes with arguments of fixed length, or with short texts, ends. Few opcodes in a million are
    others.
    """
    while (found := run.match(pickled, at)) is not None and found.end() > at:
        at = found.end()
    return at


def _after_other(pickled: bytes, at: int) -> int:
    """Where the opcode at ``at`` ends. Its argument has to be looked at."""
    opcode = _others().get(pickled[at]) if at < len(pickled) else None
    if opcode is None:
        raise _EndsThere(f"byte {at} of {len(pickled)} is not an opcode of a pickle, or the pickle ends there")
    if opcode.code == _DUP:
        raise ValueError(f"byte {at} of a pickle doubles a value, which no pickler does")
    start = at + 1
    if opcode.is_line:
        for _ in range(2 if opcode.code in _TWO_LINES else 1):
            end = pickled.find(b"\n", start)
            if end < 0:
                raise _EndsThere(f"the text at byte {at} of a pickle of {len(pickled)} bytes has no end")
            line, start = pickled[start:end], end + 1
            if opcode.code == _PUT:
                _check_place(int(line) if line.isdigit() and len(line) < 20 else len(pickled) + 1, len(pickled))
        return start
    end = start + opcode.nbytes
    if end > len(pickled):
        raise _EndsThere(f"the pickle ends within the opcode at byte {at}")
    number = int.from_bytes(pickled[start:end], "little")
    if opcode.code == _LONG_BINPUT:
        _check_place(number, len(pickled))
        return end
    if number > len(pickled) - end:
        raise _EndsThere(f"byte {at} of a pickle announces {number} bytes, expected at most {len(pickled) - end}")
    return end if opcode.code == _FRAME else end + number


def _check_place(place: int, nbytes: int) -> None:
    if place > nbytes:
        raise ValueError(f"memo index {place} in a pickle of {nbytes} bytes")


class _Opcode(NamedTuple):
    """An opcode with an argument that has to be looked at: a line of text, or a number of ``nbytes`` bytes."""

    code: int
    is_line: bool
    nbytes: int


_COUNT_NBYTES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


@cache
def _others() -> dict[int, _Opcode]:
    found = {}
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin-1")[0]
        nbytes = 0 if opcode.arg is None else opcode.arg.n
        if code in (_LONG_BINPUT, _FRAME):
            found[code] = _Opcode(code, False, 4 if code == _LONG_BINPUT else 8)
        elif code == _DUP:
            found[code] = _Opcode(code, False, 0)
        elif nbytes == pickletools.UP_TO_NEWLINE:
            found[code] = _Opcode(code, True, 0)
        elif nbytes in _COUNT_NBYTES:
            found[code] = _Opcode(code, False, _COUNT_NBYTES[nbytes])
    return found


@cache
def _run_of(excluded: frozenset[int]) -> re.Pattern[bytes]:
    """A pattern for a run of opcodes that are not ``excluded``, and with arguments that need no look."""
    by_length: dict[int, list[bytes]] = {}
    counted: list[bytes] = []
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin-1")
        nbytes = 0 if opcode.arg is None else opcode.arg.n
        if code[0] in excluded or code[0] == _STOP or code[0] in _others():
            continue
        if nbytes == pickletools.TAKEN_FROM_ARGUMENT1:
            counted.append(code)
        else:
            by_length.setdefault(nbytes, []).append(code)
    bare = b"[" + b"".join(map(re.escape, by_length.pop(0))) + b"]"
    fixed = [
        b"[" + b"".join(map(re.escape, codes)) + b"]" + b".{%d}" % nbytes for nbytes, codes in sorted(by_length.items())
    ]
    texts = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(256))
    text = b"[" + b"".join(map(re.escape, counted)) + b"](?:" + texts + b")"
    alternatives = b"|".join([bare + b"+", *fixed, text])
    return re.compile(b"(?s:%s){0,%d}" % (alternatives, _RUN_LENGTH))
