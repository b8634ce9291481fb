"""What one rank brings to the plan: its structure, its signature, the digests of its objects."""

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
        signature: over both.
        object_digests: uint64, for each item of kind BYTES in table order; 0 where not computed.
        files: number of files for items of fixed size; ``None`` where another writer than ours places them.
        lowest_rank: whether replicas go to the lowest rank that holds them.
        layout: of the files.
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
        """All of this, for the coordinator."""
        return StructureMessage.of(self.table, self.object_digests, self.context.encode(), self.signature.value)

    def digests_of(self, items: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """Digests of some of the objects, by their places in the table."""
        digests = np.zeros(len(self.table), dtype=np.uint64)
        digests[self.table.kinds == ItemKind.BYTES] = self.object_digests
        return digests[items]
