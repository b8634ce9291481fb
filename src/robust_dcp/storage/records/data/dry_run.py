"""Runs a pickle on stand-ins, to check its structure. Names mean nothing here, and only containers are built.

The check is that a pickle does not make Python's own unpickler hash, copy or nest without end. ``metadata_file`` calls
it for files that are short enough to be run twice.
"""

from __future__ import annotations

from typing import Any

from robust_dcp.storage.records.data.limits import Budget, Opaque, check_depth
from robust_dcp.storage.records.data.machine import Machine

__all__ = ["check_shape"]


def check_shape(pickled: bytes) -> None:
    """Run ``pickled`` on stand-ins.

    Raises:
        Malformed, and nearly anything else: it asks for more than a pickle of its length can need, or is not a pickle.
    """
    check_depth(Machine(pickled, 0, _Shapes(), lambda _: Opaque()).run())


class _Shapes:
    """:class:`~robust_dcp.storage.records.data.names.Names` in which each name is an :class:`Opaque`."""

    def find(self, module: str, name: str) -> Any:
        return Opaque

    def is_registered(self, kind: Any) -> bool:
        return kind is Opaque

    def called(self, function: Any, arguments: tuple[Any, ...], budget: Budget) -> Any:
        budget.spend(sum(len(argument) for argument in arguments if hasattr(type(argument), "__len__")))
        found = Opaque()
        found.extend(arguments)
        return found

    def new(self, kind: type, arguments: tuple[Any, ...], budget: Budget) -> Any:
        return self.called(kind, arguments, budget)

    def with_state(self, target: Any, state: Any, budget: Budget) -> Any:
        if isinstance(target, Opaque):
            target.extend([state])
        return target
