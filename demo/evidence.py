"""The evidence of a job: one JSON file for each job, which rank 0 writes and ``run.py`` reads.

Owns the format of the evidence. ``verdict`` judges it. torch is imported only on ranks, because ``run.py`` does not
need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the jobs that load must not import robust_dcp
    from robust_dcp import SaveReport

__all__ = ["gather_report", "read_evidence", "write_evidence"]


def gather_report(report: SaveReport, seconds: float) -> dict[str, Any] | None:
    """The reports of all ranks about one save on rank 0, and ``None`` on other ranks.

    Args:
        report: the report of this rank.
        seconds: the wall time of the caller's whole save. Megatron does more than the strategy.
    """
    import torch.distributed as dist

    changes = report.changes
    local = {
        "plan": report.plan,
        "reason": report.reason,
        "added": list(changes.added) if changes else [],
        "removed": list(changes.removed) if changes else [],
        "changed": dict(changes.changed) if changes else {},
        "items": report.items,
        "nbytes": report.nbytes,
        "n_files": len(report.files),
        "seconds": report.seconds,
        "call_seconds": seconds,
        "phases": [
            {
                "name": phase.name,
                "seconds": phase.seconds,
                "exchanges": phase.exchanges,
                "messages": phase.messages,
                "sent_nbytes": phase.header_nbytes + phase.payload_nbytes,
            }
            for phase in report.phases
        ],
    }
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local, gathered)
    if gathered is None:
        return None
    return {**local, "items": sum(rank["items"] for rank in gathered), "ranks": gathered}


def write_evidence(work: Path, job: str, evidence: dict[str, Any]) -> None:
    """Write ``<job>.json`` on rank 0. All ranks call it."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        (work / f"{job}.json").write_text(json.dumps(evidence))


def read_evidence(work: Path, job: str) -> dict[str, Any]:
    """Read what :func:`write_evidence` wrote."""
    evidence: dict[str, Any] = json.loads((work / f"{job}.json").read_text())
    return evidence
