"""Kinds of values that are data, and how each is built from its pickle: classes of Python's standard library, arrays of
NumPy, and the program's own enums, named tuples and dataclasses. ``torch_kinds`` has tensors.

A pickle may ask for a small multiple of its own length, and for nothing that takes long to hash: it has a budget.

There is one builder for each class. It takes the arguments that pickles of the class have, with exact types and limited
sizes, and refuses all others. No builder calls anything with values that may be large, or runs code of the program. A
class of the program is looked for only in modules that the program has imported already.
"""

from __future__ import annotations

import _codecs
import abc
import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import io
import math
import operator
import pathlib
import re
import sys
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

# --- limits

_UNITS: Final = 1_000_000
_UNITS_PER_BYTE: Final = 16
"""For each of its bytes, a pickle may copy or hash this many elements, besides those that it holds itself."""

_MAX_NESTED: Final = 1_000
_MAX_DEPTH: Final = 10_000
_MAX_KEY_NODES: Final = 10_000
_MAX_KEY_DEPTH: Final = 100
_LARGE_INT: Final = (1 << 61) - 1  # integers from here on have the same hashes as smaller ones

# C code or the standard library computes their hashes, in a time that is limited by their length.
_HASHED_BY_PYTHON: Final = frozenset(
    {bool, bytes, complex, float, int, range, str, type(None), decimal.Decimal, fractions.Fraction, uuid.UUID}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone}
    | {pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())}
    | {torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format}
)
_HASHES: Final = (enum.Enum.__hash__, int.__hash__, str.__hash__)
_EQUALITIES: Final = (object.__eq__, int.__eq__, str.__eq__)  # of enums
_LEAVES: Final = (bool, bytes, complex, float, int, str, type(None), type, enum.Enum, types.ModuleType)


