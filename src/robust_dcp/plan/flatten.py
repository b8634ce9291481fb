"""Flattens a nested state dict as DCP does, but fast enough for a save of many small tensors.

Names, order, paths and errors are the same as in
``torch.distributed.checkpoint._nested_dict.flatten_state_dict``. The planners call it in each save and load.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from robust_dcp.plan.items import Path

__all__ = ["flatten"]


class _Kind(Enum):
    LEAF = 1
    MAPPING = 2
    LIST = 3
    TENSOR = 4


# An isinstance check against an abstract class (Mapping) costs more than all other work on a value. So each type is
# checked once.
_KINDS: dict[type, _Kind] = {
    torch.Tensor: _Kind.TENSOR,
    torch.nn.Parameter: _Kind.TENSOR,
    DTensor: _Kind.TENSOR,
    dict: _Kind.MAPPING,
    list: _Kind.LIST,
    **dict.fromkeys((bool, int, float, str, bytes, tuple, type(None)), _Kind.LEAF),
}


def flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The leaves of ``state_dict`` by name, and the path of each.

    A mapping is taken apart. So is a list that holds a tensor or a mapping at any depth. Any other value is a leaf. The
    name of a leaf is its path joined by dots.

    Returns:
        ``(flat, mappings)``, as torch's ``flatten_state_dict``.

    Raises:
        ValueError: two paths have the same name.
    """
    flattening = _Flattening()
    flattening.take_mapping(state_dict, "", ())
    return flattening.flat, flattening.mappings


class _Flattening:
    """The leaves found so far."""

    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.mappings: dict[str, Path] = {}
        # A copy, so that we do not keep classes alive that the user's program creates and drops.
        self._kinds = _KINDS.copy()

    def take_mapping(self, mapping: Mapping[Any, Any], prefix: str, path: Path) -> None:
        flat, mappings, kinds = self.flat, self.mappings, self._kinds
        for key, value in mapping.items():
            part = key if type(key) is str else str(key)
            kind = kinds.get(type(value))
            # This repeats the end of _take, because a call for each leaf would cost as much as this loop.
            if kind is _Kind.TENSOR or kind is _Kind.LEAF:
                name = prefix + part
                if name in flat:
                    raise _duplicated(name)
                flat[name] = value
                mappings[name] = (*path, part)
            else:
                self._take(value, prefix + part, (*path, part))

    def _take(self, value: Any, name: str, path: Path) -> None:
        kind = self._kind_of(value)
        if kind is _Kind.MAPPING:
            self.take_mapping(value, f"{name}.", path)
        elif kind is _Kind.LIST and not self._is_terminal(value):
            for index, element in enumerate(value):
                self._take(element, f"{name}.{index}", (*path, index))
        elif name in self.flat:
            raise _duplicated(name)
        else:
            self.flat[name] = value
            self.mappings[name] = path

    def _is_terminal(self, values: list[Any]) -> bool:
        """Whether a list stays whole: it holds no tensor and no mapping, not even an empty mapping."""
        for value in values:
            kind = self._kind_of(value)
            if kind is _Kind.TENSOR or kind is _Kind.MAPPING:
                return False
            if kind is _Kind.LIST and not self._is_terminal(value):
                return False
        return True

    def _kind_of(self, value: Any) -> _Kind:
        kind = self._kinds.get(type(value))
        if kind is not None:
            return kind
        if isinstance(value, Mapping):
            kind = _Kind.MAPPING
        elif isinstance(value, list):
            kind = _Kind.LIST
        elif isinstance(value, torch.Tensor):
            kind = _Kind.TENSOR
        else:
            kind = _Kind.LEAF
        if value.__class__ is type(value):  # do not remember proxies: two of one type may stand for different things
            self._kinds[type(value)] = kind
        return kind


def _duplicated(name: str) -> ValueError:
    return ValueError(f"duplicated flatten key {name}")
