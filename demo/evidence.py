"""The evidence of a job: one JSON file, which rank 0 writes and ``run.py`` reads and judges."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:  # the jobs that load must not import robust_dcp
    from robust_dcp import SaveReport

__all__ = ["of_save", "write_evidence"]


def of_save(report: SaveReport, seconds: float, stock_seconds: float) -> dict[str, Any]:
    """What all ranks say of one save. All ranks call it.

    Args:
        report: the report of this rank.
        seconds: the wall time of the caller's whole save. Megatron does more than the strategy.
        stock_seconds: that of stock's save of the same state dict.
    """
    of_rank = {"plan": report.plan, "items": report.items, "nbytes": report.nbytes, "seconds": seconds}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, of_rank)
    changes = report.changes
    return {
        "plan": report.plan,
        "reason": report.reason,
        "added": list(changes.added) if changes else [],
        "changed": list(changes.changed) if changes else [],
        "do_all_ranks_agree": len({rank["plan"] for rank in ranks}) == 1,
        "items": sum(rank["items"] for rank in ranks),
        "nbytes": sum(rank["nbytes"] for rank in ranks),
        "seconds": max(rank["seconds"] for rank in ranks),
        "stock_seconds": stock_seconds,
    }


def write_evidence(work: Path, job: str, evidence: dict[str, Any]) -> None:
    """Write ``<job>.json`` on rank 0, and whether robust_dcp has been imported there. All ranks call it."""
    evidence["robust_dcp_imported"] = any(name.startswith("robust_dcp.") for name in sys.modules)
    if dist.get_rank() == 0:
        (work / f"{job}.json").write_text(json.dumps(evidence))
