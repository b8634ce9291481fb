"""Rebuilds NumPy's arrays, scalars and dtypes from a dtype string and bytes of exactly the right length.

This module knows which dtypes checkpoints use. It never calls NumPy's own unpickling: that believes what a pickled
dtype says about itself, so that bytes could become pointers to objects.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, Final

import numpy as np

from robust_dcp.storage.records.limits import Budget, Builder, Malformed, NotData, Pending, expect

__all__ = ["BUILT_BY_CALL", "NAMED"]

_PLAIN: Final = re.compile(r"(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU]\d{1,9})", re.ASCII)
_TIMES: Final = {"m8", "M8"}
_UNITS: Final = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"})
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
    if type(name) is not str or name not in _UNITS or not 1 <= unit[1] < 1 << 31 or unit[2] != 1:
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

BUILT_BY_CALL: Final[dict[Any, Builder]] = {
    np.dtype: _dtype,
    **dict(zip(_OWN.values(), (_empty_array, _scalar, _array_of_buffer), strict=True)),
}

NAMED: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    **{("numpy", name): getattr(np, name) for name in _SCALAR_TYPES},
    **{("numpy", getattr(np, name).__name__): getattr(np, name) for name in _SCALAR_TYPES},
    **{(f"numpy.{core}.{module}", name): found for core in ("core", "_core") for (module, name), found in _OWN.items()},
}
