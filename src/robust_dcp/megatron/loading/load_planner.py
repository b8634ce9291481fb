"""Megatron-Core's load planner, with what robust_dcp adds to it: nothing is executed, and nothing is left unfilled.

Owns the checks of one rank's load plan, and how it is made from an index. Made by ``load_strategy`` for each load, and
called by ``robust_dcp.load``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from robust_dcp.megatron.versions import MCoreLoadPlanner, ShardedTensor, has_quantized_data
from robust_dcp.plan.load_planner import check_filled, local_numel
from robust_dcp.plan.loading.load_items import plan_reads
from robust_dcp.storage.index import look_up
from robust_dcp.storage.records.objects import load_object

__all__ = ["MegatronLoadPlanner", "load_planner_for"]


def load_planner_for(
    shards: Iterable[ShardedTensor], checkpoint: str, *, trusted: bool, **options: Any
) -> MegatronLoadPlanner:
    """The planner that loads these shards.

    Args:
        shards: all ShardedTensors that this rank loads.
        checkpoint: its name, for errors.
        trusted: objects may run code when they are loaded.
        options: more of ``MCoreLoadPlanner``.
    """
    shards = list(shards)
    kind = _QuantizedLoadPlanner if any(map(has_quantized_data, shards)) else MegatronLoadPlanner
    return kind(
        checkpoint,
        trusted=trusted,
        shapes_validation_sharded_tensors=[shard for shard in shards if not shard.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in shards if shard.allow_shape_mismatch},
        **options,
    )


class MegatronLoadPlanner(MCoreLoadPlanner):
    """``MCoreLoadPlanner`` (global shapes, ``allow_shape_mismatch``) with checks, and plans that an index makes."""

    state_dict: dict[str, Any]

    # Only for quantized tensors does Megatron need to hear of each one. Without, others may fill them at any time.
    resolve_tensor = DefaultLoadPlanner.resolve_tensor
    commit_tensor = DefaultLoadPlanner.commit_tensor

    def __init__(self, checkpoint: str, *, trusted: bool, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)
        self._checkpoint = checkpoint
        self._trusted = trusted

    def create_local_plan(self) -> LoadPlan:
        """Megatron's plan, if it fills every tensor that is asked for.

        Raises:
            CorruptCheckpoint: the checkpoint's chunks leave elements of a tensor as they are; stock would too.
            CheckpointingException, KeyError, RuntimeError: as ``MCoreLoadPlanner``.
        """
        is_indexed = look_up(self.metadata, self.state_dict)
        plan: LoadPlan = self._plan_by_index(self.metadata) if is_indexed else super().create_local_plan()
        flexible = self.allow_shape_mismatch_sharded_tensors or {}
        wanted = {key: local_numel(value) for key, value in self.state_dict.items() if key not in flexible}
        check_filled(plan.items, wanted, self._checkpoint)
        return plan

    def _plan_by_index(self, metadata: Metadata) -> LoadPlan:
        """Tensors of the saved shape are looked up. The rest, and all that is refused, goes the way of Megatron."""
        whole = self.state_dict
        looked_up = {key: value for key, value in whole.items() if _fits(value, metadata.state_dict_metadata.get(key))}
        self.state_dict = {key: value for key, value in whole.items() if key not in looked_up}
        try:
            others = super().create_local_plan()
        finally:
            self.state_dict = whole
        return LoadPlan([*plan_reads(looked_up, metadata).items, *others.items])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict, if it is data.

        Raises:
            UnsafeCheckpoint: unpickling it would run code.
        """
        key = read_item.dest_index.fqn
        self.state_dict[key] = load_object(value, file=self._checkpoint, item=key, trusted=self._trusted)


def _fits(value: Any, saved: Any) -> bool:
    size = getattr(value, "size", None)
    return isinstance(saved, TensorStorageMetadata) and callable(size) and size() == saved.size


class _QuantizedLoadPlanner(MegatronLoadPlanner):
    """Reads into tensors of Transformer Engine's FP8 classes one by one, as Megatron does."""

    resolve_tensor = MCoreLoadPlanner.resolve_tensor
    commit_tensor = MCoreLoadPlanner.commit_tensor
