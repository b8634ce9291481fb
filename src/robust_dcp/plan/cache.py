"""Plans of committed saves, kept for the next one: bounded, keyed by group and signature.

Owns the only mutable state of planning. An entry is put in after its save was committed, by
``plan.session``, and used only if every rank shows in that very save that it still holds (``plan.agreement``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
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


class PlanCache:
    """The most recently used plans of this process, over all groups.

    A model and its EMA that are saved in turn both hit: each finds its own entry by signature.

    Args:
        max_entries: plans that are kept.
        max_nbytes: memory that the coordinator's parts of them may take together; the latest is kept whatever it takes.
    """

    def __init__(self, max_entries: int = 8, max_nbytes: int = 2 << 30) -> None:
        self._max_entries = max_entries
        self._max_nbytes = max_nbytes
        self._entries: OrderedDict[tuple[GroupKey, bytes], CachedPlan] = OrderedDict()
        self._last_of_kind: dict[tuple[GroupKey, str], bytes] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, group: GroupKey, signature: bytes) -> CachedPlan | None:
        """The latest plan in which this rank's structure has ``signature``."""
        return self._latest(group, lambda plan: plan.signature == signature)

    def latest(self, group: GroupKey) -> CachedPlan | None:
        """The plan that ``group`` used last."""
        return self._latest(group, lambda plan: True)

    def get(self, group: GroupKey, plan_id: bytes) -> CachedPlan | None:
        """The plan of that identity."""
        with self._lock:
            return self._entries.get((group, plan_id))

    def last_of_each_kind(self, group: GroupKey) -> dict[str, CachedPlan]:
        """For each kind that ``group`` has saved the plan that it used last; the kind saved last comes first."""
        with self._lock:
            last = reversed(self._last_of_kind.items())
            return {kind: self._entries[key, plan_id] for (key, kind), plan_id in last if key == group}

    def _latest(self, group: GroupKey, wanted: Callable[[CachedPlan], bool]) -> CachedPlan | None:
        with self._lock:
            matches = (plan for (key, _), plan in reversed(self._entries.items()) if key == group and wanted(plan))
            return next(matches, None)

    def put(self, group: GroupKey, plan: CachedPlan) -> None:
        """Keep ``plan`` as the latest; the least recently used one beyond the bound goes."""
        with self._lock:
            self._entries[group, plan.plan_id] = plan
            self._entries.move_to_end((group, plan.plan_id))
            self._last_of_kind.pop((group, plan.kind), None)  # so that it comes last
            self._last_of_kind[group, plan.kind] = plan.plan_id
            while len(self._entries) > 1 and self._is_too_large():
                self._entries.popitem(last=False)
            self._mend_kinds()

    def _mend_kinds(self) -> None:
        """A kind whose last plan has gone goes back to the one before, if there is one."""
        for (group, kind), plan_id in list(self._last_of_kind.items()):
            if (group, plan_id) in self._entries:
                continue
            entries = reversed(self._entries.items())
            before = next((entry[1] for entry, plan in entries if entry[0] == group and plan.kind == kind), None)
            if before is None:
                del self._last_of_kind[group, kind]
            else:
                self._last_of_kind[group, kind] = before

    def _is_too_large(self) -> bool:
        nbytes = sum(plan.coordinator.memory_nbytes for plan in self._entries.values() if plan.coordinator is not None)
        return len(self._entries) > self._max_entries or nbytes > self._max_nbytes

    def forget(self, group: GroupKey, plan_id: bytes) -> None:
        """Drop a plan, if it is there."""
        with self._lock:
            self._entries.pop((group, plan_id), None)
            self._mend_kinds()

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._last_of_kind.clear()


PLANS = PlanCache()
"""The plans of this process: nothing depends on keeping a planner object between saves."""
