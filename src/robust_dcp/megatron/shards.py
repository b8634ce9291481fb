"""The shards of a Megatron sharded state dict as the items that DCP saves, and the planner that saves them.

Megatron makes new ShardedTensor and ShardedObject instances for every save, though they rarely differ from those of the
last save. So this module collects the properties of each shard as a tuple and compares these tuples with those of
earlier saves by value. If all are equal, what was worked out from them is used again: which shards take part, and a
description of each. The contents of tensors are never read, and no tensor of an earlier save is kept alive.

Shards that are not plain tensors (FP8 classes) go through Megatron's own translation into objects of DCP. Nothing here
asks another rank.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.errors import PlanConflict
from robust_dcp.items import Form, ItemKind, ItemStructure, Replica
from robust_dcp.megatron.versions import to_dcp_values
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.plan.state_dict import DescribedItems, describe_items, overridden
from robust_dcp.storage.records.kinds import NotData
from robust_dcp.storage.records.record import is_fixed_size
from robust_dcp.structure_cache import Cache

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


_KNOWN: Cache[_Known, None] = Cache(max_nbytes=256 << 20)


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

    def once(self, make: Callable[[ShardFacts], T]) -> T:
        """Return ``make(self)``, or its earlier result for equal facts. ``make`` must depend on the facts only."""
        if self._found is None:
            found = next((one for one, _ in _KNOWN.latest_first() if one.facts == self.facts), None)
            self._found = found or _Known(self.facts)
            if found is not None or _can_be_kept(self.facts):
                _KNOWN.put(self._found, None, _SHARD_NBYTES * len(self.facts))
        made = self._found.made
        if make not in made:
            made[make] = make(self)
        result: T = made[make]
        return result


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


class _Saved(msgspec.Struct, eq=False):
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

    by_key: dict[str, list[int]] = msgspec.field(default_factory=dict)
    translated: list[str] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)
    structures: list[ItemStructure] = msgspec.field(default_factory=list)
    data: list[int | MetadataIndex] = msgspec.field(default_factory=list)
    views: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    same: list[tuple[int, int]] = msgspec.field(default_factory=list)

    def take_object(self, shards: Sequence[Any], key: str, numbers: list[int]) -> None:
        main = [number for number in numbers if is_main_replica(shards[number].replica_id)]
        if main:
            self.same += [(main[0], other) for other in main[1:]]
            self.by_key[key] = main
            self.names.append(key)
            self.structures.append(structure_of(shards[main[0]]))
            self.data.append(MetadataIndex(key))

    def take_tensor(self, shards: Sequence[Any], key: str, numbers: list[int]) -> None:
        """Take one shard for each chunk. If a rank holds a chunk twice (tied weights), take the main replica."""
        chunks: dict[tuple[int, ...], int] = {}
        for number in numbers:
            shard = shards[number]
            is_main = is_main_replica(shard.replica_id)
            if shard.data is None and not is_main:
                continue  # a placeholder without data cannot be saved in place of the main replica
            held = chunks.get(tuple(shard.global_offset))
            if held is not None and is_main and is_main_replica(shards[held].replica_id):
                self.same.append((held, number))
            if is_main or held is None:
                chunks[tuple(shard.global_offset)] = number
        if not chunks:
            return
        self.by_key[key] = list(chunks.values())
        if all(_is_plain(shards[number]) for number in chunks.values()):
            for number in chunks.values():
                self._append(key, number, shards[number])
        else:
            self.translated.append(key)

    def _append(self, key: str, number: int, shard: Any) -> None:
        structure = structure_of(shard)._replace(dtype=str(shard.data.dtype).removeprefix("torch."))
        if shard.prepend_axis_num:
            self.views[len(self.names)] = structure.sizes
        self.names.append(key)
        self.data.append(number)
        self.structures.append(structure)


def _is_plain(shard: Any) -> bool:
    """Whether the properties of a shard are enough to describe it as Megatron's translation would."""
    return (
        type(shard) is ShardedTensor
        and is_fixed_size(shard.data)
        and tuple(shard.data.shape) == tuple(shard.local_shape)
    )


def structure_of(shard: Any) -> ItemStructure:
    """What a ShardedTensor or ShardedObject is as an item of DCP."""
    replica = Replica.MAIN if is_main_replica(shard.replica_id) else Replica.COPY
    if isinstance(shard, ShardedObject):
        return ItemStructure(ItemKind.BYTES, Form.VARIABLE, replica=replica)
    return ItemStructure(
        kind=ItemKind.SHARD,
        form=Form.FIXED,
        dtype=str(shard.dtype).removeprefix("torch."),
        layout="strided",
        shape=tuple(map(int, shard.global_shape)),
        offsets=tuple(map(int, shard.global_offset)),
        sizes=tuple(map(int, (*(1,) * shard.prepend_axis_num, *shard.local_shape))),
        replica=replica,
    )


class TranslatedStateDict(Mapping[str, Any]):
    """The state dict that stock's code expects: by key a tensor that DCP can save, or an ``io.BytesIO`` with an object.

    Megatron makes a value only when it is asked for, and few values are. The translation changes the shards (detaches
    them, makes them contiguous), as it does with stock strategies.
    """

    def __init__(self, shards: Sequence[ShardedBase], by_key: Mapping[str, list[int]]) -> None:
        self._shards = shards
        self._by_key = by_key
        self._made: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._made:
            self._made.update(to_dcp_values({key: [self._shards[number] for number in self._by_key[key]]}))
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)


