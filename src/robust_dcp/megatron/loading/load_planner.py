"""Megatron-Core's load planner with two more checks: no object runs code, and every tensor is filled completely.

Owns the checks of one rank's load plan, and how this plan is made from an index. ``load_strategy`` makes a planner for
each load, and ``robust_dcp.load`` calls it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from robust_dcp.megatron.versions import MCoreLoadPlanner, ShardedTensor, has_quantized_data
from robust_dcp.plan.load_items import plan_reads
from robust_dcp.plan.load_planner import check_filled, local_numel
from robust_dcp.storage.index import look_up
from robust_dcp.storage.records.objects import load_object

__all__ = ["MegatronLoadPlanner", "load_planner_for"]


def load_planner_for(
    shards: Iterable[ShardedTensor], checkpoint: str, *, trusted: bool, **options: Any
) -> MegatronLoadPlanner:
    """The planner that loads these shards.

    Args:
        shards: all ShardedTensors that this rank loads.
        checkpoint: the checkpoint's name, for error messages.
        trusted: whether objects may run code when they are loaded.
        options: other arguments of ``MCoreLoadPlanner``.
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
    """``MCoreLoadPlanner`` (global shapes, ``allow_shape_mismatch``) with more checks, and with plans from an index."""

    state_dict: dict[str, Any]

    # Megatron overrides these only for quantized tensors. With DCP's own methods tensors may be filled in any order.
    resolve_tensor = DefaultLoadPlanner.resolve_tensor
    commit_tensor = DefaultLoadPlanner.commit_tensor

    def __init__(self, checkpoint: str, *, trusted: bool, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)
        self._checkpoint = checkpoint
        self._trusted = trusted

    def create_local_plan(self) -> LoadPlan:
        """Make Megatron's plan, and check that it fills every requested tensor.

        Raises:
            CorruptCheckpoint: the checkpoint's chunks do not fill all of a tensor. Stock would leave the rest as it is.
            CheckpointingException, KeyError, RuntimeError: as ``MCoreLoadPlanner``.
        """
        is_indexed = look_up(self.metadata, self.state_dict)
        plan: LoadPlan = self._plan_by_index(self.metadata) if is_indexed else super().create_local_plan()
        flexible = self.allow_shape_mismatch_sharded_tensors or {}
        wanted = {key: local_numel(value) for key, value in self.state_dict.items() if key not in flexible}
        check_filled(plan.items, wanted, self._checkpoint)
        return plan

    def _plan_by_index(self, metadata: Metadata) -> LoadPlan:
        """Look up the tensors that have their saved shape. Megatron plans the rest, and raises what must be refused."""
        whole = self.state_dict
        looked_up = {key: value for key, value in whole.items() if _fits(value, metadata.state_dict_metadata.get(key))}
        self.state_dict = {key: value for key, value in whole.items() if key not in looked_up}
        try:
            others = super().create_local_plan()
        finally:
            self.state_dict = whole
        return LoadPlan([*plan_reads(looked_up, metadata).items, *others.items])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict if it is plain data.

        Raises:
            UnsafeCheckpoint: unpickling the object would run code.
        """
        key = read_item.dest_index.fqn
        self.state_dict[key] = load_object(value, file=self._checkpoint, item=key, trusted=self._trusted)


def _fits(value: Any, saved: Any) -> bool:
    size = getattr(value, "size", None)
    return isinstance(saved, TensorStorageMetadata) and callable(size) and size() == saved.size


class _QuantizedLoadPlanner(MegatronLoadPlanner):
    """Reads tensors of Transformer Engine's FP8 classes one by one, as Megatron does."""

    resolve_tensor = MCoreLoadPlanner.resolve_tensor
    commit_tensor = MCoreLoadPlanner.commit_tensor
