"""What one rank contributes to the plan: its structure, its signature, and the digests of its objects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.replica_checks import VerifyReplicas
from robust_dcp.plan.structure import ItemKind, PlanContext, StructureMessage, StructureSignature, StructureTable
from robust_dcp.storage.layouts import TORCH, Layout

__all__ = ["LocalStructure"]


@dataclass(frozen=True, eq=False)
class LocalStructure:
    """The structure of this rank's state dict, as the planner describes it.

    Attributes:
        table: the items.
        context: what else the plan depends on.
        signature: the signature of both.
        object_digests: uint64, for each item of kind BYTES in table order; 0 if it was not computed.
        files: how many files hold items of fixed size; ``None`` if another writer than ours places them.
        lowest_rank: whether replicas go to the lowest rank that holds them.
        layout: the layout of the files.
        verify_replicas: which replicas are compared with those of other ranks.
    """

    table: StructureTable
    context: PlanContext
    signature: StructureSignature
    object_digests: npt.NDArray[np.uint64]
    files: int | None
    lowest_rank: bool
    layout: Layout = TORCH
    verify_replicas: VerifyReplicas = "off"

    def to_message(self) -> StructureMessage:
        """The message to the coordinator with all of this."""
        return StructureMessage.of(self.table, self.object_digests, self.context.encode(), self.signature.value)

    def digests_of(self, items: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """The digests of the objects at ``items``, which are places in the table."""
        digests = np.zeros(len(self.table), dtype=np.uint64)
        digests[self.table.kinds == ItemKind.BYTES] = self.object_digests
        return digests[items]
