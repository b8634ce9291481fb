"""RobustPlanner for Megatron's sharded state dicts.

Owns what is special to them: the translation, and objects that are serialized already. Made by ``strategies`` for
each save; the plan cache is robust_dcp's, so a planner that lives for one save loses nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.megatron.saving.translation import to_dcp_state_dict
from robust_dcp.megatron.versions import metadata_attributes_of
from robust_dcp.plan.structure import Attributes
from robust_dcp.planner import RobustPlanner
from robust_dcp.storage.records.objects import Refusal

__all__ = ["MegatronPlanner"]


class MegatronPlanner(RobustPlanner):
    """Plans the save of a Megatron sharded state dict (ShardedTensor and ShardedObject leaves, no factories).

    Keys are Megatron's own and global, so nothing is flattened by path and ``Metadata.planner_data`` stays empty, as
    with ``MCoreSavePlanner``. Takes the keyword arguments of :class:`robust_dcp.RobustPlanner` but those about
    flattening, and

    Args:
        refused: what of ``common.pt`` a load would refuse, to be told together with what the shards hold.
    """

    def __init__(self, *, refused: Mapping[str, Refusal] | None = None, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)
        self._refused = refused or {}
        self._translation_error: Exception | None = None
        self._translated: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Translate and take in the state dict. What is wrong with it is raised on all ranks by the first exchange."""
        self._translation_error = None
        self._translated = {}
        try:
            self._translated = to_dcp_state_dict(state_dict)
        except Exception as error:
            self._translation_error = error
        super().set_up_planner(self._translated, storage_meta, is_coordinator)

    def raise_set_up_error(self) -> None:
        if self._translation_error is not None:
            raise self._translation_error
        super().raise_set_up_error()

    def metadata_attributes(self) -> Attributes:
        """What stock Megatron-Core looks for when it loads flattened ranges (0.14)."""
        return metadata_attributes_of(self._translated)

    def refused_before(self) -> Mapping[str, Refusal]:
        return self._refused

    def object_data(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        """Objects come as ``io.BytesIO`` that hold what ``torch.save`` made of them: they are written as they are."""
        data: io.BytesIO = value
        return data
