"""Classes of Python's standard library that are data, and how each is built from its pickle.

There is one builder for each class. It takes the arguments that pickles of the class have, with exact types and limited
sizes, and refuses all others. No builder calls anything with values that may be large.
"""

from __future__ import annotations

import _codecs
import argparse
import collections
import copyreg
import datetime
import decimal
import fractions
import io
import operator
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from typing import Any, Final

from robust_dcp.storage.records.data.limits import Budget, Malformed, NotData, check_key
from robust_dcp.storage.records.data.pending import Pending
from robust_dcp.storage.records.data.user_classes import combined_flags, member_named

__all__ = ["BUILT_BY_CALL", "BUILT_BY_NEW", "FACTORIES", "NAMED", "Builder", "arguments_of", "string_keys"]

Builder = Callable[[tuple[Any, ...], Budget], Any]

_DEQUE_UNITS: Final = 80  # the memory of an empty one, in elements: four bytes of a pickle make it
_MAX_EXPONENT: Final = 10_000  # of a decimal; nobody saves 10**3000000, and converting it takes long
_DECIMAL: Final = re.compile(
    r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[Ee]([+-]?\d{1,6}))?|[+-]?(?:Infinity|s?NaN\d*)", re.ASCII
)
_FRACTION: Final = re.compile(r"-?\d{1,4000}(?:/\d{1,4000})?", re.ASCII)

FACTORIES: Final = frozenset(
    {bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple}
    | {collections.Counter, collections.OrderedDict, collections.deque}
)
"""The factories that a ``defaultdict`` may have. Called without arguments, each makes something empty."""


def arguments_of(arguments: tuple[Any, ...], *forms: tuple[type, ...], of: str) -> tuple[Any, ...]:
    """Return ``arguments`` if their types are exactly one of ``forms``. ``of`` says what they make, for the error."""
    found = tuple(map(type, arguments))
    if found not in forms:
        told = ", ".join(kind.__name__ for kind in found)
        raise Malformed(f"the pickle makes {of} from ({told}), which no pickler writes")
    return arguments


def string_keys(state: Any, of: str) -> dict[str, Any]:
    """Return ``state`` if it is a dict of attributes, as objects are pickled."""
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise Malformed(f"the state of {of} is not a dict of attributes")
    return state


def _bytearray(arguments: tuple[Any, ...], budget: Budget) -> bytearray:
    given = arguments_of(arguments, (), (bytes,), (str, str), of="a bytearray")
    if len(given) == 2:
        return bytearray(_encoded(given, budget))
    budget.spend(len(given[0]) if given else 0)
    return bytearray(*given)


def _encoded(arguments: tuple[Any, ...], budget: Budget) -> bytes:
    text, encoding = arguments_of(arguments, (str, str), of="bytes")
    if encoding not in ("latin1", "latin-1"):
        raise Malformed(f"bytes are to be encoded as {encoding[:20]!r}, not as latin1")
    budget.spend(len(text))
    data: bytes = text.encode("latin-1")
    return data


def _empty(kind: type) -> Builder:
    """A builder for a class that has its own opcodes for its values. A call may only make an empty one."""

    def build(arguments: tuple[Any, ...], budget: Budget) -> Any:
        arguments_of(arguments, (), of=f"a {kind.__name__}")
        return kind()

    return build


def _complex(arguments: tuple[Any, ...], budget: Budget) -> complex:
    return complex(*arguments_of(arguments, (float, float), of="a complex number"))


def _set_of(kind: type) -> Builder:
    def build(arguments: tuple[Any, ...], budget: Budget) -> Any:
        (items,) = arguments_of(arguments, (list,), (tuple,), of=f"a {kind.__name__}") if arguments else ((),)
        budget.spend(len(items))
        for item in items:
            check_key(item, budget, len(items))
        return kind(items)

    return build


def _range(arguments: tuple[Any, ...], budget: Budget) -> range:
    return range(*arguments_of(arguments, (int,), (int, int), (int, int, int), of="a range"))


def _slice(arguments: tuple[Any, ...], budget: Budget) -> slice:
    if not 1 <= len(arguments) <= 3:
        raise Malformed("the pickle makes a slice from other arguments than start, stop and step")
    for limit in arguments:
        if type(limit) not in (int, float, str, type(None)):
            raise NotData("builtins.slice", "of something else than numbers")
    return slice(*arguments)


def _ordered_dict(arguments: tuple[Any, ...], budget: Budget) -> Any:
    found: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    pairs = arguments_of(arguments, (), (list,), of="an OrderedDict")
    for pair in pairs[0] if pairs else ():  # Python 2 pickled it like this
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Malformed("the pickle makes an OrderedDict from other arguments than pairs")
        budget.spend(1)
        check_key(pair[0], budget, len(found))
        found[pair[0]] = pair[1]
    return found


def _counter(arguments: tuple[Any, ...], budget: Budget) -> Any:
    given = arguments_of(arguments, (), (dict,), of="a Counter")
    counts = given[0] if given else {}
    budget.spend(len(counts))
    found: collections.Counter[Any] = collections.Counter()
    dict.update(found, counts)
    return found


