"""RobustPlanner for Megatron's sharded state dicts.

Owns what is special to them: what the shards say of themselves, and objects that are serialized already. Made by
``save_strategy`` for each save; the plan cache is robust_dcp's, so a planner that lives for one save loses nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.saving.described_shards import SavedShards, saved_shards
from robust_dcp.megatron.versions import metadata_attributes_of, nested_values
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.plan.state_dict.describe import DescribedItems
from robust_dcp.plan.structure import Attributes
from robust_dcp.storage.records.objects import Refusal

__all__ = ["MegatronPlanner"]


class MegatronPlanner(RobustPlanner):
    """Plans the save of a Megatron sharded state dict (ShardedTensor and ShardedObject leaves, no factories).

    The main replica of each shard is saved, as stock Megatron does, or with ``peers`` one of its copies on the ranks
    that lie in one group with it. Keys are Megatron's own and global, so nothing is flattened by path and
    ``Metadata.planner_data`` stays empty, as with ``MCoreSavePlanner``. Takes the keyword arguments of
    :class:`robust_dcp.RobustPlanner` but those about flattening, and

    Args:
        peers: the global ranks of the group over which ``FullyParallelSaveStrategyWrapper`` spreads the writes of this
            rank; ``()`` without it.
        facts: the shards of the state dict that will be given, if they have been looked at already.
        refused: what of ``common.pt`` a load would refuse, to be told together with what the shards hold.
    """

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
        """Look at the shards of the state dict. What is wrong is raised on all ranks by the first exchange."""
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
        """The shards as they have been described; by stock's way for a planner that looks values up in its own."""
        if self._shards is None or self._overrides("lookup_object"):
            return super().items_of_state_dict(is_coordinator=is_coordinator)
        return self._shards.items

    def forget_state_dict(self) -> None:
        super().forget_state_dict()
        self._shards = None

    def writing_peers(self) -> tuple[int, ...]:
        return self._peers

    def metadata_attributes(self) -> Attributes:
        """What stock Megatron-Core looks for when it loads flattened ranges (0.14)."""
        return metadata_attributes_of({} if self._shards is None else self._shards.translated)

    def refused_before(self) -> Mapping[str, Refusal]:
        return self._refused

    def object_data(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        """Objects come as ``io.BytesIO`` that hold what ``torch.save`` made of them: they are written as they are."""
        data: io.BytesIO = value
        return data
