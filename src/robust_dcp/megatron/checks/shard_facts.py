"""What the ShardedTensors and ShardedObjects of a rank say of themselves, and what has been made of that before.

Megatron makes all of them anew for every save. This module takes the properties of each as a tuple and compares all of
them, by value, with those of earlier saves: what was worked out of equal properties holds again. Nothing here looks at
the contents of tensors, and nothing of an earlier save keeps its tensors alive. Called by ``saving``.
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
"""What it takes to remember the facts of one shard, and what is made of them, about."""


def _properties_of(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """All fields of one of Megatron's dataclasses, whatever fields this version has, but the data."""
    return attrgetter(*(field.name for field in dataclasses.fields(kind) if field.name != "data"))


_OF_TENSOR = _properties_of(ShardedTensor)
_OF_OBJECT = _properties_of(ShardedObject)

_OF_DATA = attrgetter("dtype", "shape", "layout", "is_meta", "is_quantized", "is_nested")

Facts = list[Any]


class _Known:
    """Facts of an earlier save, and what was made of them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.made: dict[Callable[..., Any], Any] = {}


_KNOWN: Table[_Known, None] = CACHE.table(
    "shard facts", lambda known, _: _SHARD_NBYTES * len(known.facts), max_nbytes=256 << 20
)


class ShardFacts:
    """The shards of one rank, in the order of its state dict, and their properties.

    Args:
        shards: ShardedTensors and ShardedObjects, factories applied.

    Attributes:
        shards: as given.
        facts: for each shard its properties. For a ShardedTensor those of its data follow: its class and, of a plain
            tensor, what a record of it depends on; ``None`` where there is no data.
    """

    def __init__(self, shards: Iterable[ShardedBase]) -> None:
        self.shards = list(shards)
        self.facts: Facts = [_facts_of(shard) for shard in self.shards]
        self._found: _Known | None = None

    def plus(self, shard: ShardedBase) -> ShardFacts:
        """These, and one shard more."""
        more = ShardFacts([shard])
        more.shards = [*self.shards, *more.shards]
        more.facts = [*self.facts, *more.facts]
        return more

    def once(self, make: Callable[[ShardFacts], T]) -> T:
        """``make(self)``, or what it made of equal facts before. It must look at nothing but the facts."""
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
        return object()  # a class of somebody else's may say more than we know of: it is equal to nothing
    data: Any = shard.data
    if data is None:
        return _OF_TENSOR(shard), None
    kind = type(data)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _OF_TENSOR(shard), kind, _OF_DATA(data), data.is_neg(), data.is_conj()
    return _OF_TENSOR(shard), kind  # FP8 classes and the like: Megatron describes them, in every save


def _can_be_kept(facts: Facts) -> bool:
    """Whether nobody can change these facts afterwards: a list among them, say as a shape, belongs to the caller."""
    try:
        hash(tuple(facts))
    except TypeError:
        return False
    return True
