"""What the names in a pickle stand for, and what may be done with them.

A name is looked up in this order: our tables of data; what the user has registered with torch; the program's enums,
named tuples, dataclasses and subclasses of tensors. Everything else is refused.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import types
from typing import Any, Final, cast

import numpy as np
import torch
from torch.serialization import get_safe_globals

from robust_dcp.storage.records import numpy_kinds, program_kinds, python_kinds, torch_kinds
from robust_dcp.storage.records.limits import Budget, Builder, NotData, expect, name_of

__all__ = ["Names", "registered_by_user"]

_KINDS: Final = (python_kinds, program_kinds, numpy_kinds, torch_kinds)
_BUILT_BY_CALL: Final[dict[int, Builder]] = {
    id(function): build for kinds in _KINDS for function, build in kinds.BUILT_BY_CALL.items()
}
_DATA: Final[tuple[Any, ...]] = tuple(function for kinds in _KINDS for function in kinds.BUILT_BY_CALL)
_NAMED: Final[dict[tuple[str, str], Any]] = {
    **{(found.__module__, found.__qualname__): found for found in (*_DATA, *python_kinds.BUILT_BY_NEW, object)},
    **python_kinds.NAMED,
    **numpy_kinds.NAMED,
    **torch_kinds.NAMED,
}
_KNOWN: Final = set(map(id, _NAMED.values()))
_REBUILD_FROM_TYPE: Final[Any] = torch._tensor._rebuild_from_type_v2
_NO_CODE: Final = "which is not known to be plain data"


class Names:
    """The names of one load. It does not see what the user registers later with torch's ``add_safe_globals``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
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
        found = torch_kinds.constant(module, name)
        if found is None:
            found = program_kinds.imported_class(module, name)
            kinds = torch_kinds if torch_kinds.is_subclass(found) else program_kinds
            why = kinds.why_not(found)
            if why is not None:
                raise NotData(f"{module}.{name}", why)
        return found

    def is_registered(self, kind: Any) -> bool:
        """Whether the user has registered ``kind``. If so, it may run any code."""
        return id(kind) in self._registered_ids

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The result of ``function(*arguments)``.

        Raises:
            NotData: the function does not make data.
            Malformed: the function makes data, but not from such arguments.
        """
        build = _BUILT_BY_CALL.get(id(function))
        if build is not None:
            return build(arguments, self._budget)
        # An enum might hash and print nested values without end.
        is_enum = isinstance(function, enum.EnumMeta)
        is_plain = all(type(argument) in (bool, bytes, float, int, str, type(None)) for argument in arguments)
        if self.is_registered(function) and (is_plain or not is_enum):
            return function(*arguments)
        if function is _REBUILD_FROM_TYPE:
            return self._tensor_of_type(arguments)
        if is_enum:
            return program_kinds.member_of(cast("type[enum.Enum]", function), arguments)
        raise NotData(name_of(function), _NO_CODE)

    def _tensor_of_type(self, arguments: tuple[Any, ...]) -> Any:
        valid = len(arguments) == 4 and type(arguments[2]) is tuple
        expect(valid, "the pickle makes a tensor with attributes from other arguments than torch.save writes")
        function, kind, of, state = arguments
        tensor = self.called(function, of)
        if self.is_registered(kind):
            return _REBUILD_FROM_TYPE(lambda: tensor, kind, (), state)
        return torch_kinds.rebuilt_with_attributes(tensor, kind, state)

    def new(self, kind: type, arguments: tuple[Any, ...]) -> Any:
        """An object of ``kind`` without its state. Raises the same as :meth:`called`."""
        build = python_kinds.BUILT_BY_NEW.get(kind)
        if build is not None:
            return build(arguments, self._budget)
        if self.is_registered(kind):
            return kind.__new__(kind, *arguments)
        if program_kinds.why_not(kind) is None:
            return program_kinds.new_object(kind, arguments)
        raise NotData(name_of(kind), _NO_CODE)

    def set_state(self, target: Any, state: Any) -> None:
        """Give ``target`` the state that its pickle gives. Raises the same as :meth:`called`."""
        kind = type(target)
        if self.is_registered(kind):
            _set_state(target, state)
        elif kind in (collections.OrderedDict, argparse.Namespace, types.SimpleNamespace):
            target.__dict__.update(python_kinds.string_keys(state, of=f"a {kind.__name__}"))
        elif dataclasses.is_dataclass(kind):
            program_kinds.fill(target, state)
        elif callable(target):
            raise NotData(f"{name_of(target)}{_first_attribute(state)}", "an attribute of a class or function itself")
        else:
            raise NotData(name_of(kind), "whose state is set by code of its own")


def _first_attribute(state: Any) -> str:
    """The name of an attribute that ``state`` sets, with a dot before it, for a message."""
    for part in state if type(state) is tuple else (state,):
        if type(part) is dict and part:
            return f".{next(iter(part))!s:.60}"
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
    registered: dict[str, Any] = {}
    for entry in entries:
        found, path = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        is_array = isinstance(found, type) and issubclass(found, (np.ndarray, np.dtype, np.generic))
        if not is_array and id(found) not in _KNOWN:
            registered[path] = found
    _last_registered[:] = [(entries, registered)]
    return registered
