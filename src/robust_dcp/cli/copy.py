"""``robust-dcp copy``: a checkpoint to another directory or to an object store, and back."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final

import typer

from robust_dcp.cli.output import CommandFailed, Json, Output, size

__all__ = ["EXAMPLES", "nbytes_in", "run"]

EXAMPLES: Final = (
    "robust-dcp copy /nvme/run_7/step_1000 s3://bucket/run_7/step_1000",
    "robust-dcp copy s3://bucket/run_7/step_1000 /nvme/run_7/step_1000 --limit 500MB",
    "robust-dcp copy step_1000 s3://bucket/step_1000 --target-option endpoint_url=http://127.0.0.1:9000",
)

_SIZE: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKMGT]?)(?P<binary>i?)[bB]?(?:/s)?")
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def run(
    source: Annotated[str, typer.Argument(help="A checkpoint's directory or URL.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Where to: a directory or a URL of fsspec.", show_default=False)],
    limit: Annotated[
        str | None, typer.Option(help="The most bytes to send in a second, for example 500MB.", show_default="none")
    ] = None,
    threads: Annotated[int, typer.Option(help="How many files are sent at once.", min=1)] = 8,
    retries: Annotated[int, typer.Option(help="How often a call that failed is made once more.", min=0)] = 5,
    read_back: Annotated[
        bool, typer.Option("--read-back", help="Read each file back instead of taking the store's checksum.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Whether to replace a checkpoint at the target.")
    ] = True,
    source_option: Annotated[
        list[str] | None, typer.Option(help="What fsspec passes to the source's store: key=value.")
    ] = None,
    target_option: Annotated[
        list[str] | None, typer.Option(help="What fsspec passes to the target's store: key=value.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint, verify each file at the target, and commit the copy.

    A copy that was cut off goes on if you start it again: what has arrived is not sent once more.
    """
    limit_nbytes = None if limit is None else nbytes_in(limit)
    source_options, target_options = _options(source_option), _options(target_option)
    Output.say(f"Copying {source} to {target}")

    from robust_dcp.drain.one_process import copy_checkpoint
    from robust_dcp.errors import RobustCheckpointError
    from robust_dcp.storage.remote.copy_options import CopyOptions

    options = CopyOptions(
        threads=threads,
        retries=retries,
        limit_bytes_per_second=limit_nbytes,
        verify="read" if read_back else "store",
        overwrite=overwrite,
        source_options=source_options,
        target_options=target_options,
    )
    with Output.progress("copy", 0) as show:
        try:
            copied = copy_checkpoint(source, target, options=options, progress=show)
        except RobustCheckpointError:
            raise
        except ValueError as error:  # of a URL, or of a source and a target that do not go together
            raise CommandFailed(str(error)) from error
    Output.put(
        {
            "source": copied.source,
            "target": copied.target,
            "files": copied.files,
            "nbytes": copied.nbytes,
            "skipped_files": copied.skipped_files,
            "skipped_nbytes": copied.skipped_nbytes,
            "seconds": copied.seconds,
            "retries": copied.retries,
            "verified_by_store": copied.verified_by_store,
            "verified_by_reading": copied.verified_by_reading,
            "renamed": dict(copied.renamed),
            "removed": list(copied.removed),
        }
    )
    rate = size(copied.nbytes / max(copied.seconds, 1e-9))
    Output.say(
        f"Sent {copied.files} files, {size(copied.nbytes)} in {copied.seconds:.1f} s ({rate}/s, {copied.retries} calls "
        f"made once more); {copied.skipped_files} files, {size(copied.skipped_nbytes)} were there already"
    )


def nbytes_in(text: str) -> float:
    """``"500MB"`` -> 500,000,000; ``"1.5GiB"`` -> 1,610,612,736.

    Raises:
        CommandFailed: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    number = 0.0 if found is None else float(found["number"])
    if found is None or number <= 0:
        raise CommandFailed(f"{text!r} is no size: write a number and a unit, for example 500MB or 1GiB")
    return number * float((1024 if found["binary"] else 1000) ** _POWERS[found["unit"]])


def _options(pairs: list[str] | None) -> dict[str, Any]:
    """``["anon=true"]`` -> ``{"anon": True}``. A value that is no JSON is a string."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, is_pair, value = pair.partition("=")
        if not key or not is_pair:
            raise CommandFailed(f"{pair!r} is no option: write key=value, for example anon=true")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
