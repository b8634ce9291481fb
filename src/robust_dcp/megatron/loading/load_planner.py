"""Megatron-Core's load planner, with what robust_dcp adds to it: nothing is executed, and nothing is left unfilled.

Owns the checks of one rank's load plan. Made by ``load_strategy`` for each load, and called by ``robust_dcp.load``.
"""

from __future__ import annotations

import io
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from robust_dcp.megatron.versions import MCoreLoadPlanner
from robust_dcp.planner.load import check_filled, local_numel
from robust_dcp.storage.records.objects import load_object

__all__ = ["MegatronLoadPlanner"]


class MegatronLoadPlanner(MCoreLoadPlanner):
    """``MCoreLoadPlanner`` (global shapes, ``allow_shape_mismatch``, FP8 targets) with two checks more.

    Args:
        checkpoint: its name, for errors.
        keeps_bytes: also keep the bytes of objects, in ``object_bytes``, to be handed to other ranks.
        trusted: objects may run code when they are loaded.
        options: as ``MCoreLoadPlanner``.

    Attributes:
        object_bytes: the bytes of each object that was loaded, by key.
    """

    def __init__(self, checkpoint: str, *, keeps_bytes: bool = False, trusted: bool = False, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)
        self._checkpoint = checkpoint
        self._keeps_bytes = keeps_bytes
        self._trusted = trusted
        self.object_bytes: dict[str, bytes] = {}

    def create_local_plan(self) -> LoadPlan:
        """Megatron's plan, if it fills every tensor that is asked for.

        Raises:
            CorruptCheckpoint: the checkpoint's chunks leave elements of a tensor as they are; stock would too.
            CheckpointingException, KeyError, RuntimeError: as ``MCoreLoadPlanner``.
        """
        plan: LoadPlan = super().create_local_plan()
        flexible = self.allow_shape_mismatch_sharded_tensors or {}
        wanted = {key: local_numel(value) for key, value in self.state_dict.items() if key not in flexible}
        check_filled(plan.items, wanted, self._checkpoint)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict, if it is data.

        Raises:
            UnsafeCheckpoint: unpickling it would run code.
        """
        key = read_item.dest_index.fqn
        if self._keeps_bytes:
            self.object_bytes[key] = value.getvalue()
        self.state_dict[key] = load_object(value, file=self._checkpoint, item=key, trusted=self._trusted)
