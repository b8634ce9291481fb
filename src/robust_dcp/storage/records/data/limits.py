"""Limits for a pickle: it may ask for a small multiple of its own length, and for nothing that takes long to hash.

This module owns the errors of this package, the budget of a pickle, the check of dict keys, and the check of depth.
``machine`` and the builders call it.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from collections.abc import Callable
from typing import Any, Final

__all__ = ["MAX_DEPTH", "Budget", "Malformed", "NotData", "check_depth", "check_key", "text_of"]

MAX_DEPTH: Final = 5_000
"""How deep values may be nested. Python frees nested objects recursively, and the C stack ends at a depth of about
40,000.
"""

_UNITS: Final = 1_000_000
_UNITS_PER_BYTE: Final = 16
"""For each of its bytes, a pickle may copy or hash this many elements, besides those that it holds itself."""

_MAX_NESTED: Final = 1_000

_MAX_KEY_NODES: Final = 10_000
_MAX_KEY_DEPTH: Final = 100
_LARGE_INT: Final = (1 << 61) - 1  # integers from here on have the same hashes as smaller ones

# C code or the standard library computes their hashes, in a time that is limited by their length.
_HASHED_BY_PYTHON: Final = frozenset(
    {bool, bytes, complex, float, int, range, str, type(None), decimal.Decimal, fractions.Fraction, uuid.UUID}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone}
    | {pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())}
)


def _from(package: str) -> Any:
    """A package, if it has been imported. Where it has not been, there can be no values of its types."""
    return sys.modules.get(package)


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


class Budget:
    """What a pickle of ``nbytes`` bytes may still ask for beyond its own length."""

    def __init__(self, nbytes: int) -> None:
        self._left = _UNITS + _UNITS_PER_BYTE * nbytes
        self._nested_left = _MAX_NESTED
        self._checks: list[Callable[[], object]] = []

    def check_later(self, check: Callable[[], object]) -> None:
        """Make a check when the bytes of all tensors are there. In the legacy format they follow the pickle."""
        self._checks.append(check)

    def make_checks(self) -> None:
        """Make the checks that were put off. They raise what is wrong."""
        for check in self._checks:
            check()

    def nest(self) -> None:
        """Count a value that is freed recursively without a bound: an array of objects, or a ``defaultdict``.

        There can be as many levels of nesting as there are such values, so their number is limited.
        """
        self._nested_left -= 1
        if self._nested_left < 0:
            raise Malformed("it nests too many arrays or defaultdicts into each other")

    def spend(self, units: int) -> None:
        """Take ``units`` from the budget, or raise :class:`Malformed`."""
        self._left -= units
        if self._left < 0:
            raise Malformed("it asks for far more memory or time than a pickle of its length can need")


def check_key(key: Any, budget: Budget, n_held: int) -> None:
    """Make sure that hashing ``key`` runs no code from outside, and takes a time that is limited by its length.

    Args:
        key: a key of a dict, or an element of a set.
        n_held: how many keys there are already. A new key is compared with those that have the same hash.

    Raises:
        NotData: its class has its own code for hashing.
        Malformed: it is nested too deeply, or in too many ways.
    """
    kind = type(key)
    if kind is str:
        return
    if kind is int:
        if not -_LARGE_INT < key < _LARGE_INT:
            budget.spend(n_held)
        return
    nodes = _hashed_nodes(key, 0, 0)
    budget.spend(nodes if nodes == 1 else nodes + n_held // 64)


def _hashed_nodes(key: Any, depth: int, nodes: int) -> int:
    nodes += 1
    if nodes > _MAX_KEY_NODES or depth > _MAX_KEY_DEPTH:
        raise Malformed("a key is a tuple nested too deeply, or in too many ways, to be hashed")
    kind = type(key)
    if kind in _HASHED_BY_PYTHON or _is_hashed_by_torch(kind):
        return nodes
    if issubclass(kind, tuple) and kind.__hash__ is tuple.__hash__:
        for element in tuple.__iter__(key):
            nodes = _hashed_nodes(element, depth + 1, nodes)
        return nodes
    if kind is frozenset:  # its elements were checked when it was made, and it remembers its hash
        return nodes + len(key)
    if issubclass(kind, enum.Enum) and kind.__hash__ in (enum.Enum.__hash__, int.__hash__, str.__hash__):
        return nodes
    if isinstance(key, type):
        return nodes
    if kind in (list, dict, set, bytearray, collections.OrderedDict):
        raise Malformed(f"a key is a {kind.__name__}, which cannot be hashed")
    raise NotData(f"{kind.__module__}.{kind.__qualname__}", "which is the key of a dict and hashes by code of its own")


def _is_hashed_by_torch(kind: type) -> bool:
    torch = _from("torch")
    return torch is not None and kind in (torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format)


def check_depth(root: Any) -> None:
    """Raise :class:`Malformed` if ``root`` is nested more than :data:`MAX_DEPTH` deep. Does not recurse itself."""
    depths: dict[int, int] = {}
    stack: list[tuple[Any, Any, int]] = [(root, iter(_children(root)), 1)]
    while stack:
        value, children, depth = stack.pop()
        for child in children:
            if type(child) in _LEAVES:
                continue
            known = depths.get(id(child))
            if known is None:
                depths[id(child)] = 0  # set now, in case the child contains itself
                if len(stack) >= MAX_DEPTH:
                    raise Malformed(f"its values are nested more than {MAX_DEPTH} deep")
                stack.append((value, children, depth))
                stack.append((child, iter(_children(child)), 1))
                break
            depth = max(depth, known + 1)
        else:
            depths[id(value)] = depth
            if depth > MAX_DEPTH:
                raise Malformed(f"its values are nested more than {MAX_DEPTH} deep")
            if stack:
                parent, rest, of_parent = stack.pop()
                stack.append((parent, rest, max(of_parent, depth + 1)))


_LEAVES: Final = frozenset({bool, bytes, complex, float, int, str, type(None)})
_SEQUENCES: Final = (tuple, list, set, frozenset, collections.deque)


def _children(value: Any) -> Any:
    if isinstance(value, _SEQUENCES):
        children: Any = value
    elif isinstance(value, dict):
        children = [*dict.keys(value), *dict.values(value)]
    elif isinstance(value, slice):
        return (value.start, value.stop, value.step)
    elif isinstance(value, (type, enum.Enum)):
        return ()
    elif (torch := _from("torch")) and isinstance(value, torch.Tensor):
        children = ()  # its attributes count: a subclass holds other tensors in them
    elif (numpy := _from("numpy")) and isinstance(value, numpy.ndarray):
        return value.ravel().tolist() if value.dtype.hasobject else ()
    else:
        slots = getattr(type(value), "__dataclass_fields__", ())
        children = [getattr(value, name) for name in slots if hasattr(value, name)]
    held = getattr(value, "__dict__", None)
    return [*children, *held.values()] if isinstance(held, dict) and held else children


def text_of(value: Any) -> str:
    """``value`` in a message: in full if it is short, else only its class. It does not walk through nested values."""
    if type(value) in (bool, float, type(None)) or (type(value) is int and abs(value) < 1 << 64):
        return repr(value)
    if type(value) in (str, bytes):
        return repr(value[:60])
    return f"a {type(value).__name__}"
