"""Combines the structures of all ranks into the global plan: conflicts, replicas, balance and coverage."""

from robust_dcp.plan.global_plan.columns import GlobalColumns, merge_tables
from robust_dcp.plan.global_plan.make import GlobalPlan, ascending, make_global_plan, plan_of_kept, plan_of_written
from robust_dcp.plan.global_plan.objects import combined_digest, differing_objects, object_digest
from robust_dcp.plan.global_plan.patch import Patch, Shares, patch_plan, shares_of

__all__ = [
    "GlobalColumns",
    "GlobalPlan",
    "Patch",
    "Shares",
    "ascending",
    "combined_digest",
    "differing_objects",
    "make_global_plan",
    "merge_tables",
    "object_digest",
    "patch_plan",
    "plan_of_kept",
    "plan_of_written",
    "shares_of",
]
