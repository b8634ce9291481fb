"""Classes of Python's standard library that are data, and how each is built from its pickle.

There is one builder for each class. It takes the arguments that pickles of the class have, with exact types and limited
sizes, and refuses all others. No builder calls anything with values that may be large.
"""

from __future__ import annotations

import _codecs
import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from typing import Any, Final

from robust_dcp.storage.records.limits import Budget, Builder, Malformed, NotData, Pending, expect

__all__ = ["BUILT_BY_CALL", "BUILT_BY_NEW", "NAMED", "exactly", "string_keys"]

_DEQUE_UNITS: Final = 80  # the memory of an empty one, in elements: four bytes of a pickle make it
_MAX_EXPONENT: Final = 10_000  # of a decimal; nobody saves 10**3000000, and converting it takes long
_DECIMAL: Final = re.compile(
    r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[Ee]([+-]?\d{1,6}))?|[+-]?(?:Infinity|s?NaN\d*)", re.ASCII
)
_FRACTION: Final = re.compile(r"-?\d{1,4000}(?:/\d{1,4000})?", re.ASCII)

_EMPTY: Final = (bool, bytes, dict, float, int, list, str, tuple)
"""They have opcodes for their values. A call may only make an empty one."""

_FACTORIES: Final = {*_EMPTY, bytearray, complex, frozenset, set} | {
    *(collections.Counter, collections.OrderedDict, collections.deque)
}
"""The factories that a ``defaultdict`` may have. Called without arguments, each makes something empty."""


def exactly(make: Callable[..., Any], *forms: tuple[type, ...], of: str = "") -> Builder:
    """A builder that calls ``make`` with arguments whose types are exactly one of ``forms``."""

    def build(arguments: tuple[Any, ...], budget: Budget) -> Any:
        kinds = tuple(map(type, arguments))
        if kinds not in forms:
            given = ", ".join(kind.__name__ for kind in kinds)
            raise Malformed(f"the pickle makes {of or f'a {make.__name__}'} from ({given}), which no pickler writes")
        budget.spend(sum(len(each) for each in arguments if type(each) in (bytes, dict, list, str, tuple)))
        return make(*arguments)

    return build


def string_keys(state: Any, of: str) -> dict[str, Any]:
    """Return ``state`` if it is a dict of attributes, as objects are pickled."""
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise Malformed(f"the state of {of} is not a dict of attributes")
    return state


def _encoded(text: str, encoding: str) -> bytes:
    expect(encoding in ("latin1", "latin-1"), f"bytes are to be encoded as {encoding[:20]!r}, not as latin1")
    return text.encode("latin-1")


def _bytearray(data: bytes | str = b"", encoding: str = "") -> bytearray:
    return bytearray(_encoded(data, encoding) if isinstance(data, str) else data)


def _set_of(kind: type) -> Builder:
    items_of = exactly(lambda items=(): items, (), (list,), (tuple,), of=f"a {kind.__name__}")

    def build(arguments: tuple[Any, ...], budget: Budget) -> Any:
        items = items_of(arguments, budget)
        for item in items:
            budget.check_key(item, len(items))
        return kind(items)

    return build


def _slice(arguments: tuple[Any, ...], budget: Budget) -> slice:
    expect(1 <= len(arguments) <= 3, "the pickle makes a slice from other arguments than start, stop and step")
    for limit in arguments:
        if type(limit) not in (int, float, str, type(None)):
            raise NotData("builtins.slice", "of something else than numbers")
    return slice(*arguments)


def _counter(counts: dict[Any, Any] | None = None) -> Any:
    found: collections.Counter[Any] = collections.Counter()
    dict.update(found, counts or {})
    return found


def _defaultdict(arguments: tuple[Any, ...], budget: Budget) -> Any:
    expect(len(arguments) <= 1, "the pickle makes a defaultdict from more arguments than its factory")
    factory = arguments[0] if arguments else None
    if factory is not None and not (isinstance(factory, type) and factory in _FACTORIES):
        name = getattr(factory, "__qualname__", type(factory).__name__)
        raise NotData(
            f"collections.defaultdict({name})", "whose factory is none of Python's own containers and numbers"
        )
    return collections.defaultdict(factory)


def _deque(arguments: tuple[Any, ...], budget: Budget) -> Any:
    """``deque((), maxlen)``. Its items come later."""
    is_bounded = len(arguments) == 2 and arguments[0] == () and type(arguments[1]) is int
    expect(not arguments or is_bounded, "the pickle makes a deque from other arguments than its length")
    budget.spend(_DEQUE_UNITS)
    return collections.deque(*arguments)


