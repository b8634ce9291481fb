"""Python's unpickler, held to what is on a list; it leaves no traces in what it has built from.

Owns the refusal: which class, in which file, and what to do about it. Never decides what belongs on a list; that is
``metadata_classes``. Used for ``.metadata`` alone, which is long and regular; objects are read by ``data``, which knows
more kinds and bounds each of them.
"""

from __future__ import annotations

import _compat_pickle
import enum
import importlib
import pickle
from collections.abc import Mapping
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import IO, Any, Final, cast

import torch

from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.records.data import python_kinds, user_classes
from robust_dcp.storage.records.data.limits import Budget
from robust_dcp.storage.records.data.names import registered_by_user

__all__ = ["RestrictedUnpickler", "all_of"]

ClassName = tuple[str, str]
"""Module and qualified name, as a pickle holds them."""


def all_of(module: str, names: str) -> frozenset[ClassName]:
    """The names in ``module``, given in one string and divided by spaces."""
    return frozenset((module, name) for name in names.split())


# Containers and numbers of Python that hold data. Not `range`, of which a few bytes make a list of any length.
_PLAIN: Final = all_of(
    "builtins", "bool bytearray bytes complex dict float frozenset int list set slice str tuple"
) | all_of("collections", "Counter OrderedDict defaultdict deque")


class _Bounded:
    """Stands for a plain class: builds its objects as ``data`` does, of exact types and within the budget."""

    def __init__(self, kind: Any, budget: Budget) -> None:
        self.kind = kind
        self._budget = budget

    def __call__(self, *arguments: Any) -> Any:
        given = tuple(argument.kind if isinstance(argument, _Bounded) else argument for argument in arguments)
        return python_kinds.BUILT_BY_CALL[self.kind](given, self._budget)


# Values of these are named in a pickle like classes, but can neither be called nor changed.
_CONSTANT_TYPES: Final = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)

_ABSENT: Final = object()

# What Python itself adds to a class when another thread first pickles an object of it or asks for its annotations.
_INTERPRETER_CACHES: Final = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__"})

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class whose attributes can be set


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles data that names only classes from ``allowed``.

    Args:
        stream: the pickle; on success it stands right behind it.
        file: what is being read, for errors.
        allowed: names of classes and functions that may be imported and called, beside Python's plain ones.
        stand_ins: what to use in place of a named class; such a class is not imported.
        how_to_allow: the end of the sentence "... is refused; " in errors.
        budget: what the file may ask for beyond its own length.
        encoding: of strings that Python 2 pickled.

    Constants of torch (dtypes and the like) and what the user has registered with
    ``torch.serialization.add_safe_globals`` are always allowed.

    ``load`` raises :class:`UnsafeCheckpoint` for any other class, before anything of it is imported, and for a pickle
    that sets attributes of a class or function itself (with the BUILD opcode it could replace a method for the rest of
    the process); they are put back. Whatever else a broken pickle raises is passed on.
    """

    def __init__(
        self,
        stream: IO[bytes],
        *,
        file: str,
        allowed: frozenset[ClassName],
        stand_ins: Mapping[ClassName, Any],
        how_to_allow: str,
        budget: Budget,
        encoding: str = "ASCII",
    ) -> None:
        # Without readinto and peek: the C unpickler then takes exactly what it needs, so that the stream stands behind
        # the pickle, and does not trip over its own buffer in a damaged one.
        bare = SimpleNamespace(read=stream.read, readline=stream.readline)
        super().__init__(cast("IO[bytes]", bare), encoding=encoding)
        self._file = file
        self._allowed = allowed
        self._stand_ins = stand_ins
        self._how_to_allow = how_to_allow
        self._registered = registered_by_user()
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._budget = budget

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _compat_pickle.NAME_MAPPING:  # pickles of protocol 2 and older hold Python 2's names
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
        elif module == "torch" and isinstance(getattr(torch, name, None), _CONSTANT_TYPES):
            return getattr(torch, name)
        else:
            raise UnsafeCheckpoint(
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
        """Remember the attributes of what a pickle could write to."""
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
            raise UnsafeCheckpoint(
                f"{self._file} sets attributes of the classes that it names ({', '.join(names)}), which no writer of "
                "checkpoints does; it was made to change this program, and is refused",
                file=self._file,
                what=names[0],
            )


def _member(found: Any, *arguments: Any) -> Any:
    """``found(value)``, without a look at the value by code of the enum, which would hash and print it."""
    return user_classes.member_of(found, arguments)


def _restore(found: Any, before: Mapping[str, Any]) -> list[str]:
    """Give ``found`` its attributes back; returns the names of those that had been changed."""
    now = dict(vars(found))
    changed = {
        name
        for name in before.keys() | now.keys()
        if before.get(name, _ABSENT) is not now.get(name, _ABSENT) and name not in _INTERPRETER_CACHES
    }
    # On the level of type or object: a metaclass (an enum's, say) may forbid to set what is being repaired here.
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