def _defaultdict(arguments: tuple[Any, ...], budget: Budget) -> Any:
    if len(arguments) > 1:
        raise Malformed("the pickle makes a defaultdict from more arguments than its factory")
    factory = arguments[0] if arguments else None
    if factory is not None and not (isinstance(factory, type) and factory in FACTORIES):
        name = getattr(factory, "__qualname__", type(factory).__name__)
        raise NotData(
            f"collections.defaultdict({name})", "whose factory is none of Python's own containers and numbers"
        )
    return collections.defaultdict(factory)


def _deque(arguments: tuple[Any, ...], budget: Budget) -> Any:
    if len(arguments) > 2 or (arguments and type(arguments[0]) not in (tuple, list)):
        raise Malformed("the pickle makes a deque from other arguments than its items and its length")
    maxlen = arguments[1] if len(arguments) == 2 else None
    if maxlen is not None and type(maxlen) is not int:
        raise Malformed("the length of a deque is not a number")
    items = arguments[0] if arguments else ()
    budget.spend(_DEQUE_UNITS + len(items))
    return collections.deque(items, maxlen)


def _as_bytes(state: Any) -> Any:
    return state.encode("latin-1") if type(state) is str else state


def _date(arguments: tuple[Any, ...], budget: Budget) -> datetime.date:
    (packed,) = arguments_of(tuple(map(_as_bytes, arguments)), (bytes,), of="a date")
    _expect(len(packed) == 4, "a date")
    return datetime.date(packed[0] * 256 + packed[1], packed[2], packed[3])


def _time(arguments: tuple[Any, ...], budget: Budget) -> datetime.time:
    packed = _as_bytes(arguments[0]) if arguments else b""
    _expect(type(packed) is bytes and len(packed) == 6 and len(arguments) <= 2, "a time")
    hour, minute, second = packed[0] & 0x7F, packed[1], packed[2]
    microsecond = int.from_bytes(packed[3:6], "big")
    zone = _zone(arguments[1:], "a time")
    return datetime.time(hour, minute, second, microsecond, tzinfo=zone, fold=packed[0] >> 7)


def _datetime(arguments: tuple[Any, ...], budget: Budget) -> datetime.datetime:
    packed = _as_bytes(arguments[0]) if arguments else b""
    _expect(type(packed) is bytes and len(packed) == 10 and len(arguments) <= 2, "a datetime")
    year, month, day = packed[0] * 256 + packed[1], packed[2] & 0x7F, packed[3]
    microsecond = int.from_bytes(packed[7:10], "big")
    zone = _zone(arguments[1:], "a datetime")
    return datetime.datetime(
        year, month, day, packed[4], packed[5], packed[6], microsecond, tzinfo=zone, fold=packed[2] >> 7
    )


def _zone(given: tuple[Any, ...], of: str) -> datetime.timezone | None:
    _expect(not given or given[0] is None or type(given[0]) is datetime.timezone, of)
    return given[0] if given else None


def _timedelta(arguments: tuple[Any, ...], budget: Budget) -> datetime.timedelta:
    return datetime.timedelta(*arguments_of(arguments, (int, int, int), of="a timedelta"))


def _timezone(arguments: tuple[Any, ...], budget: Budget) -> datetime.timezone:
    delta = datetime.timedelta
    return datetime.timezone(*arguments_of(arguments, (delta,), (delta, str), of="a timezone"))


def _decimal(arguments: tuple[Any, ...], budget: Budget) -> decimal.Decimal:
    (text,) = arguments_of(arguments, (str,), of="a Decimal")
    found = _DECIMAL.fullmatch(text)
    if found is None or (found[1] and abs(int(found[1])) > _MAX_EXPONENT):
        raise NotData("decimal.Decimal", f"with an exponent beyond {_MAX_EXPONENT}, or no number at all")
    return decimal.Decimal(text)


def _fraction(arguments: tuple[Any, ...], budget: Budget) -> fractions.Fraction:
    given = arguments_of(arguments, (str,), (int, int), of="a Fraction")
    if len(given) == 1:
        _expect(_FRACTION.fullmatch(given[0]) is not None, "a Fraction")
    elif max(number.bit_length() for number in given) > 13_000:
        raise NotData("fractions.Fraction", "of numbers with more than 4000 digits")
    return fractions.Fraction(*given)


def _path(kind: type[pathlib.PurePath]) -> Builder:
    def build(arguments: tuple[Any, ...], budget: Budget) -> pathlib.PurePath:
        _expect(all(type(part) is str for part in arguments), "a path")
        budget.spend(sum(map(len, arguments)))
        return kind(*arguments)

    return build


def _reconstructed(arguments: tuple[Any, ...], budget: Budget) -> Any:
    """``copyreg._reconstructor``: protocols 0 and 1 make an object with it that has only attributes."""
    _expect(len(arguments) == 3 and arguments[1] is object and arguments[2] is None, "an object")
    build = BUILT_BY_NEW.get(arguments[0])
    if build is None:
        raise NotData(_name(arguments[0]), "which is not known to be plain data")
    return build((), budget)


