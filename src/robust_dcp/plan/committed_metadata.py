"""The ``Metadata`` that stock ``save`` passes around. Pickled it is only a path; its content is read on first use.

After the commit, stock broadcasts the result of ``create_global_plan`` to every rank. This keeps that message small.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.plan.session import SaveSession
from robust_dcp.storage.reader import RobustReader

__all__ = ["CommittedMetadata", "PlannedMetadata"]


class CommittedMetadata(Metadata):
    """The metadata of a committed checkpoint. It is read from ``.metadata`` on first use."""

    def __init__(self, checkpoint: str) -> None:
        # Do not call the dataclass's __init__: it would set fields that are properties here.
        self._checkpoint = checkpoint
        self._read: Metadata | None = None

    def _loaded(self) -> Metadata:
        if self._read is None:
            self._read = RobustReader(self._checkpoint).read_metadata()
        return self._read

    @property
    def state_dict_metadata(self) -> Any:  # type: ignore[override]
        return self._loaded().state_dict_metadata

    @property
    def planner_data(self) -> Any:
        return self._loaded().planner_data

    @property
    def storage_data(self) -> Any:
        return self._loaded().storage_data

    @property
    def storage_meta(self) -> Any:  # type: ignore[override]
        return self._loaded().storage_meta

    @property
    def version(self) -> Any:  # type: ignore[override]
        return getattr(self._loaded(), "version", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return CommittedMetadata, (self._checkpoint,)


class PlannedMetadata(CommittedMetadata):
    """The metadata before the commit. ``RobustWriter.finish`` finds the save in it. Pickled it is a path too."""

    def __init__(self, save: SaveSession, checkpoint: str) -> None:
        super().__init__(checkpoint)
        self.save = save
