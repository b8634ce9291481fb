"""What may stand in a state dict besides tensors and data: modules, optimizers, and whatever has a state dict.

Owns the test for DCP's ``Stateful``, what stands in the place of such a value while it is saved or loaded, and the
refusal of what is no dict. Called by ``api`` and ``started_save``.
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
    """What is saved, or loaded into, in the place of a value that is no data."""

    @property
    def values(self) -> Any:
        """The state dict."""

    def put_back(self, loaded: Any) -> None:
        """Give the value what was loaded."""


class AsStock:
    """A ``Stateful`` under the names that stock gives it: those of its ``state_dict``."""

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self.values = value.state_dict()

    def put_back(self, loaded: Any) -> None:
        self._value.load_state_dict(loaded)


class KeepsItsNames:
    """A module or an optimizer that is saved and loaded under the names of its own ``state_dict``."""

    def __init__(self, value: Stateful) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return self._value.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._value.load_state_dict(state_dict)


def with_names_of_stock(state_dict: Any) -> Any:
    """The state dict itself, or one that holds modules and optimizers under the names that stock gives them."""
    if not isinstance(state_dict, Mapping):
        return state_dict  # it is refused later, on all ranks alike
    kept = {key: KeepsItsNames(value) for key, value in state_dict.items() if isinstance(value, nn.Module | Optimizer)}
    return {**state_dict, **kept} if kept else state_dict


def refuse_other_than_dict(state_dict: Any) -> None:
    """Make sure that a state dict is a dict.

    Raises:
        RobustCheckpointError: it is something else; says what to pass instead.
    """
    if isinstance(state_dict, Mapping):
        return
    if _is_stateful(state_dict):
        what_to_do = 'give it a name, {"model": model}, or pass its state dict, model.state_dict()'
    else:
        what_to_do = 'give it a name, {"name": value}'
    raise RobustCheckpointError(f"a state dict is a dict, and a {type(state_dict).__name__} was passed: {what_to_do}")


def state_dicts_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy in which what has a state dict is replaced by it."""
    return {**state_dict, **{key: each.values for key, each in stand_ins_for(state_dict).items()}}


def stand_ins_for(state_dict: Mapping[str, Any], stored: Container[str] | None = None) -> dict[str, StandIn]:
    """What takes the place of values that are no data, by their keys.

    Args:
        stored: the names in the checkpoint that is loaded; ``None`` for a save.

    Raises:
        RobustCheckpointError: there are several optimizers under a key, and no module has the parameters of one.
    """
    candidates = {key: value for key, value in state_dict.items() if type(value) not in _TENSORS}
    modules = {key: modules_in(value) for key, value in candidates.items()}
    all_modules = [module for key in sorted(modules) for module in modules[key]]
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
    # The test for a runtime protocol costs 14 us, more than all else that is done for a small tensor.
    return type(value) not in _TENSORS and hasattr(value, "state_dict") and isinstance(value, Stateful)
