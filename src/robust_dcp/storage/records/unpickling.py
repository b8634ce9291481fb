"""Python's unpickler, restricted to a list of allowed names. A pickle cannot change the classes that it names.

This module makes the errors: which class is refused, in which file, and what to do. ``metadata_file`` decides which
names are on the list. It is used only for ``.metadata``, which is long and regular. ``data`` reads objects: it knows
more kinds of them and limits the size of each.
"""

from __future__ import annotations

import _compat_pickle
import enum
import importlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import IO, Any, Final, cast

from robust_dcp.on_demand import errors
from robust_dcp.storage.records.data import python_kinds, user_classes
from robust_dcp.storage.records.data.limits import Budget, check_key

__all__ = ["CheckedDict", "ClassName", "RestrictedUnpickler", "all_of", "attributes_of", "plain_dicts"]

ClassName = tuple[str, str]
"""Module and qualified name, as a pickle holds them."""


def all_of(module: str, names: str) -> frozenset[ClassName]:
    """The names in ``module``. They are given in one string with spaces between them."""
    return frozenset((module, name) for name in names.split())


# Containers and numbers of Python that hold data. `range` is left out, because a few bytes of it make a list of any
# length.
_PLAIN: Final = all_of(
    "builtins", "bool bytearray bytes complex dict float frozenset int list set slice str tuple"
) | all_of("collections", "Counter OrderedDict defaultdict deque")


class CheckedDict(dict[Any, Any]):
    """A dict that looks at each key before it is hashed.

    Python's unpickler would hash a tuple of tuples that all share their parts, and never come to an end.
    """

    __slots__ = ("_budget",)

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            for part in _parts(key):
                if type(part) is not str:
                    check_key(part, self._budget, len(self))
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


def _parts(key: Any) -> Iterable[Any]:
    """What the hash of a key may be made of: the attributes of an object, or else the key itself."""
    kind: Any = type(key)
    slots = _slots_of(kind)
    held = getattr(key, "__dict__", None)
    if not slots and not isinstance(held, dict):
        return (key,)
    return [*(held or {}).values(), *(getattr(key, name, None) for name in slots)]


@lru_cache(maxsize=64)
def _slots_of(kind: type) -> tuple[str, ...]:
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))


def attributes_of(value: Any) -> list[str]:
    """The names of the attributes that an object has."""
    kind: Any = type(value)
    return [*getattr(value, "__dict__", ()), *(name for name in _slots_of(kind) if hasattr(value, name))]


def plain_dicts(value: Any, depth: int = 4) -> Any:
    """``value`` with ordinary dicts in place of those that have checked their keys."""
    if not isinstance(value, CheckedDict):
        return value
    return {key: plain_dicts(each, depth - 1) if depth else each for key, each in value.items()}


class _Bounded:
    """Stands for a plain class. It builds its objects as ``data`` does: from exact types and within the budget."""

    def __init__(self, kind: Any, budget: Budget) -> None:
        self.kind = kind
        self._budget = budget

    def __call__(self, *arguments: Any) -> Any:
        given = tuple(argument.kind if isinstance(argument, _Bounded) else argument for argument in arguments)
        found = python_kinds.BUILT_BY_CALL[self.kind](tuple(map(plain_dicts, given)), self._budget)
        if not isinstance(found, dict):
            return found
        checked = CheckedDict(self._budget)  # more items may follow
        checked.update(found)
        return checked


_ABSENT: Final = object()

