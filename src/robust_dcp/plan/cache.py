"""Plans of committed saves, kept for the next one: bounded, keyed by group and signature.

Owns the only mutable state of planning. An entry is put in after its save was committed, by
``plan.session``, and used only if every rank shows in that very save that it still holds (``plan.agreement``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.rank_plan import RankPlan
from robust_dcp.plan.structure import StructureTable

if TYPE_CHECKING:
    from robust_dcp.plan.global_plan import GlobalPlan
    from robust_dcp.plan.metadata import MetadataTemplate

__all__ = ["PLANS", "CachedPlan", "CoordinatorPlan", "GroupKey", "PlanCache"]

GroupKey = tuple[int, ...]
"""The global ranks of a group, in group order: what a plan depends on of its process group."""


@dataclass(frozen=True, eq=False)
class CoordinatorPlan:
    """What only the coordinator keeps: the global plan with every rank's structure, the encoded context that all ranks
    share, the metadata, and the places of every rank's items of variable size in the last committed save (``None``
    before there was one)."""

    global_plan: GlobalPlan
    context: bytes
    metadata: MetadataTemplate
    variable_places: tuple[npt.NDArray[np.int64], ...] | None = None


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """One rank's share of a plan whose save was committed.

    Attributes:
        plan_id: identity of the global plan, a hash over ``signatures``.
        signatures: of every rank, in rank order.
        table: this rank's structure.
        rank_plan: what this rank writes.
        variable_places: int64 ``[v, 2]``, offset and length of this rank's items of variable size in the last save,
            as the coordinator knows them: if they come out the same, they need not be sent again. ``None`` where this
            rank cannot be sure that the coordinator knows them.
        coordinator: on the coordinator only.
    """

    plan_id: bytes
    signatures: tuple[bytes, ...]
    table: StructureTable
    rank_plan: RankPlan
    variable_places: npt.NDArray[np.int64] | None
    coordinator: CoordinatorPlan | None


class PlanCache:
    """The most recently used plans of this process, over all groups.

    A model and its EMA that are saved in turn both hit: each finds its own entry by signature.
    """

    def __init__(self, max_entries: int = 8) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[GroupKey, bytes], CachedPlan] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, group: GroupKey, signature: bytes, rank: int) -> CachedPlan | None:
        """The latest plan in which this rank's structure has ``signature``."""
        return self._latest(group, lambda plan: plan.signatures[rank] == signature)

    def latest(self, group: GroupKey) -> CachedPlan | None:
        """The plan that ``group`` used last."""
        return self._latest(group, lambda plan: True)

    def _latest(self, group: GroupKey, wanted: Callable[[CachedPlan], bool]) -> CachedPlan | None:
        with self._lock:
            matches = (plan for (key, _), plan in reversed(self._entries.items()) if key == group and wanted(plan))
            return next(matches, None)

    def put(self, group: GroupKey, plan: CachedPlan) -> None:
        """Keep ``plan`` as the latest; the least recently used one beyond the bound goes."""
        with self._lock:
            self._entries[group, plan.plan_id] = plan
            self._entries.move_to_end((group, plan.plan_id))
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def forget(self, group: GroupKey, plan_id: bytes) -> None:
        """Drop a plan, if it is there."""
        with self._lock:
            self._entries.pop((group, plan_id), None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


PLANS = PlanCache()
"""The plans of this process: nothing depends on keeping a planner object between saves."""
