"""What the names in a pickle stand for, and what may be done with them.

A name is looked up in this order: our tables of data; what the user has registered with torch; the program's enums,
named tuples, dataclasses and subclasses of tensors. Everything else is refused. ``machine`` calls this module.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import types
from functools import cache
from typing import Any, Final, cast

import numpy as np
import torch
from torch.serialization import get_safe_globals

from robust_dcp.storage.records.data import arrays, python_kinds, tensors, user_classes
from robust_dcp.storage.records.data.limits import Budget, Malformed, NotData
from robust_dcp.storage.records.data.python_kinds import Builder, string_keys

__all__ = ["Names", "registered_by_user"]

_NAMED: Final[dict[tuple[str, str], Any]] = {**python_kinds.NAMED, **arrays.NAMED, **tensors.NAMED}
_BUILT_BY_CALL: Final[dict[int, Builder]] = {
    id(function): build
    for table in (python_kinds.BUILT_BY_CALL, arrays.BUILT_BY_CALL, tensors.BUILT_BY_CALL)
    for function, build in table.items()
}
_KNOWN: Final = {id(found) for found in _NAMED.values()}
_NO_CODE: Final = "which is not known to be plain data"


class Names:
    """The names of one load. It does not see what the user registers later with torch's ``add_safe_globals``."""

    def __init__(self) -> None:
        self._registered = registered_by_user()
        self._registered_ids = set(map(id, self._registered.values()))
        self._found: dict[tuple[str, str], Any] = {}

    def find(self, module: str, name: str) -> Any:
        """Find what ``module.name`` stands for.

        Raises:
            NotData: it is not known to be data.
        """
        key = (module, name)
        if key not in self._found:
            self._found[key] = self._look_up(module, name)
        return self._found[key]

    def _look_up(self, module: str, name: str) -> Any:
        if (module, name) in _NAMED:
            return _NAMED[module, name]
        if f"{module}.{name}" in self._registered:
            return self._registered[f"{module}.{name}"]
        if (module, name) in (("torch._tensor", "_rebuild_from_type_v2"), ("torch.tensor", "_rebuild_from_type_v2")):
            return _rebuild_from_type()
        found = tensors.constant(name) if module == "torch" else None
        found = tensors.storage_type(module, name) if found is None else found
        if found is None:
            found = user_classes.imported_class(module, name)
            why = tensors.why_not(found) if tensors.is_subclass(found) else user_classes.why_not(found)
            if why is not None:
                raise NotData(f"{module}.{name}", why)
        return found

    def is_registered(self, kind: Any) -> bool:
        """Whether the user has registered ``kind``. If so, it may run any code."""
        return id(kind) in self._registered_ids

    def called(self, function: Any, arguments: tuple[Any, ...], budget: Budget) -> Any:
        """The result of ``function(*arguments)``.

        Raises:
            NotData: the function does not make data.
            Malformed: the function makes data, but not from such arguments.
        """
        build = _BUILT_BY_CALL.get(id(function))
        if build is not None:
            return build(arguments, budget)
        is_enum = isinstance(function, enum.EnumMeta)
        if self.is_registered(function) and not (is_enum and _are_nested(arguments)):
            return function(*arguments)
        if function is _rebuild_from_type():
            return self._tensor_of_type(arguments, budget)
        if is_enum:
            return user_classes.member_of(cast("type[enum.Enum]", function), arguments)
        raise NotData(_name(function), _NO_CODE)

    def _tensor_of_type(self, arguments: tuple[Any, ...], budget: Budget) -> Any:
        if len(arguments) != 4 or type(arguments[2]) is not tuple:
            raise Malformed("the pickle makes a tensor with attributes from other arguments than torch.save writes")
        function, kind, of, state = arguments
        if self.is_registered(kind):
            tensor = self.called(function, of, budget)
            return _rebuild_from_type()(lambda: tensor, kind, (), state)
        return tensors.rebuilt_with_attributes(self.called(function, of, budget), kind, state)

    def new(self, kind: type, arguments: tuple[Any, ...], budget: Budget) -> Any:
        """An object of ``kind`` without its state. Raises the same as :meth:`called`."""
        build = python_kinds.BUILT_BY_NEW.get(kind)
        if build is not None:
            return build(arguments, budget)
        if self.is_registered(kind):
            return kind.__new__(kind, *arguments)
        if user_classes.why_not(kind) is None:
            return user_classes.new_object(kind, arguments)
        raise NotData(_name(kind), _NO_CODE)

    def with_state(self, target: Any, state: Any, budget: Budget) -> Any:
        """``target`` with the state that its pickle gives. Raises the same as :meth:`called`."""
        kind = type(target)
        if self.is_registered(kind):
            _set_state(target, state)
        elif kind in (collections.OrderedDict, argparse.Namespace, types.SimpleNamespace):
            target.__dict__.update(string_keys(state, of=f"a {kind.__name__}"))
        elif dataclasses.is_dataclass(kind):
            return user_classes.filled(target, state)
        elif callable(target):
            raise NotData(f"{_name(target)}{_first_attribute(state)}", "an attribute of a class or function itself")
        else:
            raise NotData(_name(kind), "whose state is set by code of its own")
        return target


def _are_nested(arguments: tuple[Any, ...]) -> bool:
    """Whether the arguments contain other values, so that an enum might hash and print them without end."""
    return any(type(argument) not in (bool, bytes, float, int, str, type(None)) for argument in arguments)


def _first_attribute(state: Any) -> str:
    """The name of an attribute that ``state`` sets, with a dot before it, for a message."""
    for part in state if type(state) is tuple else (state,):
        if type(part) is dict and part:
            name = next(iter(part))
            return f".{name[:60]}" if type(name) is str else ""
    return ""


def _set_state(target: Any, state: Any) -> None:
    """Set the state as Python's unpickler does, for an object of a class that the user has registered."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        target.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


@cache
def _rebuild_from_type() -> Any:
    return torch._tensor._rebuild_from_type_v2


def _name(found: Any) -> str:
    name = getattr(found, "__qualname__", None) or type(found).__qualname__
    module = getattr(found, "__module__", None) or type(found).__module__
    return f"{module}.{name}"


_last_registered: list[tuple[list[Any], dict[str, Any]]] = []
"""What torch last reported as registered, and what we made of it. It is kept alive, so that ids in it stay valid."""


def registered_by_user() -> dict[str, Any]:
    """What ``torch.serialization.add_safe_globals`` was given, by full name. Callers must not modify it.

    Names that are data anyway are left out: Megatron-Core registers NumPy's own functions, and these believe what a
    pickle says.
    """
    entries = get_safe_globals()
    if _last_registered and set(map(id, entries)) == set(map(id, _last_registered[0][0])):
        return _last_registered[0][1]
    registered = _named(entries)
    _last_registered[:] = [(entries, registered)]
    return registered


def _named(entries: list[Any]) -> dict[str, Any]:
    registered: dict[str, Any] = {}
    for entry in entries:
        found, path = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        is_array = isinstance(found, type) and issubclass(found, (np.ndarray, np.dtype, np.generic))
        if not is_array and id(found) not in _KNOWN:
            registered[path] = found
    return registered
