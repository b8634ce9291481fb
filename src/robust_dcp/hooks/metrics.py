"""The numbers of an event, by names that all hooks share."""

from __future__ import annotations

import re
from typing import Final

from robust_dcp.events import Event

__all__ = ["metrics_of", "step_of"]

_LAST_NUMBER: Final = re.compile(r"(\d{1,18})\D*$")


def metrics_of(event: Event) -> dict[str, float]:
    """The numbers of an ``ended`` or ``failed`` event; none for other events.

    Example: ``{"robust_dcp/save/seconds": 1.5, "robust_dcp/save/write_seconds": 1.2, "robust_dcp/save/nbytes": 4096.0,
    "robust_dcp/save/nbytes_per_second": 2730.6, "robust_dcp/save/failures": 0.0}``.

    ``nbytes`` are those of this rank. ``nbytes_per_second`` is their rate over the whole call.
    """
    if event.name not in ("ended", "failed"):
        return {}
    found = {"seconds": event.seconds or 0.0, "failures": float(event.name == "failed")}
    report = event.report
    if report is not None:
        for phase in report.phases:  # a load that was begun again has some of them twice
            found[f"{phase.name}_seconds"] = found.get(f"{phase.name}_seconds", 0.0) + phase.seconds
        found["nbytes"] = float(report.nbytes)
        if event.seconds:
            found["nbytes_per_second"] = report.nbytes / event.seconds
        if getattr(report, "blocked_seconds", None) is not None:
            found["blocked_seconds"] = report.blocked_seconds
        if getattr(report, "plan", None) is not None:
            found["plan_reused"] = float(report.plan == "reused")
    return {f"robust_dcp/{event.kind}/{name}": value for name, value in found.items()}


def step_of(event: Event) -> int | None:
    """The last number in the name of the checkpoint: 1000 for ``runs/7b/step_1000``; ``None`` if there is none."""
    name = event.checkpoint_id.rstrip("/").rpartition("/")[2]
    found = _LAST_NUMBER.search(name)
    return None if found is None else int(found[1])
