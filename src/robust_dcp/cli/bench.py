"""``robust-dcp bench``: what a device gives, and the options to set for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from robust_dcp.cli.output import CommandFailed, Output, size

if TYPE_CHECKING:
    from robust_dcp.storage.tuning import TunedOptions

__all__ = ["run"]


def run(path: str, *, seconds: float) -> None:
    """Print how fast a device writes and reads, and which options suit it."""
    directory = _existing(path)
    Output.note(f"{directory}: writes and reads for about {seconds:g} s")
    from robust_dcp.storage.tuning import tune  # only here, because it imports torch

    tuned = tune(directory, seconds=seconds)
    if Output.as_json:
        Output.put(_as_json(directory, tuned))
        return
    rows = [
        (
            *(what, "direct" if row.setting.direct else "buffered", row.setting.depth),
            f"{size(row.nbytes_per_second)}/s",
            f"{row.cpu_seconds / row.nbytes * (1 << 30):.2f}",
            "chosen" if row.setting == chosen else "",
        )
        for what, table, chosen in (("write", tuned.table, tuned.writing), ("read", tuned.read_table, tuned.reading))
        for row in table
    ]
    columns = ("what", "I/O", "threads", "rate", "CPU s/GiB", "choice")
    Output.table(columns, rows, right=("threads", "rate", "CPU s/GiB"))
    if tuned.direct_refused:
        Output.note(f"direct I/O was not measured: {tuned.direct_refused}")
    Output.note(f"WriteOptions({_arguments(tuned.writer_options)})")
    Output.note(f"ReadOptions({_arguments(tuned.reader_options)})")
    Output.note(f"Megatron: ROBUST_DCP_WRITER_THREADS={tuned.writer_options['threads']}")


def _existing(path: str) -> str:
    """The nearest directory that exists, checked here so that the error needs no torch."""
    directory = os.path.abspath(path)
    while not os.path.isdir(directory):
        if os.path.lexists(directory):
            raise CommandFailed(f"{directory} is not a directory: give the directory that checkpoints go to")
        directory = os.path.dirname(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CommandFailed(f"{directory} cannot be written to: check who owns it, and give another directory")
    return directory


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _as_json(directory: str, tuned: TunedOptions) -> dict[str, Any]:
    return {
        "path": directory,
        "environment": {"ROBUST_DCP_WRITER_THREADS": str(tuned.writer_options["threads"])},
        "writer_options": tuned.writer_options,
        "reader_options": tuned.reader_options,
        "direct_refused": tuned.direct_refused,
        "measured": [
            {
                "what": what,
                "direct": row.setting.direct,
                "threads": row.setting.depth,
                "nbytes": row.nbytes,
                "seconds": row.seconds,
                "cpu_seconds": row.cpu_seconds,
            }
            for what, table in (("write", tuned.table), ("read", tuned.read_table))
            for row in table
        ],
    }
