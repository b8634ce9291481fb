"""The report of a save by a planner that is not ours, as far as it is known.

Stock gathers the ``WriteResult`` of all ranks. The last one of each rank carries the rank's row, so no exchange is
added. ``writer`` calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.checkpoint.storage import WriteResult

from robust_dcp.report_file import Plan, SavedReport
from robust_dcp.storage.writing.module_sizes import module_sizes
from robust_dcp.storage.writing.save_report import SaidOfRank, SaveTimes, make_report

__all__ = ["report_of_results", "told_by"]


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