def _attribute(arguments: tuple[Any, ...], budget: Budget) -> Any:
    """``getattr``: some enums are pickled with it."""
    _expect(len(arguments) == 2, "a member of an enum")
    return member_named(*arguments)


def _either(arguments: tuple[Any, ...], budget: Budget) -> Any:
    """``operator.or_``: Python 3.11 and older pickle combined flags with it."""
    _expect(len(arguments) == 2, "a combination of flags")
    return combined_flags(*arguments)


def _uuid(arguments: tuple[Any, ...], budget: Budget) -> Pending:
    _expect(not arguments, "a UUID")

    def complete(state: Any, budget: Budget) -> uuid.UUID:
        number = string_keys(state, "a UUID").get("int")
        _expect(type(number) is int and 0 <= number < 1 << 128, "a UUID")
        return uuid.UUID(int=number)

    return Pending(complete)


def _stream(arguments: tuple[Any, ...], budget: Budget) -> Pending:
    _expect(not arguments, "a BytesIO")

    def complete(state: Any, budget: Budget) -> io.BytesIO:
        _expect(type(state) is tuple and len(state) == 3 and not state[2], "a BytesIO")
        data, position, _ = state
        _expect(type(data) is bytes and type(position) is int and 0 <= position <= len(data), "a BytesIO")
        stream = io.BytesIO(data)
        stream.seek(position)
        return stream

    return Pending(complete)


def _bare(kind: type) -> Builder:
    """A builder for an object without attributes. These come as its state."""

    def build(arguments: tuple[Any, ...], budget: Budget) -> Any:
        _expect(not arguments, f"a {kind.__name__}")
        return kind()

    return build


def _expect(valid: bool, of: str) -> None:
    if not valid:
        raise Malformed(f"the pickle makes {of} from arguments that no pickler writes")


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else type(kind).__name__


_PATHS: Final = {"PurePosixPath": pathlib.PurePosixPath, "PureWindowsPath": pathlib.PureWindowsPath}
# A path of another operating system becomes a pure path, which touches no file system.
_HERE: Final = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}
_ALL_PATHS: Final[dict[str, Any]] = {**_PATHS, **_HERE, type(pathlib.Path()).__name__: type(pathlib.Path())}

_RECONSTRUCTOR: Final[Any] = copyreg._reconstructor  # type: ignore[attr-defined]

BUILT_BY_CALL: Final[dict[Any, Builder]] = {
    bytearray: _bytearray,
    complex: _complex,
    frozenset: _set_of(frozenset),
    range: _range,
    set: _set_of(set),
    slice: _slice,
    **{kind: _empty(kind) for kind in (bool, bytes, dict, float, int, list, str, tuple)},
    _codecs.encode: _encoded,
    collections.Counter: _counter,
    collections.OrderedDict: _ordered_dict,
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    datetime.date: _date,
    datetime.datetime: _datetime,
    datetime.time: _time,
    datetime.timedelta: _timedelta,
    datetime.timezone: _timezone,
    decimal.Decimal: _decimal,
    fractions.Fraction: _fraction,
    _RECONSTRUCTOR: _reconstructed,
    getattr: _attribute,
    operator.or_: _either,
    **{kind: _path(kind) for kind in _ALL_PATHS.values()},
    argparse.Namespace: _bare(argparse.Namespace),
    types.SimpleNamespace: _bare(types.SimpleNamespace),
}
"""The functions and classes that a pickle may call (REDUCE)."""

BUILT_BY_NEW: Final[dict[Any, Builder]] = {
    argparse.Namespace: _bare(argparse.Namespace),
    types.SimpleNamespace: _bare(types.SimpleNamespace),
    uuid.UUID: _uuid,
    io.BytesIO: _stream,
}
"""The classes from which a pickle may make an empty object, which gets its state later (NEWOBJ)."""


NAMED: Final[dict[tuple[str, str], Any]] = {
    **{("builtins", kind.__name__): kind for kind in FACTORIES if kind.__module__ == "builtins"},
    **{("builtins", kind.__name__): kind for kind in (object, range, slice, getattr)},
    ("builtins", "long"): int,  # some tools map Python 2's `long` to this name
    ("_codecs", "encode"): _codecs.encode,
    ("_operator", "or_"): operator.or_,
    ("operator", "or_"): operator.or_,
    ("copyreg", "_reconstructor"): _RECONSTRUCTOR,
    ("_io", "BytesIO"): io.BytesIO,
    ("io", "BytesIO"): io.BytesIO,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("uuid", "UUID"): uuid.UUID,
    ("decimal", "Decimal"): decimal.Decimal,
    ("fractions", "Fraction"): fractions.Fraction,
    **{
        ("collections", kind.__name__): kind
        for kind in (collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque)
    },
    **{
        ("datetime", kind.__name__): kind
        for kind in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
    },
    **{(module, name): kind for module in ("pathlib", "pathlib._local") for name, kind in _ALL_PATHS.items()},
}
"""What a pickle may name, by module and name, and what the name stands for."""
