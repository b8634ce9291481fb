"""``robust-dcp doctor``: what in this environment may get in the way of checkpoints, and what to do."""

from __future__ import annotations

from collections import Counter

from robust_dcp.cli.doctoring.environment import environment_findings
from robust_dcp.cli.doctoring.file_system import file_system_findings
from robust_dcp.cli.doctoring.finding import Finding, State
from robust_dcp.cli.doctoring.machine import machine_findings
from robust_dcp.cli.ls import check_root
from robust_dcp.cli.output import FOUND, Output, number
from robust_dcp.version import __version__

__all__ = ["run"]


def run(path: str | None) -> int:
    """Print what may get in the way of checkpoints here."""
    if path is not None:
        check_root(path)
    Output.note(f"robust-dcp {__version__}: versions, network and limits" + (f", and {path}" if path else ""))
    findings: list[Finding] = [*environment_findings(), *machine_findings()]
    if path is not None:
        findings += file_system_findings(path)
    counts = Counter(each.state for each in findings)
    Output.put({"path": path, "findings": [each._asdict() for each in findings], "problems": counts[State.PROBLEM]})
    rows = ((each.state.value, each.name, each.found, each.advice) for each in findings)
    Output.table(("state", "what", "found", "what to do"), rows)
    Output.note(f"{number(counts[State.PROBLEM], 'problem')}, {number(counts[State.WARNING], 'warning')}")
    return FOUND if counts[State.PROBLEM] else 0
