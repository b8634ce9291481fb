"""Copy a checkpoint, verify each file at the target, and commit the copy.

A copy that was cut off goes on if you start it again: what has arrived is not sent once more.

Examples:
  robust-dcp copy /nvme/run_7/step_1000 s3://bucket/run_7/step_1000
  robust-dcp copy s3://bucket/run_7/step_1000 /nvme/run_7/step_1000 --limit 500MB
  FSSPEC_S3_ENDPOINT_URL=http://127.0.0.1:9000 robust-dcp copy step_1000 s3://bucket/step_1000
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from robust_dcp.cli.arguments import nbytes_in, number_in
from robust_dcp.cli.output import CommandFailed, Output, size


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("source", help="A checkpoint's directory or URL.")
    parser.add_argument("target", help="Where to: a directory or a URL of fsspec.")
    parser.add_argument("--limit", type=nbytes_in, help="The most bytes to send in a second, for example 500MB.")
    parser.add_argument("--threads", type=number_in(int, 1), default=8, help="How many files are sent at once.")


def run(options: Namespace) -> None:
    """Copy a checkpoint."""
    Output.say(f"Copying {options.source} to {options.target}")

    from robust_dcp.drain.copy import copy_checkpoint
    from robust_dcp.storage.remote import CopyOptions

    how = CopyOptions(threads=options.threads, limit_bytes_per_second=options.limit)
    with Output.cleaning_up(), Output.progress("copy") as show:
        try:
            copied = copy_checkpoint(options.source, options.target, options=how, progress=show)
        except ValueError as error:  # of a URL, or of a source and a target that do not go together
            raise CommandFailed(getattr(error, "message", None) or str(error)) from error
    Output.put(asdict(copied))
    rate = size(copied.nbytes / max(copied.seconds, 1e-9))
    Output.say(
        f"Sent {copied.files} files, {size(copied.nbytes)} in {copied.seconds:.1f} s ({rate}/s, {copied.retries} calls "
        f"made once more); {copied.skipped_files} files, {size(copied.skipped_nbytes)} were there already"
    )
