"""A save by a planner that is not ours: what ranks tell each other through stock's plans and results.

Stock hands each rank its plan, which carries the mark of the save there, and gathers the ``WriteResult`` of all ranks.
The last result of each rank carries the rank's row of the report. So no exchange is added. ``writer`` calls this
module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from robust_dcp.report_file import Plan, SavedReport
from robust_dcp.storage.layouts.places import Placements, place_as_they_come
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.module_sizes import module_sizes
from robust_dcp.storage.writing.save_report import SaidOfRank, SaveTimes, make_report

__all__ = ["Share", "place_items", "report_of_results", "results_of", "shared", "told_by"]


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


def report_of_results(
    results: Sequence[Sequence[WriteResult]],
    times: SaveTimes,
    *,
    checkpoint: str,
    save_id: str,
    planner: str,
    fallbacks: Sequence[str],
) -> SavedReport:
    """The report of a save that was just committed.

    Args:
        results: those of each rank, as stock hands them to ``finish``.
        planner: the name of the planner's class.
    """
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
        times,
        checkpoint=checkpoint,
        save_id=save_id,
        world_size=len(results),
        coordinator_rank=0,
        plan=Plan("foreign", f"{planner} made the plan"),
        fallbacks=fallbacks,
        modules=module_sizes(list(sizes), np.array(list(sizes.values()), dtype=np.int64)),
    )
