"""Handles values in a state dict that have a state dict of their own, such as modules and optimizers.

Owns the test for DCP's ``Stateful``, and the stand-in that is saved or loaded in place of such a value. It also refuses
a state dict that is not a dict. Called by ``api`` and ``started_save``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.module_states import ModuleStates, OptimizerStates, modules_in, optimizers_in, with_modules

__all__ = ["AsStock", "StandIn", "refuse_other_than_dict", "stand_ins_for", "state_dicts_of", "with_names_of_stock"]

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class StandIn(Protocol):
    """Takes the place of a module, optimizer or other ``Stateful`` value while it is saved or loaded."""

    @property
    def values(self) -> Any:
        """The state dict."""

    def put_back(self, loaded: Any) -> None:
        """Load the state into the value."""


class AsStock:
    """The stand-in for a ``Stateful`` value. As in stock, the names are those of its ``state_dict``."""

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self.values = value.state_dict()

    def put_back(self, loaded: Any) -> None:
        self._value.load_state_dict(loaded)


class KeepsItsNames:
    """Wraps a module or an optimizer, so that it is saved and loaded under the names of its own ``state_dict``."""

    def __init__(self, value: Stateful) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return self._value.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._value.load_state_dict(state_dict)


def with_names_of_stock(state_dict: Any) -> Any:
    """Make modules and optimizers keep the names that stock gives them. Without any, return the state dict itself."""
    if not isinstance(state_dict, Mapping):
        return state_dict  # all ranks refuse it later in the same way
    kept = {key: KeepsItsNames(value) for key, value in state_dict.items() if isinstance(value, nn.Module | Optimizer)}
    return {**state_dict, **kept} if kept else state_dict


def refuse_other_than_dict(state_dict: Any) -> None:
    """Check that a state dict is a dict.

    Raises:
        RobustCheckpointError: it is something else. The message says what to pass instead.
    """
    if isinstance(state_dict, Mapping):
        return
    if _is_stateful(state_dict):
        what_to_do = 'give it a name, {"model": model}, or pass its state dict, model.state_dict()'
    else:
        what_to_do = 'give it a name, {"name": value}'
    raise RobustCheckpointError(f"a state dict is a dict, and a {type(state_dict).__name__} was passed: {what_to_do}")


def state_dicts_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy in which each value that has a state dict is replaced by that state dict."""
    return {**state_dict, **{key: each.values for key, each in stand_ins_for(state_dict).items()}}


def stand_ins_for(state_dict: Mapping[str, Any], stored: Container[str] | None = None) -> dict[str, StandIn]:
    """The stand-ins for values that have a state dict of their own, by key.

    Args:
        stored: the names in the checkpoint to load; ``None`` for a save.

    Raises:
        RobustCheckpointError: there are several optimizers under a key, and no module has the parameters of one.
    """
    candidates = {key: value for key, value in state_dict.items() if type(value) not in _TENSORS}
    modules = {key: modules_in(value) for key, value in candidates.items()}
    all_modules = [module for key in sorted(modules, key=str) for module in modules[key]]
    has_stages = any(isinstance(candidates[key], list | tuple) for key in modules if modules[key])
    found: dict[str, StandIn] = {}
    for key, value in candidates.items():
        if modules[key]:
            found[key] = ModuleStates(key, modules[key], stored)
        elif optimizers := optimizers_in(value):
            owned = with_modules(key, optimizers, all_modules)
            found[key] = OptimizerStates(key, owned, by_parameter=has_stages, stored=stored)
        elif _is_stateful(value):
            found[key] = AsStock(value)
    return found


def _is_stateful(value: Any) -> bool:
    # isinstance() with a protocol takes 14 us, more than everything else that is done for a small tensor.
    return type(value) not in _TENSORS and hasattr(value, "state_dict") and isinstance(value, Stateful)
