"""RobustPlanner for Megatron's sharded state dicts.

Owns what is special to them: the shards carry their own description, and objects are serialized already.
``save_strategy`` makes a planner for each save. This loses nothing, because the plan cache belongs to robust_dcp and
not to the planner.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.saving.described_shards import SavedShards, saved_shards
from robust_dcp.megatron.versions import nested_values
from robust_dcp.plan.describe import DescribedItems
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.storage.records.objects import Refusal

__all__ = ["MegatronPlanner"]


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

    needs_one_directory = "A save by Megatron-Core, with its common files,"

    def __init__(
        self,
        *,
        peers: Sequence[int] = (),
        facts: ShardFacts | None = None,
        refused: Mapping[str, Refusal] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)
        self._peers = tuple(peers) if len(peers) > 1 else ()
        self._facts = facts
        self._refused = refused or {}
        self._shards_error: Exception | None = None
        self._shards: SavedShards | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Read the shards of the state dict. If this fails, the first exchange raises the error on all ranks."""
        shards_error: Exception | None = None
        self._shards = None
        facts, self._facts = self._facts, None
        try:
            self._shards = saved_shards(ShardFacts(nested_values(state_dict)) if facts is None else facts)
        except Exception as error:
            shards_error = error
        values: Any = {} if self._shards is None else self._shards.state_dict
        super().set_up_planner(values, storage_meta, is_coordinator)
        self._set_up_error = shards_error or self._set_up_error

    def items_of_state_dict(self, *, is_coordinator: bool) -> DescribedItems:
        """The described shards. A planner that looks values up in its own way goes through stock's methods instead."""
        if self._shards is None or self._overrides("lookup_object"):
            return super().items_of_state_dict(is_coordinator=is_coordinator)
        return self._shards.items

    def forget_state_dict(self) -> None:
        super().forget_state_dict()
        self._shards = None

    def writing_peers(self) -> tuple[int, ...]:
        return self._peers

    def refused_before(self) -> Mapping[str, Refusal]:
        return self._refused

    def object_data(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        """The bytes of an object. It comes as an ``io.BytesIO`` with ``torch.save``'s bytes, which is written as is."""
        data: io.BytesIO = value
        return data
