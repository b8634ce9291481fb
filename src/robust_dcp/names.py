"""The names of parameters, buffers and states: in a module, without what its wrappers add, and in a checkpoint.

Owns both ways to look at a name. In a module it is walked along, so that ``blocks.0._orig_mod.weight`` is
``blocks.0.weight`` in whatever order DDP, FSDP1, ``torch.compile`` and activation checkpointing are nested. In a
checkpoint only the text is there, which may have been written under other wrappers.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from robust_dcp.items import Path, global_size

_WRAPPED_IN: Final[tuple[tuple[type[nn.Module], str], ...]] = (
    (DistributedDataParallel, "module"),
    (FullyShardedDataParallel, "_fsdp_wrapped_module"),
    (ActivationWrapper, "_checkpoint_wrapped_module"),
)
"""Module wrappers, each with the name under which it holds what it wraps."""

WRAPPERS: Final = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Parts of names that a module wrapper adds, each with the wrapper."""


def fits(name: str, globs: Sequence[str]) -> bool:
    """Whether one of the patterns fits a name, or is that name, which may hold brackets."""
    return name in globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def fit_nothing(globs: Iterable[str], names: Collection[str]) -> list[str]:
    """The patterns that fit none of the names: somebody has mistyped them."""
    return [glob for glob in globs if not any(fits(name, (glob,)) for name in names)]


def without_wrappers(name: str) -> str:
    """A name without the parts that module wrappers may have added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


_NO_PARAMETER: Final = re.compile(r"(?:^|\.)(?:optim|(?:state|param_groups|running_mean|running_var)(?:\.|$))")
"""Fits names of the state of an optimizer, and of what the forward pass counts."""


def is_parameter(name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of a checkpoint is a parameter, as far as its name and dtype tell."""
    return (dtype.is_floating_point or dtype.is_complex) and _NO_PARAMETER.search(name) is None


def bare_name(name: Any) -> Any:
    """The same of what may be a name, or the number of a parameter."""
    return without_wrappers(name) if isinstance(name, str) else name


def _wrapped_in(module: nn.Module | None) -> str | None:
    """The name under which a wrapper holds its module; ``None`` for a module that is no wrapper."""
    for kind, name in _WRAPPED_IN:
        if isinstance(module, kind):
            return name
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # it takes a second to import; without it nothing is compiled
    return "_orig_mod" if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def _bare_prefix(module: nn.Module | None, prefix: str) -> str:
    """The name of a submodule without the parts that wrappers add. Some wrappers leave out their part themselves."""
    bare = []
    for part in prefix.split("."):
        while (name := _wrapped_in(module)) is not None:
            module = None if module is None else module._modules[name]
            if part == name:
                break
        else:
            bare.append(part)
            if hasattr(module, "_fqn_modifiers"):  # it leaves out a level in its state dict, as torch's names do
                module = getattr(module, module._fqn_modifiers().get(part, ""), module)  # type: ignore[operator,union-attr]
            module = None if module is None else module._modules.get(part)
    return ".".join(bare)


def bare_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """For each name that ``module`` gives to a parameter or buffer, the one without what wrappers add."""
    prefixes: dict[str, str] = {"": ""}
    bare = {}
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        if prefix not in prefixes:
            prefixes[prefix] = _bare_prefix(module, prefix)
        bare[name] = f"{prefixes[prefix]}.{leaf}" if prefixes[prefix] else leaf
    return bare


