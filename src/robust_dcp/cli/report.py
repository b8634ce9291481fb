"""``robust-dcp report``: the reports that saves have left, as one HTML page."""

from __future__ import annotations

import os
import secrets
from typing import Annotated, Any, Final

import msgspec
import typer

from robust_dcp.cli.checkpoint import age, local_path
from robust_dcp.cli.output import CommandFailed, Json, Output, size
from robust_dcp.report_page import NoReports, Reports, read_reports, render_page

__all__ = ["EXAMPLES", "run"]

EXAMPLES: Final = (
    "robust-dcp report checkpoints",
    "robust-dcp report checkpoints/step_1000 --output step_1000.html",
    "robust-dcp report checkpoints --json | jq '.reports[].seconds'",
)


def run(
    path: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, or a directory that holds those of a run.", callback=local_path, show_default=False
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = "robust_dcp_report.html",
    as_json: Json = False,
) -> None:
    """Write a page that shows how saves went: phases, ranks and nodes, history, changes, sizes.

    It reads .robust_dcp.report.json, which each save leaves. The page is one file and needs no network.
    """
    try:
        reports = read_reports(path)
    except NoReports as error:
        raise CommandFailed(str(error)) from None
    if Output.as_json:
        Output.put(_as_json(reports))
        return
    _write(output, render_page(reports))
    Output.table(
        ("checkpoint", "saved", "seconds", "size", "rate", "plan", "ranks"),
        [
            (
                *(each.name, age(each.report.saved_at_seconds), f"{each.report.seconds:.2f}"),
                size(each.report.total_nbytes),
                f"{size(each.report.total_nbytes / max(each.report.seconds, 1e-9))}/s",
                *(each.report.plan.outcome, each.report.world_size),
            )
            for each in reports.found
        ],
        right=("seconds", "size", "rate", "ranks"),
    )
    for skipped in reports.skipped:
        Output.say(f"Skipped {skipped.name}: {skipped.reason}")
    Output.say(f"The page is {output}")


def _write(path: str, page: str) -> None:
    """Replace the page in one step."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        raise CommandFailed(f"the page cannot be written to {path}: {error.strerror}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _as_json(reports: Reports) -> dict[str, Any]:
    return {
        "path": reports.path,
        "reports": [{"name": each.name, **msgspec.to_builtins(each.report)} for each in reports.found],
        "skipped": [{"name": each.name, "reason": each.reason} for each in reports.skipped],
    }