def saved_shards(facts: ShardFacts) -> tuple[TranslatedStateDict, DescribedItems]:
    """Describe the shards that ``megatron.core.dist_checkpointing.save`` hands to a strategy.

    All replicas of a tensor take part, and the global plan decides which of them is written. Of an object only the main
    replica takes part, because replicas of a ShardedObject may differ (RNG states of data-parallel ranks do). Stock
    Megatron saves the main replica too.

    Returns:
        The state dict that stock's code expects, and the descriptions of its items.

    Raises:
        PlanConflict: one key stands for two things on this rank: a tensor and an object, or two tensors that both
            claim to be the main replica of one chunk.
        CheckpointingException: a main replica has no data.
    """
    shards = facts.shards
    saved = facts.once(_work_out)
    for one, other in saved.same:
        if not _is_same(shards[one], shards[other]):
            raise claimed_twice(shards[one])
    state_dict = TranslatedStateDict(shards, saved.by_key)
    data: list[Any] = [each if isinstance(each, MetadataIndex) else shards[each].data for each in saved.data]
    for place, shape in saved.views.items():
        data[place] = data[place].detach().view(shape)
    if not saved.translated:
        return state_dict, DescribedItems(saved.names, saved.structures, data)

    values = {key: state_dict[key] for key in saved.translated}

    def lookup(index: MetadataIndex) -> Any:
        value = values[index.fqn]
        if hasattr(value, "__get_tensor_shard__"):
            return value.__get_tensor_shard__(index)
        return next(
            shard.tensor for shard in value.local_shards() if tuple(shard.metadata.shard_offsets) == index.offset
        )

    found = describe_items(values, lookup)
    replicas = [structure_of(shards[number]).replica for key in saved.translated for number in saved.by_key[key]]
    structures = [
        structure._replace(replica=replica) for structure, replica in zip(found.structures, replicas, strict=True)
    ]
    return state_dict, DescribedItems(
        [*saved.names, *found.names], [*saved.structures, *structures], [*data, *found.data]
    )


def _work_out(facts: ShardFacts) -> _Saved:
    """Find out which shards take part, and describe each."""
    grouped: dict[str, list[int]] = {}
    for number, shard in enumerate(facts.shards):
        key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
        grouped.setdefault(key, []).append(number)
    saved = _Saved()
    for key, numbers in grouped.items():
        are_tensors = {isinstance(facts.shards[number], ShardedTensor) for number in numbers}
        if len(are_tensors) > 1:
            raise PlanConflict(
                f"the sharded state dict of this rank has a ShardedTensor and a ShardedObject under the key {key!r}; "
                "give one of them another key",
                key=key,
                ranks=[_own_rank()],
            )
        take = saved.take_tensor if True in are_tensors else saved.take_object
        take(facts.shards, key, numbers)
    return saved


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def claimed_twice(shard: ShardedBase) -> PlanConflict:
    """The error for two main replicas of one shard on this rank."""
    if isinstance(shard, ShardedObject):
        key = shard.unique_key
        what = f"two ShardedObjects under the key {key!r}, and both claim to be its main replica"
    else:
        key = shard.key
        what = f"two tensors that claim to be the main replica of {key!r} at offset {list(shard.global_offset)}"
    return PlanConflict(
        f"the sharded state dict of this rank has {what}; give them different keys or replica ids",
        key=key,
        ranks=[_own_rank()],
    )


def _is_same(one: ShardedBase, other: ShardedBase) -> bool:
    """Whether two shards hold the same tensor in memory, or the same object."""
    left, right = one.data, other.data
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return left is right
    return bool(left.data_ptr() == right.data_ptr() and left.shape == right.shape)


class MegatronPlanner(RobustPlanner):
    """Plans the save of a Megatron sharded state dict (ShardedTensor and ShardedObject leaves, no factories).

    As in stock Megatron, the main replica of each shard is saved. With ``peers`` it may be another replica on a rank of
    the same group. Keys are Megatron's own and global, so no key is made from a path, and ``Metadata.planner_data``
    stays empty, as with ``MCoreSavePlanner``. It takes the keyword arguments of :class:`robust_dcp.RobustPlanner`,
    except for those about flattening, and these:

    Args:
        peers: the global ranks of the group over which ``FullyParallelSaveStrategyWrapper`` spreads the writes of this
            rank; ``()`` without the wrapper.
        facts: the facts of the shards in the state dict, if they are known already.
        refused: what a load would refuse in ``common.pt``. It is reported together with what is refused in the shards.
    """

    def __init__(
        self,
        *,
        peers: Sequence[int] = (),
        facts: ShardFacts | None = None,
        refused: Mapping[str, NotData] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)
        self.peers = tuple(peers) if len(peers) > 1 else ()
        self._facts = facts
        self.refused = refused or {}
        self._shard_items: DescribedItems | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Read the shards of the state dict. If this fails, the first exchange raises the error on all ranks."""
        values: Any = {}
        shards_error: Exception | None = None
        facts, self._facts, self._shard_items = self._facts, None, None
        try:
            values, self._shard_items = saved_shards(ShardFacts(nested_values(state_dict)) if facts is None else facts)
        except Exception as error:
            shards_error = error
        super().set_up_planner(values, storage_meta, is_coordinator)
        self._set_up_error = shards_error or self._set_up_error

    def items_of_state_dict(self, *, is_coordinator: bool) -> DescribedItems:
        """The described shards. A planner that looks values up in its own way goes through stock's methods instead."""
        if self._shard_items is None or overridden(self, RobustPlanner, ("lookup_object",)):
            return super().items_of_state_dict(is_coordinator=is_coordinator)
        return self._shard_items

    def forget_state_dict(self) -> None:
        super().forget_state_dict()
        self._shard_items = None

    def object_data(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        """The bytes of an object. It comes as an ``io.BytesIO`` with ``torch.save``'s bytes, which is written as is."""
        data: io.BytesIO = value
        return data
