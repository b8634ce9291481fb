"""Makes the global plan on the coordinator: which rank writes which of its items.

Start here to read about planning. ``make_global_plan`` calls the checks of this folder in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.global_plan.attributes import merge_attributes
from robust_dcp.plan.global_plan.columns import GlobalColumns, merge_tables
from robust_dcp.plan.global_plan.conflicts import refuse_contradictions, refuse_other_paths
from robust_dcp.plan.global_plan.coverage import check_bounds, check_coverage
from robust_dcp.plan.global_plan.main_replicas import contested_rows, unclaimed_groups
from robust_dcp.plan.global_plan.order import order_of
from robust_dcp.plan.global_plan.replicas import Replicas, find_replicas
from robust_dcp.plan.global_plan.writers import choose_writers
from robust_dcp.plan.structure import ItemKind, Paths, StructureTable

__all__ = ["GlobalPlan", "ascending", "make_global_plan", "plan_of_kept", "plan_of_written", "replicated_groups"]

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """Which rank writes what.

    Attributes:
        columns: the items of all ranks.
        written: the rows of ``columns`` that are written, sorted by (name, offsets).
        kept: for each rank the places in its table of the items that it writes, ascending.
        common_objects: for each rank the places of the objects that every rank of the group holds, ascending.
        paths: for each name its path in the nested state dict (DCP's ``planner_data``); ``None`` if not flattened.
        attributes: what the planners add to ``Metadata``: attribute -> name -> fact.
        replicated: for each rank the places of the chunks of tensors that other ranks hold too, ascending.
        n_replicated: how many chunks of tensors several ranks hold.
        contested: for each rank the places of its main replicas that other ranks claim too, ascending.
        unclaimed: names with a chunk that has copies but no main replica.
    """

    columns: GlobalColumns
    written: Places
    kept: tuple[Places, ...]
    common_objects: tuple[Places, ...]
    paths: Paths | None
    attributes: dict[str, dict[str, Any]]
    replicated: tuple[Places, ...] = ()
    n_replicated: int = 0
    contested: tuple[Places, ...] = ()
    unclaimed: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data that all ranks write together."""
        return int(self.columns.nbytes[self.written].sum())


def make_global_plan(
    tables: Sequence[StructureTable], *, lowest_rank: bool = False, load: npt.NDArray[np.int64] | None = None
) -> GlobalPlan:
    """Deduplicate replicas, balance the rest, and check that every tensor is saved exactly once.

    Args:
        tables: the structure of each rank, in rank order.
        lowest_rank: give every replica to the lowest rank that holds it (``dedup_save_to_lowest_rank``).
        load: what each rank writes besides these tables (:func:`~robust_dcp.plan.global_plan.writers.load_of`).

    Raises:
        PlanConflict: the ranks contradict each other. The error names the key and the ranks.
    """
    columns = merge_tables(tables)
    check_bounds(columns)
    order = order_of(columns)
    refuse_contradictions(columns, order)
    paths = refuse_other_paths(columns)
    replicas = find_replicas(columns, order)
    written = choose_writers(columns, replicas, lowest_rank=lowest_rank, load=load)
    check_coverage(columns, written, complete=len(tables) > 1)
    replicated = replicated_groups(columns, replicas)
    unclaimed = columns.name[replicas.first[unclaimed_groups(columns, replicas)]]
    return GlobalPlan(
        columns=columns,
        written=written,
        kept=_by_rank(columns, written),
        common_objects=_by_rank(columns, _common_objects(columns)),
        paths=paths,
        attributes=merge_attributes(tables),
        replicated=_by_rank(columns, replicas.order[replicated[replicas.of]]),
        n_replicated=int(replicated.sum()),
        contested=_by_rank(columns, contested_rows(columns, replicas)),
        unclaimed=tuple(columns.names[name] for name in np.unique(unclaimed).tolist()),
    )


def replicated_groups(columns: GlobalColumns, replicas: Replicas) -> npt.NDArray[np.bool_]:
    """For each group, whether it is a chunk of a tensor that several ranks hold."""
    is_replicated: npt.NDArray[np.bool_] = np.diff(replicas.starts) > 1
    is_replicated &= columns.kind[replicas.first] != ItemKind.BYTES
    return is_replicated


def plan_of_kept(tables: Sequence[StructureTable], kept: Sequence[Places]) -> GlobalPlan:
    """Make the global plan again that :func:`make_global_plan` made of ``tables``, from its decisions.

    Args:
        tables: the structure of each rank, in rank order.
        kept: for each rank the places of the items that it writes.

    Raises:
        PlanConflict: these cannot be the decisions for these tables.
    """
    columns = merge_tables(tables)
    check_bounds(columns)
    order = order_of(columns)
    is_written = np.zeros(len(columns), dtype=np.bool_)
    first_rows = np.cumsum([0, *(len(table) for table in tables)])
    for first, places in zip(first_rows.tolist(), kept, strict=False):
        is_written[first + places] = True
    written = order[is_written[order]]
    check_coverage(columns, written, complete=len(tables) > 1)
    replicas = find_replicas(columns, order)
    replicated = replicated_groups(columns, replicas)
    return GlobalPlan(
        columns=columns,
        written=written,
        kept=tuple(kept),
        common_objects=_by_rank(columns, _common_objects(columns)),
        paths=refuse_other_paths(columns),
        attributes=merge_attributes(tables),
        replicated=_by_rank(columns, replicas.order[replicated[replicas.of]]),
        n_replicated=int(replicated.sum()),
    )


def plan_of_written(tables: Sequence[StructureTable]) -> GlobalPlan:
    """A plan for tables that hold only items to write. It has no shares of ranks."""
    columns = merge_tables(tables)
    paths = refuse_other_paths(columns)
    return GlobalPlan(columns, order_of(columns), kept=(), common_objects=(), paths=paths, attributes={})


def _by_rank(columns: GlobalColumns, rows: Places) -> tuple[Places, ...]:
    """For each rank the places of its items among ``rows``, ascending."""
    rows = ascending(rows, len(columns))  # so that they are rank after rank, each in the order of its table
    ends = np.cumsum(np.bincount(columns.rank[rows], minlength=len(columns.tables)))
    return tuple(np.split(columns.item[rows].astype(np.intp), ends[:-1]))


def ascending(rows: Places, n_rows: int) -> Places:
    """Sort distinct rows among ``n_rows`` rows."""
    is_there = np.zeros(n_rows, dtype=np.bool_)
    is_there[rows] = True
    return np.flatnonzero(is_there)


def _common_objects(columns: GlobalColumns) -> Places:
    """The rows of objects that all ranks hold, if there are several ranks."""
    is_object = columns.kind == ItemKind.BYTES
    holders = np.bincount(columns.name[is_object], minlength=len(columns.names))
    common = is_object & (holders[columns.name] == len(columns.tables)) & (len(columns.tables) > 1)
    return np.flatnonzero(common)
