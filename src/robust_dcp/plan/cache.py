"""The plans that this process has saved by, kept for the next save.

A plan counts only after the save that made it has been committed. Inside stock ``save`` only the coordinator learns of
the commit. The other ranks keep the plan before, but no save uses it unless the coordinator offers the same plan.

A changed structure is compared with the last one of its *kind*. Example: a job saves a model and a data loader in turn.
They are two kinds. The model has not changed just because the loader was saved in between. Plans are of one kind if the
caller gave them one name (``kind=``), or if one was made after the other and has most names in common with it. Only the
coordinator knows kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.plan import Plan
from robust_dcp.plan.share import Share
from robust_dcp.plan.structure import StructureTable
from robust_dcp.structure_cache import CACHE, StructureCache, Table

__all__ = ["PLANS", "CachedPlan", "GroupKey", "PlanCache", "kind_called"]

_NAMED = "="

GroupKey = tuple[int, ...]
"""The global ranks of a process group, in group order. A plan depends on nothing else of its group."""


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """One rank's share of a plan, and on the coordinator all of it.

    Attributes:
        share: what this rank writes.
        signature: the signature of this rank's structure.
        table: this rank's structure.
        plan: the plan of all ranks, on the coordinator.
        variable_places: int64 ``[v, 2]``, offset and length of this rank's items of variable size in the last save, as
            the coordinator knows them. Places that do not change need not be sent again. ``None`` if this rank cannot
            be sure that the coordinator knows them.
        places_of_all: on the coordinator, the places of every rank's items of variable size in the last save.
        loaded_from: the checkpoint in which the plan was found; empty if this process made it.
        kind: on the coordinator, the kind of what is saved: the caller's name for it, or the identity of the first plan
            of this kind.
    """

    share: Share
    signature: bytes
    table: StructureTable
    plan: Plan | None = None
    variable_places: npt.NDArray[np.int64] | None = None
    places_of_all: tuple[npt.NDArray[np.int64], ...] | None = None
    loaded_from: str = ""
    kind: str = ""

    @property
    def plan_id(self) -> bytes:
        """The identity of the plan."""
        return self.share.plan_id

    @property
    def memory_nbytes(self) -> int:
        """Roughly how much memory this takes."""
        of_all = 0 if self.plan is None else self.plan.memory_nbytes
        return sum(column.nbytes for column in self.table.columns) + self.share.kept.nbytes + of_all


class PlanCache:
    """The most recently used plans of this process, over all groups.

    Example: a model and its EMA are saved in turn. Each finds its own plan by signature.

    Args:
        cache: the cache that holds them in a table; ``None`` for a cache of its own.
        max_entries: how many plans to keep. If none fits, each of them is looked at.
        max_nbytes: how much memory they may take together. The latest stays even if it is larger.
    """

    def __init__(self, cache: StructureCache | None = None, *, max_entries: int = 8, max_nbytes: int = 2 << 30) -> None:
        # The kind is part of the key, because two kinds may hold the same and still change independently.
        self._table: Table[tuple[GroupKey, bytes, str], CachedPlan] = (cache or StructureCache()).table(
            "plans", lambda _, plan: plan.memory_nbytes, max_nbytes=max_nbytes, max_entries=max_entries
        )

    def __len__(self) -> int:
        return len(self._table)

    def find(self, group: GroupKey, signature: bytes) -> CachedPlan | None:
        """The latest plan in which this rank's structure has ``signature``."""
        return next((plan for plan in self._of(group) if plan.signature == signature), None)

    def latest(self, group: GroupKey) -> CachedPlan | None:
        """The plan that ``group`` used last."""
        return next(iter(self._of(group)), None)

    def get(self, group: GroupKey, plan_id: bytes) -> CachedPlan | None:
        """The plan with that identity."""
        return next((plan for plan in self._of(group) if plan.plan_id == plan_id), None)

    def of_signatures(self, group: GroupKey, signatures: Sequence[bytes]) -> CachedPlan | None:
        """On the coordinator, the plan that was made for these structures of all ranks."""
        wanted = tuple(signatures)
        return next(
            (each for each in self._of(group) if each.plan is not None and each.plan.signatures == wanted), None
        )

    def last_of_kind(self, group: GroupKey, named: str | None, tables: Sequence[StructureTable]) -> CachedPlan | None:
        """On the coordinator, the last plan of the kind of these structures of all ranks; ``None`` for a new kind.

        Without a name from the caller, it is the plan that has most names in common with the structures. They must be
        half of the names of the larger of the two, or nearly all of the smaller. So a structure that grew is still of
        its kind, and one that shares only a step counter is not. A name counts once for each rank that holds it.

        Args:
            named: the caller's name of the kind.
        """
        last: dict[str, CachedPlan] = {}
        for cached in self._of(group):
            if cached.plan is not None:
                last.setdefault(cached.kind, cached)
        if named is not None and kind_called(named) in last:
            return last[kind_called(named)]
        n_now = sum(len(table.names) for table in tables)
        best, most = None, 0
        for kind, cached in last.items():
            if cached.plan is None or kind.startswith(_NAMED):
                continue
            before = cached.plan.tables
            shared = sum(_n_shared(one, other) for one, other in zip(before, tables, strict=True))
            n_before = sum(len(table.names) for table in before)
            is_alike = 2 * shared >= max(n_before, n_now) or 10 * shared >= 9 * min(n_before, n_now)
            if shared > most and is_alike:
                best, most = cached, shared
        return best

    def _of(self, group: GroupKey) -> list[CachedPlan]:
        # A search is no use of a plan. A plan counts as used when its save is committed and it is put in again.
        return [plan for key, plan in self._table.latest_first() if key[0] == group]

    def put(self, group: GroupKey, plan: CachedPlan) -> None:
        """Store ``plan`` as the latest, and drop the least recently used plans until the bounds hold."""
        self._table.put((group, plan.plan_id, plan.kind), plan)

    def forget(self, group: GroupKey, plan_id: bytes) -> None:
        """Drop a plan, if it is there."""
        for key, _ in self._table.latest_first():
            if key[:2] == (group, plan_id):
                self._table.forget(key)

    def clear(self) -> None:
        self._table.clear()


def kind_called(name: str) -> str:
    """The kind that the caller has given ``name``. Other kinds are called by the identity of their first plan."""
    return f"{_NAMED}{name}"


def _n_shared(one: StructureTable, other: StructureTable) -> int:
    return len(one.names) if one.names is other.names else len(set(one.names).intersection(other.names))


PLANS = PlanCache(CACHE)
"""The plans of this process."""
