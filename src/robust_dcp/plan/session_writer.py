"""What a save session needs from its writer. The session knows ``RobustWriter`` by this only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.report_file import SavedReport
from robust_dcp.storage.committing.commit import MetadataToPublish
from robust_dcp.storage.committing.save_directory import SaveDirectory
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource

__all__ = ["SessionWriter"]


class SessionWriter(Protocol):
    """What a save needs from its writer, in the order of the calls.

    Attributes:
        mark: 64 bits that distinguish this save from others. All ranks adopt the mark of the leading rank.
        directory: removes what a failed save has made.
        leaves_report: whether a committed save leaves a report beside the checkpoint.
    """

    @property
    def mark(self) -> int: ...

    @property
    def leaves_report(self) -> bool: ...

    @property
    def directory(self) -> SaveDirectory: ...

    def begin(self, *, is_coordinator: bool, ranks: int | None) -> None: ...

    def adopt(self, mark: int) -> None: ...

    def announce(self, *, ranks: int) -> None: ...

    def join(self, *, ranks: int) -> bool: ...

    def write(
        self,
        rank: int,
        source: ItemSource,
        placements: Placements,
        check_stop: Callable[[int, int], None],
        known_places: npt.NDArray[np.int64] | None,
    ) -> WrittenFiles: ...

    def check_own(self) -> None: ...

    def plain_meta(self) -> StorageMeta: ...

    def publish(self, metadata: MetadataToPublish, *, are_checked: bool) -> None: ...

    def leave_report(self, make: Callable[[str, tuple[str, ...]], SavedReport]) -> None: ...

    def clean_up(self) -> None: ...
