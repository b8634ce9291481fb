"""What one rank contributes to the plan: its structure, and how to compare its values with those of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.structure import PlanContext, StructureMessage, StructureSignature, StructureTable
from robust_dcp.storage.layouts import TORCH, Layout

__all__ = ["LocalStructure"]


@dataclass(frozen=True, eq=False)
class LocalStructure:
    """The structure of this rank's state dict, as the planner describes it.

    Attributes:
        table: the items.
        context: what else the plan depends on.
        signature: the signature of both.
        files: how many files hold items of fixed size; ``None`` if another writer than ours places them.
        lowest_rank: whether replicas go to the lowest rank that holds them.
        layout: the layout of the files.
        digests_of: gives uint64 digests of the contents of some items, from their places in the table; 0 for one that
            cannot be read.
    """

    table: StructureTable
    context: PlanContext
    signature: StructureSignature
    files: int | None
    lowest_rank: bool
    layout: Layout = TORCH
    digests_of: Callable[[npt.NDArray[np.intp]], npt.NDArray[np.uint64]] = lambda places: np.zeros(
        len(places), dtype=np.uint64
    )

    def to_message(self) -> StructureMessage:
        """The message to the coordinator with the structure."""
        return StructureMessage.of(self.table, self.context.encode(), self.signature.value)
