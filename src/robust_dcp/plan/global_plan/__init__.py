"""The structures of all ranks together: conflicts, replicas, balance, coverage, and the global plan."""

from robust_dcp.plan.global_plan.columns import GlobalColumns, merge_tables
from robust_dcp.plan.global_plan.make import GlobalPlan, make_global_plan, plan_of_kept
from robust_dcp.plan.global_plan.objects import combined_digest, differing_objects, object_digest

__all__ = [
    "GlobalColumns",
    "GlobalPlan",
    "combined_digest",
    "differing_objects",
    "make_global_plan",
    "merge_tables",
    "object_digest",
    "plan_of_kept",
]
