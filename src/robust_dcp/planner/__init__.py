"""DCP's planner interfaces over ``plan``."""

from robust_dcp.planner.load import RobustLoadPlanner
from robust_dcp.planner.save import RobustPlanner

__all__ = ["RobustLoadPlanner", "RobustPlanner"]