class NotData(Exception):
    """A pickle needs something that is not known to be data. ``what`` that is, and ``why`` it is refused, go into a
    message.
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}, {why}")
        self.what = what
        self.why = why


class Malformed(ValueError):
    """No writer makes such a pickle. It is damaged, or was made to do harm."""


class NotAPickle(Malformed):
    """There is no opcode, or one that is cut off. No unpickler gets any further."""


class Budget(msgspec.Struct, eq=False):
    """What a pickle of ``nbytes`` bytes may ask for beyond its own length."""

    nbytes: int
    _spent: int = 0
    _n_nested: int = 0

    def spend(self, units: int) -> None:
        """Take ``units`` from the budget, or raise :class:`Malformed`."""
        self._spent += units
        is_enough = self._spent <= _UNITS + _UNITS_PER_BYTE * self.nbytes
        expect(is_enough, "it asks for far more memory or time than a pickle of its length can need")

    def hold(self, values: Any) -> None:
        """Count values that go into one that Python frees recursively without a bound, if they are such ones, too."""
        for value in values:
            is_array = isinstance(value, np.ndarray) and value.dtype.hasobject
            self._n_nested += is_array or isinstance(value, (collections.deque, collections.defaultdict))
        expect(self._n_nested <= _MAX_NESTED, "it nests too many arrays, deques or defaultdicts into each other")

    def check_key(self, key: Any, n_held: int) -> None:
        """Make sure that hashing ``key`` runs no code from outside, and takes a time that is limited by its length.

        Args:
            key: a key of a dict, or an element of a set.
            n_held: how many keys there are already. A new key is compared with those that have the same hash.

        Raises:
            NotData: its class has its own code for hashing.
            Malformed: it is nested too deeply, or in too many ways.
        """
        kind = type(key)
        if kind is int:
            self.spend(0 if -_LARGE_INT < key < _LARGE_INT else n_held)
        elif kind is not str:
            nodes = _hashed_nodes(key, 0, 0)
            self.spend(nodes if nodes == 1 else nodes + n_held // 64)


Builder = Callable[[tuple[Any, ...], Budget], Any]
"""Makes a value from the arguments that its pickle has. It takes exactly those that picklers write."""


NO_DATA: Final = "which is not known to be plain data"


class Trusted(msgspec.Struct, frozen=True, eq=False):
    """What a pickle may do with a class or function that it names. What is ``None`` is refused.

    Attributes:
        call: makes a value from arguments (opcode REDUCE).
        new: makes an object that gets its state later (NEWOBJ).
        fill: gives an object of this class its state (BUILD).
        why_not: why the rest is refused, for a message.
        as_native: the class whose objects Python's own unpickler may make in the place of this one's: a dataclass whose
            state runs no code; ``None`` if there is none.
        makes_constants: a call makes what a pickle cannot change. So Python's own unpickler may have it, too.
        is_registered: the user has registered it. Its own code may take items, too (APPENDS, SETITEMS).
    """

    call: Builder | None = None
    new: Builder | None = None
    fill: Callable[[Any, Any], None] | None = None
    why_not: str = NO_DATA
    as_native: type | None = None
    makes_constants: bool = False
    is_registered: bool = False


class Pending(msgspec.Struct, eq=False):
    """Takes the place of a value on the stack until its state comes. Arrays, dtypes and UUIDs are pickled in two steps.

    Attributes:
        complete: makes the value from the state.
        places: where in the memo this object is, so that the value can replace it there.
    """

    complete: Callable[[Any, Budget], Any]
    places: list[int] = msgspec.field(default_factory=list)


def expect(valid: bool, message: str) -> None:
    """Raise :class:`Malformed` with this message unless ``valid``."""
    if not valid:
        raise Malformed(message)


def name_of(found: Any) -> str:
    """The full name of a class or function, or of the class of anything else."""
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}.{named.__qualname__}"


def _hashed_nodes(key: Any, depth: int, nodes: int) -> int:
    nodes += 1
    is_small = nodes <= _MAX_KEY_NODES and depth <= _MAX_KEY_DEPTH
    expect(is_small, "a key is a tuple nested too deeply, or in too many ways, to be hashed")
    kind = type(key)
    if kind in _HASHED_BY_PYTHON or isinstance(key, type):
        return nodes
    if issubclass(kind, tuple) and kind.__hash__ is tuple.__hash__ and kind.__eq__ is tuple.__eq__:
        for element in tuple.__iter__(key):
            nodes = _hashed_nodes(element, depth + 1, nodes)
        return nodes
    if kind is frozenset:  # it remembers its hash; but if another one has the same, all that is in both is compared
        for element in key:
            if isinstance(element, (frozenset, tuple)):
                nodes = _hashed_nodes(element, depth + 1, nodes)
        return nodes + len(key)
    if issubclass(kind, enum.Enum) and kind.__hash__ in _HASHES and kind.__eq__ in _EQUALITIES:
        return nodes
    if kind is MetadataIndex:  # the keys of a .metadata
        for value in vars(key).values():
            nodes = _hashed_nodes(value, depth + 1, nodes)
        return nodes
    expect(kind.__hash__ is not None, f"a key is a {kind.__name__}, which cannot be hashed")
    raise NotData(name_of(key), "which is the key of a dict and hashes by code of its own")


def check_depth(root: Any) -> None:
    """Raise :class:`Malformed` if values in ``root`` are nested so deeply that Python could not free them."""
    seen: set[int] = set()
    level = [root]
    for _ in range(_MAX_DEPTH):
        level = [
            value
            for value in gc.get_referents(*level)
            if not isinstance(value, _LEAVES) and not callable(value) and id(value) not in seen
        ]
        seen.update(map(id, level))
        if not level:
            return
    raise Malformed(f"its values are nested more than {_MAX_DEPTH} deep")


# --- Python's own classes

_DEQUE_UNITS: Final = 80  # the memory of an empty one, in elements: four bytes of a pickle make it
_MAX_EXPONENT: Final = 10_000  # of a decimal; nobody saves 10**3000000, and converting it takes long
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
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
        valid = valid and all(type(each) in (type(None), datetime.timezone, zoneinfo.ZoneInfo) for each in zone)
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


def _zone(key: str, from_cache: int) -> zoneinfo.ZoneInfo:
    """A time zone by its name, as this host knows it: what ``ZoneInfo._unpickle`` does."""
    what = f"zoneinfo.ZoneInfo({key[:60]!r})"
    expect(_ZONE.fullmatch(key) is not None, f"the pickle makes {what}, which is no name of a time zone")
    try:
        return zoneinfo.ZoneInfo(key) if from_cache else zoneinfo.ZoneInfo.no_cache(key)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError):
        raise NotData(what, "a time zone that this host does not know") from None


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
    number = state.get("int") if type(state) is dict else None
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

_PYTHON_CALLS: Final[dict[Any, Builder]] = {
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
    _zone: exactly(_zone, (str, int), of="a ZoneInfo"),
    decimal.Decimal: exactly(_decimal, (str,), of="a Decimal"),
    fractions.Fraction: exactly(_fraction, (str,), (int, int), of="a Fraction"),
    **{kind: _path(kind) for kind in _PATHS.values()},
}

_NEW: Final[dict[Any, Builder]] = {
    **_BARE,
    uuid.UUID: exactly(lambda: Pending(_uuid), (), of="a UUID"),
    io.BytesIO: exactly(lambda: Pending(_stream), (), of="a BytesIO"),
}


# --- arrays, scalars and dtypes of NumPy
#
# They are made from a dtype string and bytes of exactly the right length, never by NumPy's own unpickling: it believes
# what a pickled dtype says about itself, so that bytes could become pointers to objects.

_PLAIN: Final = re.compile(r"(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU]\d{1,9})", re.ASCII)
_TIMES: Final = {"m8", "M8"}
_UNITS_OF_TIME: Final = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"})
_OBJECTS: Final = ("O8", "O", "|O")
_MAX_DIMENSIONS: Final = 32


def _dtype(arguments: tuple[Any, ...], budget: Budget) -> Pending:
    """``numpy.dtype(code, False, True)``. Its state gives the byte order and, for times, the unit."""
    code = arguments[0] if arguments else None
    if type(code) is not str or len(arguments) != 3 or any(type(flag) not in (bool, int) for flag in arguments[1:]):
        raise Malformed("the pickle makes a dtype from other arguments than its code")
    if not (_PLAIN.fullmatch(code) or code in _TIMES or code in _OBJECTS):
        raise NotData(f"numpy.dtype({code[:40]!r})", "which is not a dtype of numbers, text or times")
    return Pending(partial(_with_state, code))


def _with_state(code: str, state: Any, budget: Budget) -> np.dtype[Any]:
    valid = type(state) is tuple and len(state) >= 8 and state[0] in (3, 4)
    expect(valid, "the state of a dtype is not of a known version")
    order, subarray, names, fields, itemsize, alignment, flags = state[1:8]
    if subarray is not None or names is not None or fields is not None:
        raise NotData("numpy.dtype", "with fields or subarrays")
    is_object, is_time = code in _OBJECTS, code in _TIMES
    # With flags of another kind, NumPy would use the bytes of an array as pointers to objects, or pointers as bytes.
    if type(flags) is not int or flags != (63 if is_object else 8 if code[0] == "U" else 0):
        raise Malformed(f"the dtype {code!r} comes with the flags {flags!r}, which belong to another kind")
    valid = order in ("<", ">", "|", "=") and len(state) == (9 if is_time else 8)
    expect(valid, "the state of a dtype is not what NumPy writes")
    if is_object:
        return np.dtype(object)
    dtype = np.dtype(f"{code}[{_unit(state[8])}]" if is_time else code)
    is_right = (itemsize, alignment) == (-1, -1) or (code[0] in "SU" and itemsize == dtype.itemsize)
    expect(is_right, "the state of a dtype says another size than its code")
    return dtype if order in ("|", "=") else dtype.newbyteorder(order)


def _unit(metadata: Any) -> str:
    """``ns``, or ``25s``, from NumPy's pickled form: ``(None, (unit, number, denominator, event))``."""
    if type(metadata) is not tuple or len(metadata) != 2 or metadata[0]:
        raise NotData("numpy.dtype", "with metadata")
    unit = metadata[1]
    if type(unit) is not tuple or len(unit) != 4 or any(type(each) is not int for each in unit[1:]):
        raise Malformed("the unit of a time is not what NumPy writes")
    name = unit[0].decode("ascii") if type(unit[0]) is bytes else unit[0]
    if name == "generic":
        return "generic"
    if type(name) is not str or name not in _UNITS_OF_TIME or not 1 <= unit[1] < 1 << 31 or unit[2] != 1:
        raise Malformed("the unit of a time is not what NumPy writes")
    return f"{unit[1]}{name}"


