"""Combines the structures of all ranks into the global plan: conflicts, replicas, balance and coverage."""

from robust_dcp.plan.global_plan.columns import GlobalColumns, merge_tables
from robust_dcp.plan.global_plan.differing import Differing, find_differing
from robust_dcp.plan.global_plan.make import GlobalPlan, ascending, by_rank, make_global_plan, plan_of_kept

__all__ = [
    "Differing",
    "GlobalColumns",
    "GlobalPlan",
    "ascending",
    "by_rank",
    "find_differing",
    "make_global_plan",
    "merge_tables",
    "plan_of_kept",
]
