"""``robust-dcp copy``: a checkpoint to another directory or to an object store, and back."""

from __future__ import annotations

from typing import Any

from robust_dcp.cli.output import CommandFailed, Output, size

__all__ = ["run"]


def run(
    source: str,
    target: str,
    *,
    limit: float | None,
    threads: int,
    retries: int,
    read_back: bool,
    source_option: list[tuple[str, Any]],
    target_option: list[tuple[str, Any]],
) -> None:
    """Copy a checkpoint."""
    Output.say(f"Copying {source} to {target}")

    from robust_dcp.drain.copy import copy_checkpoint
    from robust_dcp.errors import RobustCheckpointError
    from robust_dcp.storage.remote.store import CopyOptions

    options = CopyOptions(
        threads=threads,
        retries=retries,
        limit_bytes_per_second=limit,
        verify="read" if read_back else "store",
        source_options=dict(source_option),
        target_options=dict(target_option),
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
        }
    )
    rate = size(copied.nbytes / max(copied.seconds, 1e-9))
    Output.say(
        f"Sent {copied.files} files, {size(copied.nbytes)} in {copied.seconds:.1f} s ({rate}/s, {copied.retries} calls "
        f"made once more); {copied.skipped_files} files, {size(copied.skipped_nbytes)} were there already"
    )