def _empty_array(arguments: tuple[Any, ...], budget: Budget) -> Pending:
    """``_reconstruct(ndarray, (0,), b"b")``. The contents of the array come with its state."""
    if len(arguments) != 3 or arguments[0] is not np.ndarray or arguments[1] != (0,):
        raise NotData("numpy.ndarray", "of a subclass, or not empty at first")
    return Pending(_array_of_state)


def _array_of_state(state: Any, budget: Budget) -> np.ndarray[Any, Any]:
    valid = type(state) is tuple and len(state) == 5 and state[0] == 1
    expect(valid, "the state of an array is not of a known version")
    _, shape, dtype, is_fortran, data = state
    return _array(data, dtype, shape, "F" if is_fortran in (True, 1) else "C", budget)


def _array_of_buffer(arguments: tuple[Any, ...], budget: Budget) -> np.ndarray[Any, Any]:
    """``numpy._core.numeric._frombuffer(data, dtype, shape, order)``, which protocol 5 uses."""
    valid = len(arguments) == 4 and arguments[3] in ("C", "F")
    expect(valid, "the pickle makes an array from other arguments than its bytes")
    data, dtype, shape, order = arguments
    return _array(data, dtype, shape, order, budget)


def _array(data: Any, dtype: Any, shape: Any, order: Any, budget: Budget) -> np.ndarray[Any, Any]:
    expect(isinstance(dtype, np.dtype), "an array has no dtype")
    is_shape = type(shape) is tuple and all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    expect(is_shape and len(shape) <= _MAX_DIMENSIONS, "the shape of an array is not a tuple of sizes")
    count = math.prod(shape)
    if dtype.hasobject:
        valid = type(data) is list and len(data) == count
        expect(valid, "an array of objects does not come as a list of them")
        budget.spend(count)
        budget.hold(data)
        found: np.ndarray[Any, Any] = np.empty(count, dtype=object)
        for place, value in enumerate(data):
            found[place] = value
        return found.reshape(shape, order=order)
    valid = type(data) in (bytes, bytearray) and len(data) == count * dtype.itemsize
    expect(valid, f"an array of {count} elements of {dtype} comes with another number of bytes")
    if not data:
        return np.empty(shape, dtype=dtype, order=order)
    budget.spend(len(data) >> 3)
    return np.frombuffer(data, dtype).copy().reshape(shape, order=order)


