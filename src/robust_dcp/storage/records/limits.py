"""Limits for a pickle: it may ask for a small multiple of its own length, and for nothing that takes long to hash.

This module owns the errors of this package, the budget of a pickle with the check of its keys, and the check of depth.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import gc
import pathlib
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

__all__ = ["Budget", "Builder", "Malformed", "NotAPickle", "NotData", "Pending", "check_depth", "expect", "name_of"]

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


class Budget:
    """What a pickle of ``nbytes`` bytes may still ask for beyond its own length."""

    def __init__(self, nbytes: int) -> None:
        self._left = _UNITS + _UNITS_PER_BYTE * nbytes
        self._nested_left = _MAX_NESTED

    def spend(self, units: int) -> None:
        """Take ``units`` from the budget, or raise :class:`Malformed`."""
        self._left -= units
        expect(self._left >= 0, "it asks for far more memory or time than a pickle of its length can need")

    def hold(self, values: Any) -> None:
        """Count values that go into one that Python frees recursively without a bound, if they are such ones, too."""
        for value in values:
            is_array = isinstance(value, np.ndarray) and value.dtype.hasobject
            self._nested_left -= is_array or isinstance(value, (collections.deque, collections.defaultdict))
        expect(self._nested_left >= 0, "it nests too many arrays, deques or defaultdicts into each other")

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


@dataclass(eq=False)
class Pending:
    """Takes the place of a value on the stack until its state comes. Arrays, dtypes and UUIDs are pickled in two steps.

    Attributes:
        complete: makes the value from the state.
        places: where in the memo this object is, so that the value can replace it there.
    """

    complete: Callable[[Any, Budget], Any]
    places: list[int] = field(default_factory=list)


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
    if issubclass(kind, tuple) and kind.__hash__ is tuple.__hash__:
        for element in tuple.__iter__(key):
            nodes = _hashed_nodes(element, depth + 1, nodes)
        return nodes
    if kind is frozenset:  # its elements were checked when it was made, and it remembers its hash
        return nodes + len(key)
    if issubclass(kind, enum.Enum) and kind.__hash__ in (enum.Enum.__hash__, int.__hash__, str.__hash__):
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
