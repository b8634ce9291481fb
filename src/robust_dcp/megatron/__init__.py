"""Megatron-Core's distributed checkpoints, saved by robust_dcp. Importing this package needs megatron-core."""

from robust_dcp.megatron.planner import MegatronPlanner
from robust_dcp.megatron.strategies import RobustSaveStrategy

__all__ = ["MegatronPlanner", "RobustSaveStrategy"]
