"""Write a page that shows how saves went: phases, ranks and nodes, history, changes, sizes.

It reads .robust_dcp.report.json, which each save leaves. The page is one file and needs no network.

Examples:
  robust-dcp report checkpoints
  robust-dcp report checkpoints/step_1000 --output step_1000.html
  robust-dcp report checkpoints --json | jq '.reports[].seconds'
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec

from robust_dcp.cli.arguments import local_path
from robust_dcp.cli.checkpoint import check_directory
from robust_dcp.cli.output import CommandFailed, Output
from robust_dcp.report_page.page import render_page
from robust_dcp.report_page.reading import NoReports, read_reports
from robust_dcp.storage.files.disk import Disk


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("path", type=local_path, help="A checkpoint, or a directory that holds those of a run.")
    parser.add_argument("-o", "--output", help="The page to write (default: robust_dcp_report.html).")


def run(options: Namespace) -> None:
    """Write the page of the reports that saves have left."""
    if Output.as_json and options.output:
        raise CommandFailed(f"--json prints the reports and writes no page to {options.output}: leave out one of them")
    check_directory(options.path)
    output = options.output or "robust_dcp_report.html"
    try:
        reports = read_reports(options.path)
    except NoReports as error:
        raise CommandFailed(str(error)) from None
    if Output.as_json:
        of_saves = [{"name": name, **msgspec.to_builtins(report)} for name, report in reports.found]
        Output.put({"path": reports.path, "reports": of_saves, "skipped": [each._asdict() for each in reports.skipped]})
        return
    page = render_page(reports).encode()
    if os.path.isfile(output) or not os.path.lexists(output):
        Disk().replace_file(os.path.realpath(output), page, durable=False)  # an old page is there until then
    else:
        Path(output).write_bytes(page)  # into it: it may be /dev/stdout
    for name, reason in reports.skipped:
        Output.say(f"Skipped {name}: {reason}")
    Output.say(f"The page is {output}")
