"""Rebuilds NumPy's arrays, scalars and dtypes from a dtype string and bytes of exactly the right length.

This module knows which dtypes checkpoints use. It never calls NumPy's own unpickling: that believes what a pickled
dtype says about itself, so that bytes could become pointers to objects.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np

from robust_dcp.storage.records.data.limits import Budget, Malformed, NotData
from robust_dcp.storage.records.data.pending import Pending
from robust_dcp.storage.records.data.python_kinds import Builder

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

    def complete(state: Any, budget: Budget) -> np.dtype[Any]:
        return _with_state(code, state)

    return Pending(complete)


def _with_state(code: str, state: Any) -> np.dtype[Any]:
    if type(state) is not tuple or len(state) < 8 or state[0] not in (3, 4):
        raise Malformed("the state of a dtype is not of a known version")
    order, subarray, names, fields, itemsize, alignment, flags = state[1:8]
    if subarray is not None or names is not None or fields is not None:
        raise NotData("numpy.dtype", "with fields or subarrays")
    is_object, is_time = code in _OBJECTS, code in _TIMES
    # With flags of another kind, NumPy would use the bytes of an array as pointers to objects, or pointers as bytes.
    if type(flags) is not int or flags != (63 if is_object else 8 if code[0] == "U" else 0):
        raise Malformed(f"the dtype {code!r} comes with the flags {flags!r}, which belong to another kind")
    if order not in ("<", ">", "|", "=") or (len(state) == 9) != is_time or len(state) > 9:
        raise Malformed("the state of a dtype is not what NumPy writes")
    if is_object:
        return np.dtype(object)
    dtype = np.dtype(f"{code}[{_unit(state[8])}]" if is_time else code)
    is_text = code[0] in "SU"
    if (itemsize, alignment) != (-1, -1) and not (is_text and itemsize == dtype.itemsize):
        raise Malformed("the state of a dtype says another size than its code")
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
    if type(state) is not tuple or len(state) != 5 or state[0] != 1:
        raise Malformed("the state of an array is not of a known version")
    _, shape, dtype, is_fortran, data = state
    order = "F" if is_fortran is True or is_fortran == 1 else "C"
    return _array(data, dtype, shape, order, budget)


def _array_of_buffer(arguments: tuple[Any, ...], budget: Budget) -> np.ndarray[Any, Any]:
    """``numpy._core.numeric._frombuffer(data, dtype, shape, order)``, which protocol 5 uses."""
    if len(arguments) != 4 or arguments[3] not in ("C", "F"):
        raise Malformed("the pickle makes an array from other arguments than its bytes")
    data, dtype, shape, order = arguments
    return _array(data, dtype, shape, order, budget)


def _array(data: Any, dtype: Any, shape: Any, order: Any, budget: Budget) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, np.dtype):
        raise Malformed("an array has no dtype")
    is_shape = type(shape) is tuple and all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    if not is_shape or len(shape) > _MAX_DIMENSIONS:
        raise Malformed("the shape of an array is not a tuple of sizes")
    count = math.prod(shape)
    found: np.ndarray[Any, Any]
    if dtype.hasobject:
        # Objects must come as a list.
        if type(data) is not list or len(data) != count:
            raise Malformed("an array of objects does not come as a list of them")
        budget.spend(count)
        if any(isinstance(value, np.ndarray) and value.dtype.hasobject for value in data):
            budget.nest()
        found = np.empty(count, dtype=object)
        for place, value in enumerate(data):
            found[place] = value
        return found.reshape(shape, order=order)
    if type(data) is str:  # Python 2 pickles bytes as text in protocol 2
        data = data.encode("latin-1")
    if type(data) not in (bytes, bytearray) or len(data) != count * dtype.itemsize:
        raise Malformed(f"an array of {count} elements of {dtype} comes with another number of bytes")
    if not count or not dtype.itemsize:
        return np.empty(shape, dtype=dtype, order=order)
    budget.spend(len(data) >> 3)
    return np.frombuffer(data, dtype).copy().reshape(shape, order=order)


def _scalar(arguments: tuple[Any, ...], budget: Budget) -> Any:
    if len(arguments) != 2 or not isinstance(arguments[0], np.dtype) or arguments[0].hasobject:
        raise Malformed("the pickle makes a scalar from other arguments than its dtype and bytes")
    dtype, data = arguments
    return _array(data, dtype, (), "C", budget)[()]


_RECONSTRUCT: Final[Any] = np.empty(0).__reduce__()[0]
_SCALAR: Final[Any] = np.float64(0).__reduce__()[0]
_FROM_BUFFER: Final[Any] = np.zeros(1).__reduce_ex__(5)[0]

# A value may name a scalar type instead of a dtype: {"dtype": numpy.float32}.
_SCALAR_TYPES: Final = (
    *("bool_", "float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
    *("int8", "int16", "int32", "int64", "intc", "longlong"),
    *("uint8", "uint16", "uint32", "uint64", "uintc", "ulonglong"),
    *("str_", "bytes_", "datetime64", "timedelta64"),
)

BUILT_BY_CALL: Final[dict[Any, Builder]] = {
    np.dtype: _dtype,
    _RECONSTRUCT: _empty_array,
    _SCALAR: _scalar,
    _FROM_BUFFER: _array_of_buffer,
}

NAMED: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    **{("numpy", name): getattr(np, name) for name in _SCALAR_TYPES},
    **{("numpy", getattr(np, name).__name__): getattr(np, name) for name in _SCALAR_TYPES},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FROM_BUFFER for core in ("core", "_core")},
}
