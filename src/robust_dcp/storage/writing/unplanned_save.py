"""A save by a planner that is not ours: what a rank writes, and what ranks tell each other through stock's calls.

Stock hands each rank its plan, which carries the mark of the save there, and gathers the ``WriteResult`` of all ranks.
The last result of each rank carries the rank's row of the report. So no exchange is added. ``writer`` calls this
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from robust_dcp.report_file import Plan, SavedReport
from robust_dcp.storage.committing.save import MetadataToPublish, Save
from robust_dcp.storage.layouts.places import Placements, place_as_they_come
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, encode_metadata, referenced_files
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource
from robust_dcp.storage.writing.module_sizes import module_sizes
from robust_dcp.storage.writing.save_report import SaidOfRank, SaveTimes, make_report, said_of_rank

__all__ = ["Share", "UnplannedSave", "place_items", "results_of", "shared", "told_by"]


class Share(NamedTuple):
    """What the coordinator tells each rank, as a part of its plan."""

    rank: int
    mark: int


def shared(plans: Sequence[SavePlan], mark: int) -> list[SavePlan]:
    """The plans of all ranks, each with its :class:`Share`."""
    return [replace(plan, storage_data=Share(rank, mark)) for rank, plan in enumerate(plans)]


def place_items(items: Sequence[WriteItem], *, files: int) -> Placements:
    """Give items places as they come, on this rank alone."""
    return place_as_they_come([_chunk_nbytes(item) for item in items], files=files)


def _chunk_nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * int(data.properties.dtype.itemsize)


def results_of(items: Sequence[WriteItem], placements: Placements, written: WrittenFiles) -> list[WriteResult]:
    """What stock is told of items that were written."""
    return [
        WriteResult(
            index=item.index, size_in_bytes=nbytes, storage_data=StorageInfo(written.names[file], offset, nbytes)
        )
        for item, file, (offset, nbytes) in zip(
            items, placements.file.tolist(), written.variable_places.tolist(), strict=True
        )
    ]


@dataclass(frozen=True)
class _TellingResult(WriteResult):
    """A result with what its rank tells for the report."""

    said: SaidOfRank | None = None


def told_by(results: Sequence[WriteResult], said: SaidOfRank) -> list[WriteResult]:
    """The results of a rank, with its row. A rank that has written nothing tells nothing."""
    if not results:
        return []
    last = results[-1]
    return [*results[:-1], _TellingResult(last.index, last.size_in_bytes, last.storage_data, said)]


class UnplannedSave:
    """What one rank does in one save by a planner that is not ours."""

    def __init__(self) -> None:
        self._times = SaveTimes()
        self._planner_name = ""

    def write(
        self,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        rank: int,
        *,
        write: Callable[[int, ItemSource, Placements, Callable[[int, int], None]], WrittenFiles],
        n_files: int,
        tells: bool,
    ) -> list[WriteResult]:
        """Write the items of a plan. They get places as they come, on this rank alone.

        Args:
            write: ``RobustWriter.write``.
            n_files: how many files hold a rank's tensors.
            tells: whether the results carry this rank's row of the report.
        """
        self._planner_name = type(planner).__name__
        self._times.ends("plan")
        placements = place_items(items, files=n_files)
        with self._times.own_write():
            source = WriteItemSource(items, planner.resolve_data)
            written = write(rank, source, placements, lambda done_nbytes, total_nbytes: None)
        results = results_of(items, placements, written)
        return told_by(results, said_of_rank(rank, written, self._times)) if tells else results

    def commit(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]], directory: Save) -> None:
        """Put the places of all items into ``metadata`` and publish it. What was made is removed if that fails.

        Args:
            results: those of each rank, as stock hands them to ``finish``.
        """
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.version = FORMAT_VERSION
        self._times.ends("write")
        try:
            directory.publish(MetadataToPublish((encode_metadata(metadata),), referenced_files(metadata)))
        except BaseException as error:
            directory.roll_back(error)
            raise
        self._times.ends("commit")

    def report_of(
        self, results: Sequence[Sequence[WriteResult]], checkpoint: str, save_id: str, fallbacks: Sequence[str]
    ) -> SavedReport:
        """The report of the save, which was just committed."""
        sizes: dict[str, int] = {}
        for part in results:
            for result in part:
                sizes[result.index.fqn] = sizes.get(result.index.fqn, 0) + result.size_in_bytes
        return make_report(
            [
                (rank, part[-1].said)
                for rank, part in enumerate(results)
                if part and isinstance(part[-1], _TellingResult) and part[-1].said is not None
            ],
            self._times,
            checkpoint=checkpoint,
            save_id=save_id,
            world_size=len(results),
            coordinator_rank=0,
            plan=Plan("foreign", f"{self._planner_name} made the plan"),
            fallbacks=fallbacks,
            modules=module_sizes(list(sizes), np.array(list(sizes.values()), dtype=np.int64)),
        )
