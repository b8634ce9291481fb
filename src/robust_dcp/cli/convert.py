"""``robust-dcp convert``: a checkpoint in another form."""

from __future__ import annotations

import os
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Final

import typer

from robust_dcp.cli.checkpoint import local_path, open_checkpoint, summary
from robust_dcp.cli.copy import nbytes_in
from robust_dcp.cli.output import CommandFailed, Json, Output, number, size
from robust_dcp.conversion.rules import Rules

__all__ = ["EXAMPLES", "run"]

EXAMPLES: Final = (
    "robust-dcp convert checkpoints/step_1000 model --to safetensors --select 'model.*' --rename 'model.*=*'",
    "robust-dcp convert checkpoints/step_1000 step_1000.pt --to torch",
    "robust-dcp convert step_1000.pt checkpoints/step_1000 --to dcp --dtype bfloat16 --dtype 'lm_head.*=float32'",
)

_MEMORY_NBYTES: Final = 64 << 20


class Form(str, Enum):
    """What to make."""

    dcp = "dcp"
    safetensors = "safetensors"
    torch = "torch"


def run(
    source: Annotated[
        str, typer.Argument(help="A checkpoint, or a file of torch.save.", callback=local_path, show_default=False)
    ],
    target: Annotated[
        str, typer.Argument(help="A directory; with --to torch a file.", callback=local_path, show_default=False)
    ],
    to: Annotated[Form, typer.Option(help="What to make.", show_default=False)],
    select: Annotated[list[str] | None, typer.Option(help="Only items with such names.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No items with such names.")] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="New names: 'model.*=*'. What * stood for is put in. The first that fits counts."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Cast floating tensors: bfloat16, or 'lm_head.*=float32'. The last that fits counts."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="safetensors: the most bytes of tensors in a file.")] = "5GiB",
    layout: Annotated[str, typer.Option(help="dcp: of the data files, torch or safetensors.")] = "torch",
    files: Annotated[int, typer.Option(help="dcp: how many data files.", min=1)] = 1,
    flat: Annotated[bool, typer.Option("--flat", help="torch: one dict by names instead of a nested one.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a target that exists.")] = False,
    as_json: Json = False,
) -> None:
    """Make a checkpoint, the safetensors files of a Hugging Face model, or one file of torch.save.

    Tensors pass through memory in pieces. The target appears when it is whole. If the command is cut off, start it
    again: finished files of safetensors are kept, and the other forms begin anew.
    """
    try:
        rules = Rules(
            tuple(select or ()),
            tuple(exclude or ()),
            tuple(_pair(each, "--rename") for each in rename or ()),
            tuple(_pair(each, "--dtype") if "=" in each else ("*", each) for each in dtype or ()),
        )
        max_shard_nbytes = int(nbytes_in(max_shard_size))
        if os.path.isfile(source):
            Output.say(f"{source}: a file of {size(os.path.getsize(source))}")
        else:
            Output.say(summary(open_checkpoint(source)))

        from robust_dcp.conversion.convert import convert

        with Output.progress("convert", 0) as show:
            report = convert(
                source,
                target,
                form=to.value,
                rules=rules,
                flat=flat,
                layout=layout,
                files=files,
                max_shard_nbytes=max_shard_nbytes,
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


def _pair(text: str, option: str) -> tuple[str, str]:
    left, is_pair, right = text.partition("=")
    if not is_pair or not left or not right:
        raise CommandFailed(f"{option} {text}: write two sides with = between them, for example 'model.*=*'")
    return left, right
