"""Plans of committed saves, kept for the next save.

The cache is bounded, and its keys are group and signature. ``plan.agreed_plan`` puts a plan in after its save was
committed. A plan is used only if every rank shows in that very save that it still holds (``plan.agreement``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.plan.global_plan import Shares
from robust_dcp.plan.rank_plan import Places, RankPlan
from robust_dcp.plan.structure import StructureTable
from robust_dcp.storage.index import Section
from robust_dcp.structure_cache import CACHE, StructureCache, Table

if TYPE_CHECKING:
    from robust_dcp.plan.metadata import MetadataTemplate

__all__ = ["PLANS", "CachedPlan", "CoordinatorPlan", "GroupKey", "PlanCache", "nbytes_of_columns"]

GroupKey = tuple[int, ...]
"""The global ranks of a process group, in group order. A plan depends on nothing else of its group."""


class StoredPlan(NamedTuple):
    """A plan as the index of a checkpoint holds it (:mod:`robust_dcp.plan.stored_plan`).

    Attributes:
        shares: the encoded share of each rank.
        structures: bundles of the structures of ranks. If two bundles have a rank, the later one counts.
        sections: the sections of the index, with all of this and the rest.
    """

    shares: tuple[bytes, ...]
    structures: tuple[bytes, ...]
    sections: Mapping[str, Section]


class MadeOnce:
    """The sections of an index, made at the first request."""

    def __init__(self) -> None:
        self._value: StoredPlan | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return 0 if self._value is None else sum(len(section.data) for section in self._value.sections.values())

    @property
    def value(self) -> StoredPlan | None:
        """The sections if they have been made, else ``None``."""
        return self._value

    def get(self, make: Callable[[], StoredPlan]) -> StoredPlan:
        with self._lock:
            if self._value is None:
                self._value = make()
            return self._value


@dataclass(frozen=True, eq=False)
class CoordinatorPlan:
    """What only the coordinator keeps: enough to patch the plan, and to write the metadata of each save.

    Attributes:
        tables: the structure of each rank.
        signatures: the signature of each rank's structure, in rank order.
        kept, common_objects: for each rank, as in :class:`RankPlan`.
        nbytes: bytes of tensor data that all ranks write together.
        context: :meth:`PlanContext.encode`, which is the same on all ranks.
        metadata: makes ``.metadata``; ``None`` if another writer than ours places the items.
        stock_metadata: DCP's own object for such a writer.
        variable_places: the places of every rank's items of variable size in the last committed save; ``None`` before
            the first one.
        stored: the plan as the index of each checkpoint holds it. ``stored_before``: that of the plan from which this
            plan was made. ``changed_ranks``: the ranks with another structure or share than there.
        columns_nbytes: memory of all tables and places.
        replicated, n_classes: for each rank, as in ``ReplicaChecks``; empty if replicas are not compared.
        is_contested: whether several ranks claim the main replica of some chunk.
        shares: what the next plan is made from, if little changes.
    """

    tables: tuple[StructureTable, ...]
    signatures: tuple[bytes, ...]
    kept: tuple[Places, ...]
    common_objects: tuple[Places, ...]
    nbytes: int
    context: bytes
    metadata: MetadataTemplate | None
    stock_metadata: Metadata | None = None
    variable_places: tuple[npt.NDArray[np.int64], ...] | None = None
    stored: MadeOnce = field(default_factory=MadeOnce)
    stored_before: MadeOnce | None = None
    changed_ranks: tuple[int, ...] = ()
    columns_nbytes: int = 0
    replicated: tuple[Places, ...] = ()
    n_classes: int = 1
    is_contested: bool = False
    shares: Shares | None = None

    @property
    def memory_nbytes(self) -> int:
        """Roughly how much memory this takes."""
        emitted = 0 if self.metadata is None else self.metadata.nbytes
        return self.columns_nbytes + emitted + self.stored.nbytes


def nbytes_of_columns(tables: Sequence[StructureTable], *others: Sequence[npt.NDArray[np.integer[Any]]]) -> int:
    """Memory of the columns of all tables, and of other columns of each rank. Columns that ranks share count once."""
    columns = {id(column): column.nbytes for table in tables for column in table.columns}
    columns |= {id(column): column.nbytes for of_ranks in others for column in of_ranks}
    return sum(columns.values())


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """One rank's share of a plan that was committed.

    Attributes:
        plan_id: the identity of the global plan, a hash over the signatures of all ranks.
        signature: the signature of this rank's structure.
        table: this rank's structure.
        rank_plan: what this rank writes.
        variable_places: int64 ``[v, 2]``, offset and length of this rank's items of variable size in the last save, as
            the coordinator knows them. Places that do not change need not be sent again. ``None`` if this rank cannot
            be sure that the coordinator knows them.
        coordinator: on the coordinator only.
        loaded_from: the checkpoint in which the plan was found; empty if this process made it.
        kind: the kind of what is saved (:mod:`robust_dcp.plan.kinds`), the same on all ranks.
    """

    plan_id: bytes
    signature: bytes
    table: StructureTable
    rank_plan: RankPlan
    variable_places: npt.NDArray[np.int64] | None
    coordinator: CoordinatorPlan | None
    loaded_from: str = ""
    kind: str = ""

    @property
    def memory_nbytes(self) -> int:
        """Roughly how much memory this takes."""
        of_all = 0 if self.coordinator is None else self.coordinator.memory_nbytes
        return nbytes_of_columns([self.table], [self.rank_plan.kept]) + of_all


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

    def last_of_each_kind(self, group: GroupKey) -> dict[str, CachedPlan]:
        """For each kind that ``group`` has saved, the plan that it used last. The kind that was saved last is first."""
        found: dict[str, CachedPlan] = {}
        for plan in self._of(group):
            found.setdefault(plan.kind, plan)
        return found

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


PLANS = PlanCache(CACHE)
"""The plans of this process."""