# Python adds these to a class when a thread first pickles an object of it or asks for its annotations.
_INTERPRETER_CACHES: Final = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__"})

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of such a class can be set


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles data that names only classes from ``allowed``.

    Args:
        stream: the pickle, with NEXT_BUFFER in place of each EMPTY_DICT: there Python's unpickler takes what we give,
            which is a :class:`CheckedDict`. On success the stream is right after the pickle.
        file: the path of the file, for errors.
        allowed: names of classes and functions that may be imported and called, besides Python's plain ones.
        stand_ins: what to use in place of a named class. Such a class is not imported.
        registered: classes and functions that the user trusts, by their full names.
        other: what any other name stands for; ``None`` if it is refused.
        how_to_allow: the end of the sentence "... is refused; " in errors.
        budget: what the file may ask for beyond its own length.
        encoding: the encoding of strings that Python 2 pickled.

    ``load`` raises :class:`UnsafeCheckpoint` for any other class, before it is imported. It also raises it for a pickle
    that sets attributes of a class or function itself, and puts these attributes back: with the BUILD opcode a pickle
    could replace a method for the rest of the process. Other errors of a broken pickle are passed on.
    """

    def __init__(
        self,
        stream: IO[bytes],
        *,
        file: str,
        allowed: frozenset[ClassName],
        stand_ins: Mapping[ClassName, Any],
        registered: Mapping[str, Any],
        other: Callable[[str, str], Any],
        how_to_allow: str,
        budget: Budget,
        encoding: str = "ASCII",
    ) -> None:
        # An object without readinto and peek makes the C unpickler read exactly what it needs. So the stream ends right
        # after the pickle, and a damaged pickle does not confuse the unpickler's own buffer.
        bare = SimpleNamespace(read=stream.read, readline=stream.readline)
        dicts = (CheckedDict(budget) for _ in itertools.repeat(None))
        super().__init__(cast("IO[bytes]", bare), encoding=encoding, buffers=dicts)
        self._file = file
        self._allowed = allowed
        self._stand_ins = stand_ins
        self._how_to_allow = how_to_allow
        self._registered = registered
        self._other = other
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._budget = budget

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _compat_pickle.NAME_MAPPING:  # pickles of protocol 2 and older use Python 2's names
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        key = (module, name)
        found: Any
        if key in self._stand_ins:
            found = self._stand_ins[key]
        elif key in _PLAIN:
            return _Bounded(_imported(module, name), self._budget)
        elif key in self._allowed:
            found = _imported(module, name)
        elif f"{module}.{name}" in self._registered:
            found = self._registered[f"{module}.{name}"]
            return partial(_member, found) if isinstance(found, enum.EnumMeta) else found
        else:
            found = self._other(module, name)
        if found is None:
            raise errors.UnsafeCheckpoint(
                f"{self._file} asks for {module}.{name}, which is not known to be plain data, and is refused; "
                f"{self._how_to_allow}",
                file=self._file,
                what=f"{module}.{name}",
            )
        self._watch(found)
        if isinstance(found, enum.EnumMeta):
            return partial(_member, found)
        return found

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            self._put_back()

    def _watch(self, found: Any) -> None:
        """Remember the attributes of an object that a pickle could write to."""
        if id(found) in self._before:
            return
        if isinstance(found, FunctionType) or (isinstance(found, type) and found.__flags__ & _HEAP_TYPE):
            self._before[id(found)] = (found, dict(vars(found)))
        if isinstance(found, enum.EnumMeta):
            members: list[enum.Enum] = list(found)
            for member in members:
                self._before[id(member)] = (member, dict(vars(member)))

    def _put_back(self) -> None:
        changed = [_restore(found, before) for found, before in self._before.values()]
        names = sorted({name for group in changed for name in group})
        if names:
            raise errors.UnsafeCheckpoint(
                f"{self._file} sets attributes of the classes that it names ({', '.join(names)}), which no writer of "
                "checkpoints does; it was made to change this program, and is refused",
                file=self._file,
                what=names[0],
            )


def _member(found: Any, *arguments: Any) -> Any:
    """``found(value)``. The enum's own code does not run on the value, because it would hash and print it."""
    return user_classes.member_of(found, arguments)


def _restore(found: Any, before: Mapping[str, Any]) -> list[str]:
    """Give ``found`` its old attributes back. Returns the names of those that had been changed."""
    now = dict(vars(found))
    changed = {
        name
        for name in before.keys() | now.keys()
        if before.get(name, _ABSENT) is not now.get(name, _ABSENT) and name not in _INTERPRETER_CACHES
    }
    # Use the methods of type or object: a metaclass, such as that of enums, may forbid setting these attributes.
    level: Any = type if isinstance(found, type) else object
    for name in changed:
        if name in before:
            level.__setattr__(found, name, before[name])
        else:
            level.__delattr__(found, name)
    label = getattr(found, "__qualname__", None) or str(found)
    return [f"{label}.{name}" for name in sorted(changed)]


def _imported(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
