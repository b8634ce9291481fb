"""Describes a Megatron sharded state dict as the items that DCP saves, and says which replicas take part.

Megatron and DCP would translate each shard into objects of their own. This module derives the same description from the
shard's properties without these objects. It keeps the description for the next save with equal properties
(:mod:`~robust_dcp.megatron.checks.shard_facts`). Shards that are not plain tensors (FP8 classes, flattened ranges) go
through Megatron's own translation. Nothing here asks another rank. Called by ``planner``, inside an exchange, so all
ranks hear if this fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from robust_dcp.errors import PlanConflict
from robust_dcp.megatron import translation
from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.versions import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from robust_dcp.plan.describe import DescribedItems, ItemData, describe_items
from robust_dcp.plan.items import Form, ItemKind, ItemStructure, Replica
from robust_dcp.storage.records.record import is_fixed_size

__all__ = ["SavedShards", "TranslatedStateDict", "saved_shards"]

_Chunk = tuple[tuple[int, ...], tuple[int, int] | None]
"""Offset in the whole tensor, and the range of a flattened chunk."""


@dataclass(eq=False)
class _Saved:
    """What takes part in a save. It is computed from the facts alone. Shards are numbered in the state dict's order.

    Attributes:
        by_key: for each key of the checkpoint the shards that take part: one for each chunk of a tensor, and the main
            replica of an object.
        translated: the keys that Megatron's own translation has to describe.
        names, structures: the names and structures of the items of all other keys.
        data: the source of each of these items: for a tensor the number of its shard, for an object its index in DCP.
        views: the shape in which an item is saved, for items that get leading dimensions of size 1.
        same: pairs of shards that both claim to be the main replica of one chunk. This is valid only if both are the
            same tensor.
    """

    by_key: dict[str, list[int]] = field(default_factory=dict)
    translated: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    structures: list[ItemStructure] = field(default_factory=list)
    data: list[int | MetadataIndex] = field(default_factory=list)
    views: dict[int, tuple[int, ...]] = field(default_factory=dict)
    same: list[tuple[int, int]] = field(default_factory=list)


class TranslatedStateDict(Mapping[str, Any]):
    """The state dict that stock's code expects: by key a tensor that DCP can save, or an ``io.BytesIO`` with an object.

    Megatron makes a value only when it is asked for, and few values are (see the module's docstring). The translation
    changes the shards (detaches them, makes them contiguous), as it does with stock strategies.
    """

    def __init__(self, by_key: Mapping[str, list[ShardedBase]]) -> None:
        self._by_key = by_key
        self._made: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._made:
            self._made.update(translation.to_dcp_values({key: self._by_key[key]}))
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)


class _Shards(Mapping[str, "list[ShardedBase]"]):
    """The shards of each key that take part."""

    def __init__(self, shards: Sequence[ShardedBase], by_key: Mapping[str, list[int]]) -> None:
        self._shards = shards
        self._by_key = by_key

    def __getitem__(self, key: str) -> list[ShardedBase]:
        return [self._shards[number] for number in self._by_key[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)


@dataclass(frozen=True, eq=False)
class SavedShards:
    """What one rank brings to a save.

    Attributes:
        state_dict: the state dict that stock's code expects.
        items: the descriptions of its items.
        translated: the values that Megatron's own translation made.
    """

    state_dict: TranslatedStateDict
    items: DescribedItems
    translated: dict[str, Any]


def saved_shards(facts: ShardFacts) -> SavedShards:
    """Describe the shards that ``megatron.core.dist_checkpointing.save`` hands to a strategy.

    All replicas of a tensor take part, and the global plan decides which of them is written. Of an object only the main
    replica takes part, because replicas of a ShardedObject may differ (RNG states of data-parallel ranks do). Stock
    Megatron saves the main replica too.

    Raises:
        PlanConflict: one key stands for two things on this rank: a tensor and an object, or two tensors that both
            claim to be the main replica of one chunk.
        ValueError: a shard is a flattened range of a tensor. Megatron-Core 0.16 and newer has none.
        CheckpointingException: a main replica has no data.
    """
    shards = facts.shards
    saved = facts.once(_work_out)
    for one, other in saved.same:
        if not _is_same(shards[one], shards[other]):
            raise _claimed_twice(shards[one])
    state_dict = TranslatedStateDict(_Shards(shards, saved.by_key))
    data: list[Any] = [each if isinstance(each, MetadataIndex) else shards[each].data for each in saved.data]
    for place, shape in saved.views.items():
        data[place] = data[place].detach().view(shape)
    if not saved.translated:
        return SavedShards(state_dict, DescribedItems(saved.names, saved.structures, data), {})
    return _with_translated(saved, shards, state_dict, data)


def _with_translated(
    saved: _Saved, shards: Sequence[ShardedBase], state_dict: TranslatedStateDict, data: list[ItemData]
) -> SavedShards:
    values = {key: state_dict[key] for key in saved.translated}

    def lookup(index: MetadataIndex) -> Any:
        value = values[index.fqn]
        if hasattr(value, "__get_tensor_shard__"):
            return value.__get_tensor_shard__(index)
        return next(
            shard.tensor for shard in value.local_shards() if tuple(shard.metadata.shard_offsets) == index.offset
        )

    found = describe_items(values, lookup)
    replicas = [_replica_of(shards[number]) for key in saved.translated for number in saved.by_key[key]]
    structures = [
        structure._replace(replica=replica) for structure, replica in zip(found.structures, replicas, strict=True)
    ]
    items = DescribedItems([*saved.names, *found.names], [*saved.structures, *structures], [*data, *found.data])
    return SavedShards(state_dict, items, values)


def _work_out(facts: ShardFacts) -> _Saved:
    """Find out which shards take part, and describe each."""
    grouped: dict[str, list[int]] = {}
    for number, shard in enumerate(facts.shards):
        key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
        grouped.setdefault(key, []).append(number)
    saved = _Saved()
    describer = _Describer(facts, saved)
    for key, numbers in grouped.items():
        _refuse_mixture(key, [facts.shards[number] for number in numbers])
        if isinstance(facts.shards[numbers[0]], ShardedObject):
            describer.take_object(key, numbers)
        else:
            describer.take_tensor(key, numbers)
    return saved


def _refuse_mixture(key: str, shards: Sequence[ShardedBase]) -> None:
    if len({isinstance(shard, ShardedTensor) for shard in shards}) > 1:
        raise PlanConflict(
            f"the sharded state dict of this rank has a ShardedTensor and a ShardedObject under the key {key!r}; give "
            "one of them another key",
            key=key,
            ranks=[_own_rank()],
        )


class _Describer:
    """Fills a :class:`_Saved`, key by key."""

    def __init__(self, facts: ShardFacts, saved: _Saved) -> None:
        self._facts = facts
        self._saved = saved

    def take_object(self, key: str, numbers: list[int]) -> None:
        main = [number for number in numbers if is_main_replica(self._facts.shards[number].replica_id)]
        if not main:
            return
        self._saved.same += [(main[0], other) for other in main[1:]]
        self._saved.by_key[key] = main
        self._saved.names.append(key)
        self._saved.structures.append(ItemStructure(ItemKind.BYTES, Form.VARIABLE, replica=Replica.MAIN))
        self._saved.data.append(MetadataIndex(key))

    def take_tensor(self, key: str, numbers: list[int]) -> None:
        """Take one shard for each chunk. If a rank holds a chunk twice (tied weights), take the main replica."""
        chunks: dict[_Chunk, int] = {}
        for number in numbers:
            shard: Any = self._facts.shards[number]
            is_main = is_main_replica(shard.replica_id)
            if shard.data is None and not is_main:
                continue  # a placeholder without data cannot be saved in place of the main replica
            chunk = _chunk_of(key, shard)
            held = chunks.get(chunk)
            if held is not None and is_main and is_main_replica(self._facts.shards[held].replica_id):
                self._saved.same.append((held, number))
            if is_main or held is None:
                chunks[chunk] = number
        chosen = list(chunks.values())
        if not chosen:
            return
        self._saved.by_key[key] = chosen
        if all(map(self._is_plain, chosen)):
            for number in chosen:
                self._append(key, number)
        else:
            self._saved.translated.append(key)

    def _is_plain(self, number: int) -> bool:
        """Whether the properties of a shard are enough to describe it as Megatron's translation would."""
        shard: Any = self._facts.shards[number]
        if type(shard) is not ShardedTensor or getattr(shard, "flattened_range", None) is not None:
            return False
        return is_fixed_size(shard.data) and tuple(shard.data.shape) == tuple(shard.local_shape)

    def _append(self, key: str, number: int) -> None:
        shard: Any = self._facts.shards[number]
        sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        if shard.prepend_axis_num:
            self._saved.views[len(self._saved.names)] = sizes
        self._saved.names.append(key)
        self._saved.data.append(number)
        self._saved.structures.append(
            ItemStructure(
                kind=ItemKind.SHARD,
                form=Form.FIXED,
                dtype=str(shard.data.dtype).removeprefix("torch."),
                layout="strided",
                shape=tuple(map(int, shard.global_shape)),
                offsets=tuple(map(int, shard.global_offset)),
                sizes=tuple(map(int, sizes)),
                replica=_replica_of(shard),
            )
        )


def _replica_of(shard: ShardedBase) -> Replica:
    return Replica.MAIN if is_main_replica(shard.replica_id) else Replica.COPY


def _chunk_of(key: str, shard: ShardedTensor) -> _Chunk:
    """An identity for each chunk of a tensor. Up to 0.15 the distributed optimizer may cut chunks into ranges."""
    flat = getattr(shard, "flattened_range", None)
    if flat is None:
        return tuple(shard.global_offset), None
    if not translation.translates_flattened_ranges():
        raise ValueError(
            f"{key!r} is a flattened range of a tensor, which this Megatron-Core does not save; set "
            "distrib_optim_sharding_type to 'fully_reshardable' or 'dp_reshardable' "
            "(--dist-ckpt-optim-fully-reshardable)"
        )
    return tuple(shard.global_offset), (flat.start, flat.stop)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _claimed_twice(shard: ShardedBase) -> PlanConflict:
    if isinstance(shard, ShardedObject):
        what = f"two ShardedObjects under the key {shard.unique_key!r}, and both claim to be its main replica"
    else:
        what = f"two tensors that claim to be the main replica of {shard.key!r} at offset {list(shard.global_offset)}"
    return PlanConflict(
        f"the sharded state dict of this rank has {what}; give them different keys or replica ids",
        key=shard.unique_key if isinstance(shard, ShardedObject) else shard.key,
        ranks=[_own_rank()],
    )


def _is_same(one: ShardedBase, other: ShardedBase) -> bool:
    """Whether two shards hold the same tensor in memory, or the same object."""
    left, right = one.data, other.data
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return left is right
    same_memory: bool = left.data_ptr() == right.data_ptr() and left.shape == right.shape
    return same_memory
