"""The global plan: which rank writes which of its items. Made on the coordinator from all structures.

Calls the checks of this folder in order; the story of planning is told here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.global_plan.columns import GlobalColumns, merge_tables
from robust_dcp.plan.global_plan.conflicts import refuse_contradictions, refuse_other_paths
from robust_dcp.plan.global_plan.coverage import check_coverage
from robust_dcp.plan.global_plan.replicas import choose_writers, find_replicas
from robust_dcp.plan.structure import ItemKind, StructureTable
from robust_dcp.plan.structure.table import Path

__all__ = ["GlobalPlan", "make_global_plan"]

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """Who writes what.

    Attributes:
        columns: the items of all ranks.
        written: the rows of ``columns`` that are written, sorted by (name, offsets).
        kept: for each rank the places, in its table, of the items that it writes, ascending.
        common_objects: for each rank the places of the objects that every rank of the group holds, ascending.
        paths: name to place in the nested state dict (DCP's ``planner_data``), or ``None``.
    """

    columns: GlobalColumns
    written: Places
    kept: tuple[Places, ...]
    common_objects: tuple[Places, ...]
    paths: Mapping[str, Path] | None

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
        PlanConflict: where the ranks contradict each other; names the key and the ranks.
    """
    columns = merge_tables(tables)
    refuse_contradictions(columns)
    paths = refuse_other_paths(columns)
    replicas = find_replicas(columns)
    written = choose_writers(columns, replicas, lowest_rank=lowest_rank)
    check_coverage(columns, written, complete=len(tables) > 1)
    return GlobalPlan(
        columns=columns,
        written=written,
        kept=_by_rank(columns, written),
        common_objects=_by_rank(columns, _common_objects(columns)),
        paths=paths,
    )


def _by_rank(columns: GlobalColumns, rows: Places) -> tuple[Places, ...]:
    """For each rank the places of its items among ``rows``, ascending."""
    rank, item = columns.rank[rows], columns.item[rows].astype(np.intp)
    ends = np.cumsum(np.bincount(rank, minlength=len(columns.tables)))
    return tuple(np.split(item[np.lexsort((item, rank))], ends[:-1]))


def _common_objects(columns: GlobalColumns) -> Places:
    """Rows of objects that every one of several ranks holds."""
    is_object = columns.kind == ItemKind.BYTES
    holders = np.bincount(columns.name[is_object], minlength=len(columns.names))
    common = is_object & (holders[columns.name] == len(columns.tables)) & (len(columns.tables) > 1)
    return np.flatnonzero(common)
