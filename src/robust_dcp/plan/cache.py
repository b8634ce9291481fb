"""Plans of committed saves, kept for the next one: bounded, keyed by group and signature.

Owns what is remembered of plans. An entry is put in after its save was committed, by
``plan.session``, and used only if every rank shows in that very save that it still holds (``plan.agreement``).
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
"""The global ranks of a group, in group order: what a plan depends on of its process group."""


class StoredPlan(NamedTuple):
    """A plan as it stands in the index of each checkpoint (:mod:`robust_dcp.plan.stored_plan`).

    Attributes:
        shares: of each rank.
        structures: bundles of the structures of ranks; what a later one says of a rank replaces what an earlier said.
        sections: the same, and the rest, as they are written.
    """

    shares: tuple[bytes, ...]
    structures: tuple[bytes, ...]
    sections: Mapping[str, Section]


class MadeOnce:
    """Sections of an index that are made when they are first asked for."""

    def __init__(self) -> None:
        self._value: StoredPlan | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return 0 if self._value is None else sum(len(section.data) for section in self._value.sections.values())

    @property
    def value(self) -> StoredPlan | None:
        """What was made, if anything was."""
        return self._value

    def get(self, make: Callable[[], StoredPlan]) -> StoredPlan:
        with self._lock:
            if self._value is None:
                self._value = make()
            return self._value


@dataclass(frozen=True, eq=False)
class CoordinatorPlan:
    """What only the coordinator keeps: enough to patch the plan, and to emit the metadata of each save.

    Attributes:
        tables: the structure of each rank.
        signatures: of each rank's structure, in rank order.
        kept, common_objects: of each rank, as in :class:`RankPlan`.
        nbytes: bytes of tensor data that all ranks write together.
        context: :meth:`PlanContext.encode`, which all ranks share.
        metadata: emits ``.metadata``; ``None`` where another writer than ours places the items.
        stock_metadata: DCP's own object for such a writer.
        variable_places: of every rank's items of variable size in the last committed save; ``None`` before there was
            one.
        stored: the plan as it stands in the index of each checkpoint; ``stored_before`` that of the plan from which
            this one was made, and ``changed_ranks`` those whose structure or share is not as it was there.
        columns_nbytes: memory of all tables and places.
        replicated, n_classes: of each rank, as in ``ReplicaChecks``; empty if replicas are not compared.
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
        """What it takes to keep this, about."""
        emitted = 0 if self.metadata is None else self.metadata.nbytes
        return self.columns_nbytes + emitted + self.stored.nbytes


def nbytes_of_columns(tables: Sequence[StructureTable], *others: Sequence[npt.NDArray[np.integer[Any]]]) -> int:
    """Memory of the columns of all tables, and of others of each rank; those that ranks share count once."""
    columns = {id(column): column.nbytes for table in tables for column in table.columns}
    columns |= {id(column): column.nbytes for of_ranks in others for column in of_ranks}
    return sum(columns.values())


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """One rank's share of a plan whose save was committed.

    Attributes:
        plan_id: identity of the global plan, a hash over the signatures of all ranks.
        signature: of this rank's structure.
        table: this rank's structure.
        rank_plan: what this rank writes.
        variable_places: int64 ``[v, 2]``, offset and length of this rank's items of variable size in the last save,
            as the coordinator knows them: if they come out the same, they need not be sent again. ``None`` where this
            rank cannot be sure that the coordinator knows them.
        coordinator: on the coordinator only.
        loaded_from: the checkpoint that it was found in; empty for one that this process has made.
        kind: what it is a plan of, see :mod:`robust_dcp.plan.kinds`; the same on all ranks.
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
        """What it takes to keep this, about."""
        of_all = 0 if self.coordinator is None else self.coordinator.memory_nbytes
        return nbytes_of_columns([self.table], [self.rank_plan.kept]) + of_all


class PlanCache:
    """The most recently used plans of this process, over all groups.

    A model and its EMA that are saved in turn both hit: each finds its own entry by signature.

    Args:
        cache: in which they are a table; ``None`` for one of its own.
        max_entries: plans that are kept: each is looked at when none fits.
        max_nbytes: memory that they may take together; the latest is kept whatever it takes.
    """

    def __init__(self, cache: StructureCache | None = None, *, max_entries: int = 8, max_nbytes: int = 2 << 30) -> None:
        # One plan may be that of two kinds, which hold the same: each goes on from it by itself.
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
        """The plan of that identity."""
        return next((plan for plan in self._of(group) if plan.plan_id == plan_id), None)

    def last_of_each_kind(self, group: GroupKey) -> dict[str, CachedPlan]:
        """For each kind that ``group`` has saved the plan that it used last; the kind saved last comes first."""
        found: dict[str, CachedPlan] = {}
        for plan in self._of(group):
            found.setdefault(plan.kind, plan)
        return found

    def _of(self, group: GroupKey) -> list[CachedPlan]:
        # To look for a plan is no use of it: it is used once its save is committed, and put in again then.
        return [plan for key, plan in self._table.latest_first() if key[0] == group]

    def put(self, group: GroupKey, plan: CachedPlan) -> None:
        """Keep ``plan`` as the latest; the least recently used one beyond the bound goes."""
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
