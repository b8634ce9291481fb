"""What may stand in a state dict besides tensors and data: objects with a state dict of their own.

Owns the test for DCP's ``Stateful``, and the refusal of what is no dict. Called by ``api`` and ``started_save``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from robust_dcp.errors import RobustCheckpointError

__all__ = ["is_stateful", "refuse_other_than_dict", "state_dicts_of"]

_NOT_STATEFUL = frozenset({torch.Tensor, torch.nn.Parameter})


def refuse_other_than_dict(state_dict: Any) -> None:
    """Make sure that a state dict is a dict.

    Raises:
        RobustCheckpointError: it is something else; says what to pass instead.
    """
    if isinstance(state_dict, Mapping):
        return
    if is_stateful(state_dict):
        what_to_do = 'give it a name, {"model": model}, or pass its state dict, model.state_dict()'
    else:
        what_to_do = 'give it a name, {"name": value}'
    raise RobustCheckpointError(f"a state dict is a dict, and a {type(state_dict).__name__} was passed: {what_to_do}")


def state_dicts_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A shallow copy in which ``Stateful`` values are replaced by their state dicts."""
    stateful = [key for key, value in state_dict.items() if is_stateful(value)]
    return {**state_dict, **{key: state_dict[key].state_dict() for key in stateful}}


def is_stateful(value: Any) -> bool:
    """Whether ``value`` has a state dict of its own, which is saved in its place."""
    # The test for a runtime protocol costs 14 us, more than all else that is done for a small tensor.
    return type(value) not in _NOT_STATEFUL and hasattr(value, "state_dict") and isinstance(value, Stateful)