def _moment(kind: Any, date_nbytes: int, time_nbytes: int) -> Builder:
    """A builder for a date, a time, or both. Python's own constructor would believe the packed bytes."""

    def build(arguments: tuple[Any, ...], budget: Budget) -> Any:
        packed, *zone = arguments or (b"",)
        valid = type(packed) is bytes and len(packed) == date_nbytes + time_nbytes and len(zone) <= (time_nbytes > 0)
        valid = valid and all(each is None or type(each) is datetime.timezone for each in zone)
        expect(valid, f"the pickle makes a {kind.__name__} from arguments that no pickler writes")
        day, clock, more = packed[:date_nbytes], packed[date_nbytes:], {}
        numbers = [day[0] * 256 + day[1], day[2], day[3]] if day else []
        numbers += [*clock[:3], int.from_bytes(clock[3:], "big")] if clock else []
        if clock:  # the first bit of the month, or of the hour where there is no month
            at = 1 if day else 0
            more = {"tzinfo": zone[0] if zone else None, "fold": numbers[at] >> 7}
            numbers[at] &= 0x7F
        return kind(*numbers, **more)

    return build


def _decimal(text: str) -> decimal.Decimal:
    found = _DECIMAL.fullmatch(text)
    if found is None or (found[1] and abs(int(found[1])) > _MAX_EXPONENT):
        raise NotData("decimal.Decimal", f"with an exponent beyond {_MAX_EXPONENT}, or no number at all")
    return decimal.Decimal(text)


def _fraction(number: str | int, *denominator: int) -> fractions.Fraction:
    if isinstance(number, str):
        expect(
            _FRACTION.fullmatch(number) is not None, "the pickle makes a Fraction from another text than two numbers"
        )
    elif max(each.bit_length() for each in (number, *denominator)) > 13_000:
        raise NotData("fractions.Fraction", "of numbers with more than 4000 digits")
    return fractions.Fraction(number, *denominator)


def _path(kind: type[pathlib.PurePath]) -> Builder:
    def build(arguments: tuple[Any, ...], budget: Budget) -> pathlib.PurePath:
        expect(all(type(part) is str for part in arguments), "the pickle makes a path from something else than texts")
        budget.spend(sum(map(len, arguments)))
        return kind(*arguments)

    return build


def _uuid(state: Any, budget: Budget) -> uuid.UUID:
    number = string_keys(state, "a UUID").get("int")
    if type(number) is not int or not 0 <= number < 1 << 128:
        raise Malformed("the pickle makes a UUID from another number than one of 128 bits")
    return uuid.UUID(int=number)


def _stream(state: Any, budget: Budget) -> io.BytesIO:
    expect(type(state) is tuple and len(state) == 3 and not state[2], "the state of a BytesIO is not its bytes")
    data, position, _ = state
    valid = type(data) is bytes and type(position) is int and 0 <= position <= len(data)
    expect(valid, "the state of a BytesIO is not its bytes and a position in them")
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


# A path of another operating system becomes a pure path, which touches no file system.
_PATHS: Final[dict[str, Any]] = {
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "PosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    type(pathlib.Path()).__name__: type(pathlib.Path()),
}

_BARE: Final[dict[Any, Builder]] = {
    kind: exactly(kind, ()) for kind in (argparse.Namespace, types.SimpleNamespace, collections.OrderedDict)
}
"""They are made empty. Their attributes or items come later."""

BUILT_BY_CALL: Final[dict[Any, Builder]] = {
    **{kind: exactly(kind, ()) for kind in _EMPTY},
    **_BARE,
    bytearray: exactly(_bytearray, (), (bytes,), (str, str), of="a bytearray"),
    complex: exactly(complex, (float, float)),
    frozenset: _set_of(frozenset),
    range: exactly(range, (int,), (int, int), (int, int, int)),
    set: _set_of(set),
    slice: _slice,
    _codecs.encode: exactly(_encoded, (str, str), of="bytes"),
    collections.Counter: exactly(_counter, (), (dict,), of="a Counter"),
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    datetime.date: _moment(datetime.date, 4, 0),
    datetime.datetime: _moment(datetime.datetime, 4, 6),
    datetime.time: _moment(datetime.time, 0, 6),
    datetime.timedelta: exactly(datetime.timedelta, (int, int, int)),
    datetime.timezone: exactly(datetime.timezone, (datetime.timedelta,), (datetime.timedelta, str)),
    decimal.Decimal: exactly(_decimal, (str,), of="a Decimal"),
    fractions.Fraction: exactly(_fraction, (str,), (int, int), of="a Fraction"),
    **{kind: _path(kind) for kind in _PATHS.values()},
}
"""The functions and classes that a pickle may call (REDUCE)."""

BUILT_BY_NEW: Final[dict[Any, Builder]] = {
    **_BARE,
    uuid.UUID: exactly(lambda: Pending(_uuid), (), of="a UUID"),
    io.BytesIO: exactly(lambda: Pending(_stream), (), of="a BytesIO"),
}
"""The classes from which a pickle may make an empty object, which gets its state later (NEWOBJ)."""

NAMED: Final[dict[tuple[str, str], Any]] = {
    (module, name): kind for module in ("pathlib", "pathlib._local") for name, kind in _PATHS.items()
}
"""Other names than those that the classes have themselves."""
