"""Pickles that no writer makes: a call that may make an object is refused with other arguments than its own."""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import fractions
import io
import operator
import pathlib
import re
import uuid
from typing import Any

import numpy as np
import pytest

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from tests.storage.test_objects import load, saved

SOME_CODE = re.compile  # a function, which is no data
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]  # type: ignore[index]
SCALAR: Any = np.float64(0).__reduce__()[0]  # type: ignore[index]
FROM_BUFFER: Any = np.zeros(1).__reduce_ex__(5)[0]  # type: ignore[index]
FLOATS = np.dtype("f4")
FLOAT_STATE = (3, "<", None, None, None, -1, -1, 0)


class Call:
    """Is pickled as a call of ``function``, and a state for what it returns if there is one."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


def dtype(code: str = "f4", state: Any = FLOAT_STATE) -> Call:
    return Call(np.dtype, code, False, True, state=state)


def array(shape: Any, data: Any, dtype: Any = FLOATS, version: int = 1) -> Call:
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(version, shape, dtype, False, data))


class made(Call):  # noqa: N801
    """An object as pickle makes it: by ``__new__``, and then with a state."""

    def __init__(self, kind: Any, *arguments: Any, state: Any = None) -> None:
        super().__init__(copyreg.__newobj__, kind, *arguments, state=state)  # type: ignore[attr-defined]

    @property
    def __class__(self) -> Any:  # pickle refuses to make an object of a class that it has not
        return self.call[1][0]


MALFORMED = {
    "a bytearray of numbers": Call(bytearray, 10**12),
    "a bytearray in another code": Call(bytearray, "text", "utf-16"),
    "a filled dict": Call(dict, [("a", 1)]),
    "a complex number of texts": Call(complex, "1", "2"),
    "a set of a text": Call(frozenset, "text"),
    "a range of floats": Call(range, 1.5),
    "a slice of nothing": Call(slice),
    "an OrderedDict of numbers": Call(collections.OrderedDict, [1]),
    "a Counter of a text": Call(collections.Counter, "text"),
    "a defaultdict with contents": Call(collections.defaultdict, list, {}),
    "a deque of a dict": Call(collections.deque, {}),
    "a deque of no length": Call(collections.deque, [], "1"),
    "a short date": Call(datetime.date, b"123"),
    "a short time": Call(datetime.time, b"123"),
    "a time in a zone that is a text": Call(datetime.time, bytes(6), "UTC"),
    "a short datetime": Call(datetime.datetime, b"123"),
    "a timedelta of texts": Call(datetime.timedelta, "1", 2, 3),
    "a timezone of a number": Call(datetime.timezone, 1),
    "a Fraction of a float": Call(fractions.Fraction, 1.5),
    "a path of numbers": Call(pathlib.PurePosixPath, 1),
    "a UUID of a negative number": made(uuid.UUID, state={"int": -1}),
    "a UUID with a state that is a list": made(uuid.UUID, state=[1]),
    "a stream beyond its end": made(io.BytesIO, state=(b"12", 3, None)),
    "a deque that comes with its items": Call(collections.deque, [1, 2]),
    "a dtype of a number": Call(np.dtype, 4, False, True, state=FLOAT_STATE),
    "a dtype of another version": dtype(state=(9, *FLOAT_STATE[1:])),
    "a dtype of numbers with the flags of objects": dtype(state=(*FLOAT_STATE[:-1], 63)),
    "a dtype of objects with the flags of numbers": dtype("O8"),
    "a dtype with another order": dtype(state=(3, "?", *FLOAT_STATE[2:])),
    "a dtype of another size": dtype(state=(3, "<", None, None, None, 16, 1, 0)),
    "a time without a unit": dtype("M8"),
    "a time of another unit": dtype("M8", (*FLOAT_STATE, (None, ("parsec", 1, 1, 1)))),
    "a time of a unit that is no tuple": dtype("M8", (*FLOAT_STATE, (None, "s"))),
    "an array of another version": array((1,), bytes(4), version=2),
    "an array without a dtype": array((1,), bytes(4), dtype="f4"),
    "an array with fewer bytes": array((2,), bytes(4)),
    "an array of a negative size": array((-1,), b""),
    "an array of too many dimensions": array((1,) * 40, bytes(4)),
    "an array of objects from bytes": array((1,), bytes(8), dtype=np.dtype(object)),
    "an array of fewer objects": array((2,), [1], dtype=np.dtype(object)),
    "an array from a buffer in another order": Call(FROM_BUFFER, bytes(4), FLOATS, (1,), "K"),
    "a scalar without bytes": Call(SCALAR, FLOATS),
    "a scalar of objects": Call(SCALAR, np.dtype(object), bytes(8)),
}

NO_DATA = {
    "a slice of a list": Call(slice, [1]),
    "a defaultdict of code": Call(collections.defaultdict, SOME_CODE),
    "a Decimal with a large exponent": Call(decimal.Decimal, "1e999999"),
    "a Decimal of words": Call(decimal.Decimal, "many"),
    "a Fraction of long numbers": Call(fractions.Fraction, 1 << 20_000, 1),
    "an object of a class that is not known": made(io.StringIO),
    "an object as protocol 1 makes it": Call(copyreg._reconstructor, uuid.UUID, object, None),  # type: ignore[attr-defined]
    "a dtype with fields": Call(np.dtype, "V8", False, True, state=FLOAT_STATE),
    "a dtype with names": dtype(state=(3, "<", None, ("a",), {}, -1, -1, 0)),
    "a time with metadata": dtype("M8", (*FLOAT_STATE, ({"a": 1}, (b"s", 1, 1, 1)))),
    "an array that is not empty at first": Call(RECONSTRUCT, np.ndarray, (1 << 40,), b"b"),
    "flags that are not flags": Call(operator.or_, 1, 2),
    "a member of what is no enum": Call(getattr, io.BytesIO, "write"),
}


@pytest.mark.parametrize("forged", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_call_with_arguments_that_no_writer_gives_is_corrupt(forged: Call) -> None:
    with pytest.raises(CorruptCheckpoint, match="extra"):
        load(saved({"deep": [forged]}))


@pytest.mark.parametrize("forged", NO_DATA.values(), ids=NO_DATA.keys())
def test_what_may_take_long_or_run_code_is_refused_as_no_data(forged: Call) -> None:
    with pytest.raises(UnsafeCheckpoint, match="extra"):
        load(saved({"deep": [forged]}))


def test_a_stream_comes_back_with_its_position() -> None:
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    loaded = load(saved(stream))
    assert (loaded.getvalue(), loaded.tell()) == (b"abc", 2)
