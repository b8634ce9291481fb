"""Makes the global plan on the coordinator: which rank writes which of its items.

Start here to read about planning. ``make_global_plan`` calls the checks of this folder in order. Its result follows
from the structures of the ranks alone, so that every coordinator makes the same plan of them.
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
from robust_dcp.plan.global_plan.differing import compared_rows
from robust_dcp.plan.global_plan.main_replicas import contested_rows, unclaimed_groups
from robust_dcp.plan.global_plan.order import order_of
from robust_dcp.plan.global_plan.replicas import find_replicas
from robust_dcp.plan.global_plan.writers import choose_writers
from robust_dcp.plan.structure import Paths, StructureTable

__all__ = ["GlobalPlan", "ascending", "by_rank", "make_global_plan", "plan_of_kept"]

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """Which rank writes what.

    Attributes:
        columns: the items of all ranks.
        order: the rows of ``columns`` sorted by (name, offsets, rank).
        written: the rows that are written, sorted by (name, offsets).
        kept: for each rank the places in its table of the items that it writes, ascending.
        paths: for each name its path in the nested state dict (DCP's ``planner_data``); ``None`` if not flattened.
        attributes: what the planners add to ``Metadata``: attribute -> name -> fact.
        compared: the rows whose contents are compared with those of other ranks when the plan is made, ascending.
        contested: those of them that several ranks claim as their main replica.
        unclaimed: names with a chunk that has copies but no main replica.
    """

    columns: GlobalColumns
    order: Places
    written: Places
    kept: tuple[Places, ...]
    paths: Paths | None
    attributes: dict[str, dict[str, Any]]
    compared: Places
    contested: Places
    unclaimed: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data that all ranks write together."""
        return int(self.columns.nbytes[self.written].sum())


def make_global_plan(tables: Sequence[StructureTable], *, lowest_rank: bool = False) -> GlobalPlan:
    """Deduplicate replicas, balance the rest, and check that every tensor is saved exactly once.

    Args:
        tables: the structure of each rank, in rank order.
        lowest_rank: give every replica to the lowest rank that holds it (``dedup_save_to_lowest_rank``).

    Raises:
        PlanConflict: the ranks contradict each other. The error names the key and the ranks.
    """
    columns = merge_tables(tables)
    check_bounds(columns)
    order = order_of(columns)
    refuse_contradictions(columns, order)
    paths = refuse_other_paths(columns)
    replicas = find_replicas(columns, order)
    written = choose_writers(columns, replicas, lowest_rank=lowest_rank)
    check_coverage(columns, written, complete=len(tables) > 1)
    contested = contested_rows(columns, replicas)
    unclaimed = columns.name[replicas.first[unclaimed_groups(columns, replicas)]]
    return GlobalPlan(
        columns=columns,
        order=order,
        written=written,
        kept=by_rank(columns, written),
        paths=paths,
        attributes=merge_attributes(tables),
        compared=compared_rows(columns, replicas, contested),
        contested=contested,
        unclaimed=tuple(columns.names[name] for name in np.unique(unclaimed).tolist()),
    )


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
    nothing: Places = np.empty(0, dtype=np.intp)
    return GlobalPlan(
        columns=columns,
        order=order,
        written=written,
        kept=tuple(kept),
        paths=refuse_other_paths(columns),
        attributes=merge_attributes(tables),
        compared=nothing,
        contested=nothing,
    )


def by_rank(columns: GlobalColumns, rows: Places) -> tuple[Places, ...]:
    """For each rank the places of its items among ``rows``, ascending."""
    rows = ascending(rows, len(columns))  # so that they are rank after rank, each in the order of its table
    ends = np.cumsum(np.bincount(columns.rank[rows], minlength=len(columns.tables)))
    return tuple(np.split(columns.item[rows].astype(np.intp), ends[:-1]))


def ascending(rows: Places, n_rows: int) -> Places:
    """Sort distinct rows among ``n_rows`` rows."""
    is_there = np.zeros(n_rows, dtype=np.bool_)
    is_there[rows] = True
    return np.flatnonzero(is_there)
