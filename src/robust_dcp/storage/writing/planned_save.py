"""A save that ``RobustPlanner`` has planned, as ``RobustWriter`` knows it where stock calls the writer's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

__all__ = ["PlannedSave"]


@runtime_checkable
class PlannedSave(Protocol):
    """A save that ``RobustPlanner`` has planned.

    It calls the writer's methods itself, in the order that all ranks have agreed on. If DCP calls a hook of the writer
    instead, the hook lets it go on.
    """

    def write_items(self, items: Sequence[WriteItem], planner: SavePlanner) -> None: ...

    def commit(self) -> None: ...
