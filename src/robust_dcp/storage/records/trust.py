"""The one table of trust: what a name in a pickle stands for, and what may be done with it.

Both unpicklers ask it, and neither has names of its own.

| the name stands for | called | made without its state | given a state |
| --- | --- | --- | --- |
| data: ``TRUSTED`` of ``kinds``, ``torch_kinds``, ``dcp_kinds`` | as its row says | as its row says | as its row says |
| what the user has registered with torch | yes | yes | yes |
| a constant of torch, such as a dtype | no | no | no |
| an enum of the program | for a member | no | no |
| a named tuple or dataclass of the program | no | without its code | without its code |
| a subclass of tensors of the program | no | no | when its tensor is there |
| anything else | no | no | no |

"Registered by the user" is what ``torch.serialization.add_safe_globals`` was given, less what torch itself puts there
when it is imported: DTensors, device meshes, nested tensors. Their code joins process groups.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple, cast

import numpy as np
from torch.serialization import get_safe_globals

from robust_dcp.storage.records import dcp_kinds, kinds, torch_kinds
from robust_dcp.storage.records.kinds import Budget, NotData, Trusted

_TABLE: Final[dict[Any, Trusted]] = {**kinds.TRUSTED, **torch_kinds.TRUSTED, **dcp_kinds.TRUSTED}
_ROWS: Final[dict[int, Trusted]] = {id(value): row for value, row in _TABLE.items()}
_NAMED: Final[dict[tuple[str, str], Any]] = {
    **{(value.__module__, value.__qualname__): value for value in _TABLE},
    **kinds.NAMED,
    **torch_kinds.NAMED,
    **dcp_kinds.NAMED,
}
_KNOWN: Final = set(map(id, _NAMED.values()))
_REFUSED: Final = Trusted()
_PLAIN: Final = (bool, bytes, float, int, str, type(None))
_OF_TORCH: Final = ("torch._", "torch.distributed.", "torch.nested.")
"""Where the classes lie that torch registers when it is imported. To have one of these rebuilt, register it with its
name: ``add_safe_globals([(DeviceMesh, "torch.distributed.device_mesh.DeviceMesh")])``."""


class _Registered(NamedTuple):
    entries: list[Any]
    named: dict[str, Any]
    rows: dict[int, Trusted]


_last_registered: list[_Registered] = []
"""What torch last reported as registered, and what we made of it. It is kept alive, so that ids in it stay valid."""


def registered_by_user() -> dict[str, Any]:
    """What the user has registered to be rebuilt, by full name. Callers must not modify it.

    Names that are data anyway are left out: Megatron-Core registers NumPy's own functions, and these believe what a
    pickle says.
    """
    return _registered().named


def _registered() -> _Registered:
    entries = get_safe_globals()
    if _last_registered and set(map(id, entries)) == set(map(id, _last_registered[0].entries)):
        return _last_registered[0]
    named: dict[str, Any] = {}
    for entry in entries:
        value, path = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        is_array = isinstance(value, type) and issubclass(value, (np.ndarray, np.dtype, np.generic))
        is_of_torch = path.startswith(_OF_TORCH) and not isinstance(entry, tuple)
        if not is_array and not is_of_torch and id(value) not in _KNOWN:
            named[path] = value
    _last_registered[:] = [_Registered(entries, named, {id(value): _row_of(value) for value in named.values()})]
    return _last_registered[0]


def _row_of(registered: Any) -> Trusted:
    def call(arguments: tuple[Any, ...], _: Budget) -> Any:
        # An enum might hash and print nested values without end.
        if isinstance(registered, enum.EnumMeta) and not all(type(argument) in _PLAIN for argument in arguments):
            return kinds.member_of(cast("type[enum.Enum]", registered), arguments)
        return registered(*arguments)

    def new(arguments: tuple[Any, ...], _: Budget) -> Any:
        return registered.__new__(registered, *arguments)

    return Trusted(call, new if isinstance(registered, type) else None, _fill_registered, is_registered=True)


def _fill_registered(target: Any, state: Any) -> None:
    """Set the state as Python's unpickler does."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        target.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


class Trust:
    """What names stand for, and what may be done with it, while one pickle is read."""

    def __init__(self) -> None:
        self._registered = _registered()  # not what the user registers later
        self._of_program: dict[int, tuple[type, Trusted]] = {}

    def named(self, module: str, name: str) -> Any:
        """What ``module.name`` stands for.

        Raises:
            NotData: it is not known to be data.
        """
        value = _NAMED.get((module, name))
        if value is None:
            value = self._registered.named.get(f"{module}.{name}")
        if value is None:
            value = torch_kinds.constant(module, name)
        if value is None:
            value = kinds.imported_class(module, name)
            why = torch_kinds.why_not(value) if torch_kinds.is_subclass(value) else kinds.why_not(value)
            if why is not None:
                path = f"{module}.{name}"
                if path.startswith(_OF_TORCH):
                    why += f"; as a class of torch it has to be registered with its name: ({value.__name__}, {path!r})"
                raise NotData(path, why)
        return value

    def of(self, value: Any) -> Trusted:
        """What may be done with a class or function. Other values may only be held."""
        row = _ROWS.get(id(value)) or self._registered.rows.get(id(value))
        if row is not None or not isinstance(value, type):
            return row or _REFUSED
        if id(value) not in self._of_program:
            self._of_program[id(value)] = value, kinds.of_program(value)
        return self._of_program[id(value)][1]
