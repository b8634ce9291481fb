"""Rebuilds the program's enums, named tuples and dataclasses as data, without running any of their code.

This module decides which of these classes can be rebuilt like that, and how. It looks for a class only in modules that
the program has imported already. It imports nothing for a checkpoint.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import operator
import sys
import types
import typing
from typing import Any, Final

from robust_dcp.storage.records.limits import Budget, Builder, Malformed, NotData, expect, name_of

__all__ = ["BUILT_BY_CALL", "fill", "imported_class", "member_of", "new_object", "set_attributes", "why_not"]

_NOT_DATA: Final = "which is not known to be plain data"
_VALUE_TYPES: Final = frozenset({bool, bytes, float, int, str, type(None), tuple})


def imported_class(module: str, name: str) -> type:
    """The class of that name, if the program has imported its module.

    Raises:
        NotData: there is no such class. The message says what there is.
    """
    what = f"{module}.{name}"
    found: Any = sys.modules.get(module)
    if found is None:
        raise NotData(what, f"{_NOT_DATA} (its module is not imported here)")
    for part in name.split("."):
        # Look into the namespaces directly: getattr could run a module's __getattr__, or a descriptor.
        found = getattr(found, "__dict__", {}).get(part) if isinstance(found, (types.ModuleType, type)) else None
    if not isinstance(found, type):
        raise NotData(what, f"{_NOT_DATA} ({'it is a function' if callable(found) else 'it is not a class here'})")
    return found


def why_not(kind: type) -> str | None:
    """Why objects of a class cannot be rebuilt as data; ``None`` if they can."""
    if isinstance(kind, enum.EnumMeta):
        return None if type(kind) is enum.EnumMeta else "an enum with a metaclass of its own"
    if issubclass(kind, tuple):
        return None if _is_named_tuple(kind) else f"{_NOT_DATA} (a tuple with code of its own)"
    if dataclasses.is_dataclass(kind):
        own = _own_code(kind)
        return None if own is None else f"a dataclass that is not plain data (it has {own})"
    return _NOT_DATA


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
        for name in ("__new__", "__init__", "__setstate__", "__reduce__", "__reduce_ex__", "__getattr__", "_fields")
    )


_GENERATED: Final = ("_dataclass_getstate", "_dataclass_setstate")
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
        if setter is not None and not (each.__dataclass_params__.frozen and _is_generated(setter)):  # type: ignore[attr-defined]
            return "a __setattr__"
        if "__dict__" in vars(each) and not isinstance(vars(each)["__dict__"], types.GetSetDescriptorType):
            return "a __dict__ of its own"
    return None


def _is_generated(function: Any) -> bool:
    """Whether ``dataclasses`` made a function. It compiles its functions from strings."""
    return getattr(getattr(function, "__code__", None), "co_filename", "") == "<string>"


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


def _member_named(arguments: tuple[Any, ...], budget: Budget) -> enum.Enum:
    """``getattr(kind, name)``, for an enum and the name of a member: some enums are pickled with it."""
    kind, name = arguments
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


BUILT_BY_CALL: Final[dict[Any, Builder]] = {getattr: _member_named, operator.or_: _combined_flags}


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
    if why_not(kind) is not None:
        raise NotData(name_of(kind), "whose state is set by code of its own")
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
