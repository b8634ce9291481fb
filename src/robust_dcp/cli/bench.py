"""Measure how fast a device writes and reads, direct and buffered, and say which options suit it.

Its files have no names, so nothing stays behind, also after Ctrl-C. It uses at most a quarter of the free
space, and 512 MiB at a time. The device should have nothing else to do meanwhile.

Examples:
  robust-dcp bench checkpoints
  robust-dcp bench /mnt/nvme --seconds 20 --json
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from robust_dcp.cli.arguments import local_path, number_in
from robust_dcp.cli.output import Output, size


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("path", type=local_path, help="A directory on the device. It need not exist.")
    measure = "About how long to measure."
    parser.add_argument("--seconds", type=number_in(float, 0.1, 600), default=8.0, help=measure)


def run(options: Namespace) -> None:
    """Print how fast a device writes and reads, and which options suit it."""
    Output.note(f"{options.path}: writes and reads for about {options.seconds:g} s")
    from robust_dcp.storage.tuning import choose, tune

    tuned = tune(options.path, seconds=options.seconds)
    tables = {"write": tuned.table, "read": tuned.read_table}
    measured: list[dict[str, Any]] = [
        {"what": what, **row._asdict()} for what, table in tables.items() for row in table
    ]
    threads = tuned.writer_options["threads"]
    Output.put(
        {
            "path": options.path,
            "environment": {"ROBUST_DCP_WRITER_THREADS": str(threads)},
            "writer_options": tuned.writer_options,
            "reader_options": tuned.reader_options,
            "direct_refused": tuned.direct_refused,
            "measured": measured,
        }
    )
    chosen = {what: choose(table) for what, table in tables.items()}
    rows = [
        (
            each["what"],
            "direct" if each["direct"] else "buffered",
            each["threads"],
            f"{size(each['nbytes'] / max(each['seconds'], 1e-9))}/s",
            f"{each['cpu_seconds'] / each['nbytes'] * (1 << 30):.2f}",
            "chosen" if chosen[each["what"]][:2] == (each["direct"], each["threads"]) else None,
        )
        for each in measured
    ]
    columns = ("what", "I/O", "threads", "rate", "CPU s/GiB", "choice")
    Output.table(columns, rows, right=("threads", "rate", "CPU s/GiB"))
    if tuned.direct_refused:
        Output.note(f"direct I/O was not measured: {tuned.direct_refused}")
    for name, chosen in (("WriteOptions", tuned.writer_options), ("ReadOptions", tuned.reader_options)):
        Output.note(f"{name}({', '.join(f'{option}={value!r}' for option, value in chosen.items())})")
    Output.note(f"Megatron: ROBUST_DCP_WRITER_THREADS={threads}")