def _scalar(arguments: tuple[Any, ...], budget: Budget) -> Any:
    valid = len(arguments) == 2 and isinstance(arguments[0], np.dtype) and not arguments[0].hasobject
    expect(valid, "the pickle makes a scalar from other arguments than its dtype and bytes")
    dtype, data = arguments
    return _array(data, dtype, (), "C", budget)[()]


# A value may name a scalar type instead of a dtype: {"dtype": numpy.float32}.
_SCALAR_TYPES: Final = (
    *("bool_", "float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
    *("int8", "int16", "int32", "int64", "intc", "longlong"),
    *("uint8", "uint16", "uint32", "uint64", "uintc", "ulonglong"),
    *("str_", "bytes_", "datetime64", "timedelta64"),
)

_OWN: Final[dict[tuple[str, str], Any]] = {
    ("multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
}

_NUMPY_CALLS: Final[dict[Any, Builder]] = {
    np.dtype: _dtype,
    **dict(zip(_OWN.values(), (_empty_array, _scalar, _array_of_buffer), strict=True)),
}


# --- the program's enums, named tuples and dataclasses

_VALUE_TYPES: Final = frozenset({bool, bytes, float, int, str, type(None), tuple})


def imported_class(module: str, name: str) -> type:
    """The class of that name, if the program has imported its module.

    Raises:
        NotData: there is no such class. The message says what there is.
    """
    what = f"{module}.{name}"
    found: Any = sys.modules.get(module)
    if found is None:
        raise NotData(what, f"{NO_DATA} (its module is not imported here)")
    for part in name.split("."):
        # Look into the namespaces directly: getattr could run a module's __getattr__, or a descriptor.
        found = getattr(found, "__dict__", {}).get(part) if isinstance(found, (types.ModuleType, type)) else None
    if not isinstance(found, type):
        raise NotData(what, f"{NO_DATA} ({'it is a function' if callable(found) else 'it is not a class here'})")
    return found


def why_not(kind: type) -> str | None:
    """Why objects of a class cannot be rebuilt as data; ``None`` if they can."""
    if isinstance(kind, enum.EnumMeta):
        return None if type(kind) is enum.EnumMeta else "an enum with a metaclass of its own"
    if issubclass(kind, tuple):
        return None if _is_named_tuple(kind) else f"{NO_DATA} (a tuple with code of its own)"
    if dataclasses.is_dataclass(kind):
        own = _own_code(kind)
        return None if own is None else f"a dataclass that is not plain data (it has {own})"
    return NO_DATA


def _is_named_tuple(kind: type) -> bool:
    """Whether ``collections.namedtuple`` or ``typing.NamedTuple`` made the class, and it makes its objects as these
    do.
    """
    home = next(each for each in kind.__mro__ if "__new__" in vars(each))
    new = getattr(vars(home)["__new__"], "__func__", None)
    is_generated = getattr(new, "__globals__", {}).get("__name__", "").startswith("namedtuple_")
    fields = vars(home).get("_fields")
    if not is_generated or home.__bases__ != (tuple,) or type(fields) is not tuple:
        return False
    return type(kind) is type and not any(
        name in vars(each)
        for each in kind.__mro__[: kind.__mro__.index(home)]
        for name in (*_HOOKS, "__init__", "_fields")
    )


_GENERATED: Final = ("_dataclass_getstate", "_dataclass_setstate")
_MAKER: Final = "__create_fn__"
_HOOKS: Final = (
    *("__new__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"),
    *("__getattribute__", "__getattr__", "__del__"),
)


def _own_code(kind: type) -> str | None:
    """Code of a dataclass that would run, or would have to run, when an object is rebuilt."""
    if type(kind) not in (type, abc.ABCMeta):
        return "a metaclass"
    for each in kind.__mro__:
        if each in (object, abc.ABC, typing.Generic) or each.__module__ == "typing":
            continue
        if "__dataclass_fields__" not in vars(each):
            return f"the base class {each.__qualname__}"
        for hook in _HOOKS:
            if hook in vars(each) and getattr(vars(each)[hook], "__name__", "") not in _GENERATED:
                return f"a {hook}"
        setter = vars(each).get("__setattr__")
        if setter is not None and not (each.__dataclass_params__.frozen and is_generated(setter)):  # type: ignore[attr-defined]
            return "a __setattr__"
        if "__dict__" in vars(each) and not isinstance(vars(each)["__dict__"], types.GetSetDescriptorType):
            return "a __dict__ of its own"
    return None


def is_generated(function: Any) -> bool:
    """Whether ``dataclasses`` made a function. It compiles its functions from strings, within one of its own."""
    code = getattr(function, "__code__", None)
    # Python 3.10 has no qualified names of code: there all functions of a class that was made from a string count.
    return getattr(code, "co_filename", "") == "<string>" and getattr(code, "co_qualname", _MAKER).startswith(_MAKER)


def member_of(kind: type[enum.Enum], arguments: tuple[Any, ...]) -> enum.Enum:
    """The member that ``kind(value)`` returns. It is found by comparing values, and nothing of the enum is called."""
    if len(arguments) != 1 or type(arguments[0]) not in _VALUE_TYPES:
        raise NotData(name_of(kind), "an enum whose value is not a plain one")
    value = arguments[0]
    for member in kind.__members__.values():
        if _is_same(vars(member).get("_value_"), value):
            return member
    if issubclass(kind, enum.Flag):
        return _combined(kind, value)
    raise Malformed(f"{name_of(kind)} has no member of the value that is asked for")


def _is_same(held: Any, value: Any) -> bool:
    """Whether two plain values are equal. Other values are not compared, because that could run their code."""
    if type(held) is not type(value) or type(held) not in _VALUE_TYPES:
        return False
    if type(held) is tuple:
        return len(held) == len(value) and all(map(_is_same, held, value))
    return bool(held == value)


def _combined(kind: type[enum.Flag], value: Any) -> enum.Enum:
    """A combination of flags, which is a pseudo-member that ``enum`` makes. Only ``enum``'s own code may run."""
    known = 0
    for member in kind.__members__.values():
        bits = vars(member).get("_value_")
        known |= bits if type(bits) is int else 0
    if type(value) is not int or value < 0 or value & ~known:
        raise Malformed(f"{name_of(kind)} has no such combination of flags")
    owned = ("_missing_", "__new__", "__setattr__", "__init__", "_create_pseudo_member_", "__init_subclass__")
    for each in kind.__mro__:
        if each.__module__ == "enum" or each in (object, int):
            continue
        # `enum` itself puts a __new__ into each class, and keeps the class's own __new__ as __new_member__.
        found = [name for name in owned if name in vars(each) and name != "__new__"]
        made = vars(each).get("__new_member__")
        if found or made not in (None, int.__new__, object.__new__):
            raise NotData(name_of(kind), "whose combinations are made by code of its own")
    return kind(value)


def _member_named(arguments: tuple[Any, ...], budget: Budget) -> Any:
    """``getattr(kind, name)``, for an enum and the name of a member: some enums are pickled with it. And for what makes
    a time zone by its name.
    """
    kind, name = arguments
    if kind is zoneinfo.ZoneInfo and name == "_unpickle":
        return _zone
    if not isinstance(kind, enum.EnumMeta) or type(name) is not str:
        raise NotData("builtins.getattr", "of something else than an enum")
    expect(name in kind.__members__, f"{name_of(kind)} has no member {name[:60]!r}")
    member: enum.Enum = kind.__members__[name]
    return member


def _combined_flags(arguments: tuple[Any, ...], budget: Budget) -> enum.Enum:
    """``one | other``, for two flags of one enum: Python 3.11 and older pickle combined flags with it."""
    one, other = arguments
    if not isinstance(one, enum.Flag) or type(one) is not type(other):
        raise NotData("operator.or_", "of something else than two flags of one enum")
    return member_of(type(one), (vars(one)["_value_"] | vars(other)["_value_"],))


def new_object(kind: type, arguments: tuple[Any, ...]) -> Any:
    """A named tuple with its fields, or a dataclass that has no fields yet."""
    if issubclass(kind, tuple):
        n_fields = len(kind._fields)  # type: ignore[attr-defined]
        expect(len(arguments) == n_fields, f"{name_of(kind)} is made from {len(arguments)} fields, not {n_fields}")
        return tuple.__new__(kind, arguments)
    if arguments or not dataclasses.is_dataclass(kind):
        raise NotData(name_of(kind), "made by code of its own")
    return object.__new__(kind)


def fill(target: Any, state: Any) -> None:
    """Give a dataclass its fields. A pickle holds them as :func:`set_attributes` takes them, or as a list of all."""
    kind = type(target)
    if type(state) is list and _has_generated_state(kind):  # a frozen dataclass with slots
        names = [field.name for field in dataclasses.fields(kind)]
        expect(len(state) == len(names), f"{name_of(kind)} gets {len(state)} fields")
        state = None, dict(zip(names, state, strict=True))
    set_attributes(target, state)


def _has_generated_state(kind: type) -> bool:
    return any(getattr(vars(each).get("__setstate__"), "__name__", "") in _GENERATED for each in kind.__mro__)


def set_attributes(target: Any, state: Any) -> None:
    """Set attributes without any code of the class.

    Args:
        state: a dict of attributes, or a pair of one and a dict of what lies in slots.
    """
    name = name_of(type(target))
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for values in (attributes, slots):
        is_dict = type(values) is dict and all(type(key) is str for key in values)
        expect(values is None or is_dict, f"the state of {name} is not a dict of attributes")
    if attributes:
        expect(isinstance(getattr(target, "__dict__", None), dict), f"{name} has slots and gets attributes")
        target.__dict__.update(attributes)
    for key, value in (slots or {}).items():
        homes = (each for each in type(target).__mro__ if key in vars(each))
        slot = next((vars(each)[key] for each in homes), None)
        if not isinstance(slot, types.MemberDescriptorType):
            raise Malformed(f"{name} has no slot {key[:60]!r}")
        slot.__set__(target, value)


def of_program(kind: type) -> Trusted:
    """What a pickle may do with a class of the program: make what is data, without code of the class."""
    if issubclass(kind, enum.Enum):
        return Trusted(call=lambda arguments, _: member_of(kind, arguments))
    why = why_not(kind)
    if why is not None:
        return Trusted(why_not=why)
    return Trusted(new=lambda arguments, _: new_object(kind, arguments), fill=fill)


_CALLS: Final[dict[Any, Builder]] = {
    **_PYTHON_CALLS,
    **_NUMPY_CALLS,
    getattr: _member_named,
    operator.or_: _combined_flags,
}

TRUSTED: Final[dict[Any, Trusted]] = {
    object: Trusted(),
    **{
        value: Trusted(
            _CALLS.get(value),
            _NEW.get(value),
            set_attributes if value in _BARE else None,
            makes_constants=value in _PATHS.values(),
        )
        for value in {**_CALLS, **_NEW}
    },
}

NAMED: Final[dict[tuple[str, str], Any]] = {
    **{(module, name): kind for module in ("pathlib", "pathlib._local") for name, kind in _PATHS.items()},
    ("zoneinfo", "ZoneInfo"): zoneinfo.ZoneInfo,
    ("numpy", "ndarray"): np.ndarray,
    **{("numpy", name): getattr(np, name) for name in _SCALAR_TYPES},
    **{("numpy", getattr(np, name).__name__): getattr(np, name) for name in _SCALAR_TYPES},
    **{(f"numpy.{core}.{module}", name): found for core in ("core", "_core") for (module, name), found in _OWN.items()},
}
"""Other names than those that the classes have themselves."""
