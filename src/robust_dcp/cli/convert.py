"""Make a checkpoint, the safetensors files of a Hugging Face model, or one file of torch.save.

The target appears when it is whole. If the command is cut off, start it again.

Examples:
  robust-dcp convert checkpoints/step_1000 model --to safetensors --select 'model.*' --rename 'model.*=*'
  robust-dcp convert checkpoints/step_1000 step_1000.pt --to torch
  robust-dcp convert step_1000.pt checkpoints/step_1000 --to dcp --dtype bfloat16 --dtype 'lm_head.*=float32'
  torchrun --nproc-per-node 8 -m robust_dcp.cli convert checkpoints/step_1000 model --to safetensors
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from robust_dcp.cli.arguments import local_path, nbytes_in, pair
from robust_dcp.cli.checkpoint import disk_of
from robust_dcp.cli.output import CommandFailed, Output, number, size


def declare(parser: ArgumentParser) -> None:
    """Add the options."""

    def many(name: str, kind: Callable[[str], Any], help: str) -> None:
        parser.add_argument(name, action="append", default=[], type=kind, help=help)

    parser.add_argument("source", type=local_path, help="A checkpoint, or a file of torch.save.")
    parser.add_argument("target", type=local_path, help="A directory; with --to torch a file.")
    parser.add_argument("--to", choices=("dcp", "safetensors", "torch"), required=True, help="What to make.")
    many("--select", str, "Only items with such names.")
    many("--exclude", str, "No items with such names.")
    many("--rename", pair, "New names: 'model.*=*'. What * stood for is put in. The first that fits counts.")
    many("--dtype", _cast, "Cast floating tensors: bfloat16, or 'lm_head.*=float32'. The last that fits counts.")
    most = "safetensors: the most bytes in a file."
    parser.add_argument("--max-shard-size", type=nbytes_in, default="5GiB", help=most)
    parser.add_argument("--config", type=local_path, help="safetensors: copy config.json and the tokenizer from here.")
    parser.add_argument("--layout", default="torch", help="dcp: of the data files, torch (default) or safetensors.")
    parser.add_argument("--flat", action="store_true", help="torch: one dict by names instead of a nested one.")
    parser.add_argument("--force", action="store_true", help="Replace a target that exists.")


def _cast(text: str) -> tuple[str, str]:
    """``"bfloat16"`` -> ``("*", "bfloat16")``."""
    return pair(text) if "=" in text else ("*", text)


def run(options: Namespace) -> None:
    """Make a checkpoint in another form."""
    try:
        if not os.path.isfile(options.source):
            disk_of(options.source)
        import torch.distributed as dist

        from robust_dcp.conversion import Rules, convert

        rules = Rules(*map(tuple, (options.select, options.exclude, options.rename, options.dtype)))
        n_ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if n_ranks > 1:  # torchrun has started this
            dist.init_process_group("gloo")
        if rank == 0:
            Output.say(f"Converting {options.source}")
        with Output.cleaning_up(), Output.progress("convert", is_shown=rank == 0) as show:
            report = convert(
                options.source,
                options.target,
                form=options.to,
                rules=rules,
                flat=options.flat,
                layout=options.layout,
                max_shard_nbytes=int(options.max_shard_size),
                config=options.config,
                overwrite=options.force,
                progress=show,
                process_group=dist.group.WORLD if n_ranks > 1 else None,
            )
        if n_ranks > 1:
            dist.destroy_process_group()
        if rank > 0:
            return
    except ValueError as error:
        raise CommandFailed(getattr(error, "message", None) or str(error)) from error
    Output.put(asdict(report))
    for name in report.left_out:
        Output.say(f"Left out, because safetensors holds tensors only: {name}")
    Output.say(
        f"Made {report.target}: {number(report.tensors, 'tensor')}, {number(report.objects, 'object')}, "
        f"{size(report.nbytes)}"
    )
