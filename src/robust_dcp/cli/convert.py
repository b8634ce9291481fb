"""``robust-dcp convert``: a checkpoint in another form."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Final, Literal

from robust_dcp.cli.checkpoint import open_checkpoint, summary
from robust_dcp.cli.output import CommandFailed, Output, number, size
from robust_dcp.conversion.rules import Rules

__all__ = ["run"]

_MEMORY_NBYTES: Final = 64 << 20


def run(
    source: str,
    target: str,
    *,
    to: Literal["dcp", "safetensors", "torch"],
    select: list[str],
    exclude: list[str],
    rename: list[tuple[str, str]],
    dtype: list[tuple[str, str]],
    max_shard_size: float,
    config: str | None,
    layout: str,
    files: int,
    flat: bool,
    force: bool,
) -> None:
    """Make a checkpoint in another form."""
    try:
        rules = Rules(tuple(select), tuple(exclude), tuple(rename), tuple(dtype))
        if os.path.isfile(source):
            Output.say(f"{source}: a file of {size(os.path.getsize(source))}")
        else:
            Output.say(summary(open_checkpoint(source)))

        from robust_dcp.conversion.convert import convert

        with Output.progress("convert", 0) as show:
            report = convert(
                source,
                target,
                form=to,
                rules=rules,
                flat=flat,
                layout=layout,
                files=files,
                max_shard_nbytes=int(max_shard_size),
                config=config,
                overwrite=force,
                buffer_nbytes=_MEMORY_NBYTES,
                progress=show,
            )
    except ValueError as error:
        raise CommandFailed(getattr(error, "message", None) or str(error)) from error
    Output.put(asdict(report))
    for name in report.left_out:
        Output.say(f"Left out, because safetensors holds tensors only: {name}")
    for glob in report.unused:
        Output.note(f"No item has a name that fits {glob}")
    there = f", {number(report.files_there, 'file')} of an earlier call kept" if report.files_there else ""
    Output.say(
        f"Made {report.target}: {number(report.tensors, 'tensor')}, {number(report.objects, 'object')}, "
        f"{size(report.nbytes)}{there}"
    )
