"""Copy a checkpoint, verify each file at the target, and commit the copy.

A copy that was cut off goes on if you start it again: what has arrived is not sent once more.

Examples:
  robust-dcp copy /nvme/run_7/step_1000 s3://bucket/run_7/step_1000
  robust-dcp copy s3://bucket/run_7/step_1000 /nvme/run_7/step_1000 --limit 500MB
  robust-dcp copy step_1000 s3://bucket/step_1000 --target-option endpoint_url=http://127.0.0.1:9000
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict
from typing import Any

from robust_dcp.cli.arguments import nbytes_in, number_in
from robust_dcp.cli.output import CommandFailed, Output, size

__all__ = ["declare", "run"]


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("source", help="A checkpoint's directory or URL.")
    parser.add_argument("target", help="Where to: a directory or a URL of fsspec.")
    parser.add_argument("--limit", type=nbytes_in, help="The most bytes to send in a second, for example 500MB.")
    parser.add_argument("--threads", type=number_in(int, 1), default=8, help="How many files are sent at once.")
    for end in ("source", "target"):
        parser.add_argument(
            f"--{end}-option",
            action="append",
            default=[],
            type=_store_option,
            help=f"What fsspec passes to the {end}'s store: key=value.",
        )


def _store_option(text: str) -> tuple[str, Any]:
    """``"anon=true"`` -> ``("anon", True)``. A value that is no JSON is a string."""
    key, is_pair, value = text.partition("=")
    if not key or not is_pair:
        raise ArgumentTypeError(f"{text!r} is no option: write key=value, for example anon=true")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def run(options: Namespace) -> None:
    """Copy a checkpoint."""
    Output.say(f"Copying {options.source} to {options.target}")

    from robust_dcp.drain.copy import copy_checkpoint
    from robust_dcp.errors import RobustCheckpointError
    from robust_dcp.storage.remote import CopyOptions

    how = CopyOptions(
        threads=options.threads,
        limit_bytes_per_second=options.limit,
        source_options=dict(options.source_option),
        target_options=dict(options.target_option),
    )
    with Output.cleaning_up(), Output.progress("copy") as show:
        try:
            copied = copy_checkpoint(options.source, options.target, options=how, progress=show)
        except RobustCheckpointError:
            raise
        except ValueError as error:  # of a URL, or of a source and a target that do not go together
            raise CommandFailed(str(error)) from error
    Output.put(asdict(copied))
    rate = size(copied.nbytes / max(copied.seconds, 1e-9))
    Output.say(
        f"Sent {copied.files} files, {size(copied.nbytes)} in {copied.seconds:.1f} s ({rate}/s, {copied.retries} calls "
        f"made once more); {copied.skipped_files} files, {size(copied.skipped_nbytes)} were there already"
    )
