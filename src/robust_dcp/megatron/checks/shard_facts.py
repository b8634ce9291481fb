"""The properties of a rank's shards, and a cache of what was computed from them.

Megatron makes new ShardedTensor and ShardedObject instances for every save, though they rarely differ from those of the
last save. This module collects the properties of each shard as a tuple and compares these tuples with those of earlier
saves by value. If all are equal, earlier results are used again. The contents of tensors are never read, and no tensor
of an earlier save is kept alive. Called by ``saving``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch

from robust_dcp.megatron.versions import ShardedBase, ShardedObject, ShardedTensor
from robust_dcp.structure_cache import CACHE, Table

__all__ = ["ShardFacts"]

T = TypeVar("T")

_SHARD_NBYTES = 2000
"""About how much memory the facts of one shard take, together with the results computed from them."""


def _properties_of(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A getter for all fields of one of Megatron's dataclasses except the data, in whatever version is installed."""
    return attrgetter(*(field.name for field in dataclasses.fields(kind) if field.name != "data"))


_OF_TENSOR = _properties_of(ShardedTensor)
_OF_OBJECT = _properties_of(ShardedObject)

_OF_DATA = attrgetter("dtype", "shape", "layout", "is_meta", "is_quantized", "is_nested")

Facts = list[Any]


class _Known:
    """The facts of an earlier save, and the results computed from them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.made: dict[Callable[..., Any], Any] = {}


_KNOWN: Table[_Known, None] = CACHE.table(
    "shard facts", lambda known, _: _SHARD_NBYTES * len(known.facts), max_nbytes=256 << 20
)


class ShardFacts:
    """The shards of one rank, in the order of its state dict, and their properties.

    Args:
        shards: ShardedTensors and ShardedObjects, after factories were applied.

    Attributes:
        shards: the argument.
        facts: the properties of each shard. For a ShardedTensor, those of its data follow: the class of the data and,
            if it is a plain tensor, all that the record in the file depends on. They are ``None`` if there is no data.
    """

    def __init__(self, shards: Iterable[ShardedBase]) -> None:
        self.shards = list(shards)
        self.facts: Facts = [_facts_of(shard) for shard in self.shards]
        self._found: _Known | None = None

    def plus(self, shard: ShardedBase) -> ShardFacts:
        """The same shards and one more."""
        more = ShardFacts([shard])
        more.shards = [*self.shards, *more.shards]
        more.facts = [*self.facts, *more.facts]
        return more

    def once(self, make: Callable[[ShardFacts], T]) -> T:
        """Return ``make(self)``, or its earlier result for equal facts. ``make`` must depend on the facts only."""
        known = self._known()
        try:
            found: T = known.made[make]
        except KeyError:
            found = known.made[make] = make(self)
        return found

    def _known(self) -> _Known:
        if self._found is None:
            found = next((one for one, _ in _KNOWN.latest_first() if one.facts == self.facts), None)
            self._found = found or _Known(self.facts)
            if found is not None or _can_be_kept(self.facts):
                _KNOWN.put(self._found, None)
        return self._found


def _facts_of(shard: ShardedBase) -> Any:
    if type(shard) is ShardedObject:
        return _OF_OBJECT(shard)
    if type(shard) is not ShardedTensor:
        return object()  # a foreign class may have properties that we do not know, so it never counts as equal
    data: Any = shard.data
    if data is None:
        return _OF_TENSOR(shard), None
    kind = type(data)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _OF_TENSOR(shard), kind, _OF_DATA(data), data.is_neg(), data.is_conj()
    return _OF_TENSOR(shard), kind  # FP8 classes and the like: Megatron describes them anew in every save


def _can_be_kept(facts: Facts) -> bool:
    """Whether nobody can change these facts later. For example, a caller could still change a shape that is a list."""
    try:
        hash(tuple(facts))
    except TypeError:
        return False
    return True