def names_of_parameters(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id: several if its weight is tied. torch names a state by the first."""
    held = list(module.named_parameters(remove_duplicate=False))
    bare = bare_names(module, (name for name, _ in held))
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in held:
        names[id(parameter)].append(bare[name])
    return names


ReadObjects = Callable[[list[str]], dict[str, Any] | None]
"""Reads objects of the checkpoint by their names. ``None``: their file is on another node."""


class StoredNames:
    """The names in the checkpoint to load, and what is stored below each.

    Args:
        metadata: of the checkpoint.
        read_objects: reads what decides which names are asked for.
    """

    def __init__(self, metadata: Metadata, read_objects: ReadObjects) -> None:
        self._entries: Mapping[str, Any] = metadata.state_dict_metadata
        self._paths: Mapping[str, Path] = metadata.planner_data or {}
        self.read_objects = read_objects
        self._unwrapped: dict[str, list[tuple[str, str]]] = {}

    @cached_property
    def _sorted(self) -> list[str]:
        # All of them take less time than a search in the index for each: 60,000 names 12 ms, one search 25 us.
        return sorted(self._entries)

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(self._sorted)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def below(self, prefix: str) -> Iterator[str]:
        """The names that begin with ``prefix`` and a dot, ascending."""
        begin = f"{prefix}."
        for place in range(bisect_left(self._sorted, begin), len(self._sorted)):
            if not self._sorted[place].startswith(begin):
                return
            yield self._sorted[place]

    def has(self, prefix: str) -> bool:
        """Whether something is stored under this name, or below it."""
        return prefix in self or next(self.below(prefix), None) is not None

    def under_wrappers(self, prefix: str, name: str, others: Container[str]) -> str | None:
        """The name below ``prefix`` under which older versions, and stock, have stored ``name`` or what is below it,
        because a wrapper added parts to it; ``None`` if there is none, or more than one.

        Args:
            others: names that others have. A module of the user's may be called ``module``.
        """
        if prefix not in self._unwrapped:
            names = [each[len(prefix) + 1 :] for each in self.below(prefix)]
            pairs = [(without_wrappers(each), each) for each in names]
            self._unwrapped[prefix] = sorted(pair for pair in pairs if pair[0] != pair[1])
        pairs, bare = self._unwrapped[prefix], without_wrappers(name)
        names_with_parts = set()
        for place in range(bisect_left(pairs, (bare, "")), len(pairs)):
            stripped, stored = pairs[place]
            if not stripped.startswith(bare):
                break
            leaf = stripped[len(bare) :]
            if not leaf or leaf.startswith("."):
                names_with_parts.add(stored.removesuffix(leaf))
        names_with_parts = {each for each in names_with_parts if each not in others}
        return names_with_parts.pop() if len(names_with_parts) == 1 else None

    def targets(self, name: str, held: Any, like: torch.Tensor | None = None) -> Any:
        """Values to read into, of the form and size that the checkpoint has under ``name`` and below it.

        Args:
            held: what there is already. Its tensors are used where they have the stored size.
            like: a tensor like which others of its size are allocated.
        """
        if name in self:
            return self._target(name, held, like)
        values: dict[Any, Any] = {}
        for each in self.below(name):
            container, there = values, held
            *parts, last = self._path_below(each, name)
            for part in parts:
                container, there = container.setdefault(part, {}), _at(there, part)[1]
            container[last] = self._target(each, _at(there, last)[1], like)
        return _shaped(values, held)

    def _path_below(self, name: str, prefix: str) -> list[str | int]:
        """The keys that lead to ``name`` from what is called ``prefix``."""
        path: list[str | int] = []
        begin, first = 0, len(prefix) + 1
        for part in self._paths.get(name) or (name,):
            end = begin + len(str(part))
            if begin >= first:
                path.append(part)
            elif end > first:
                path.append(str(part)[first - begin :])
            begin = end + 1
        return path or [name[first:]]

    def _target(self, name: str, held: Any, like: torch.Tensor | None) -> Any:
        entry = self._entries[name]
        if not isinstance(entry, TensorStorageMetadata):
            return held
        if isinstance(held, torch.Tensor) and global_size(held) == entry.size:
            return held
        dtype = entry.properties.dtype
        if like is not None and global_size(like) == entry.size:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        device = held.device if isinstance(held, torch.Tensor) else None
        return torch.empty(entry.size, dtype=dtype, device=device)


def _at(held: Any, part: str | int) -> tuple[Any, Any]:
    """The key of ``held`` that is spelt ``part`` in a name, and what is there; ``None`` if nothing is."""
    if isinstance(held, Mapping):
        for key in (part,) if part in held else held:
            if str(key) == part:
                return key, held[key]
    if isinstance(held, list | tuple) and isinstance(part, int) and part < len(held):
        return part, held[part]
    return part, None


def _shaped(values: Any, held: Any) -> Any:
    """Nested dicts by the parts of names, with lists in place of those by numbers, and with the keys of ``held``."""
    if not isinstance(values, dict):
        return values
    shaped = dict[Any, Any]()
    for part, each in values.items():
        key, there = _at(held, part)
        shaped[key] = _shaped(each, there)
    is_list = all(isinstance(part, int) for part in values) and sorted(values) == list(range(len(values)))
    return [shaped[number] for number in range(len(values))] if is_list and values else shaped
