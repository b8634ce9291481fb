"""Runs a function on ranks for benchmarks, which are processes of this machine in a gloo group, and prints tables."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run", "show"]


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on each of ``world_size`` ranks. Returns the results in rank order.

    Raises:
        EOFError: a rank ended without a result. Its output says why.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_be_rank, args=(rank, world_size, directory, function, args, pipes[rank][1]))
            for rank in range(world_size)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # if a rank ends without a result, this raises EOFError instead of waiting for ever
        results = [receiver.recv() for receiver, _ in pipes]
        for process in processes:
            process.join()
    return results


def _be_rank(
    rank: int,
    world_size: int,
    directory: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    results: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=600),
    )
    results.send(function(*args))
    dist.barrier()
    dist.destroy_process_group()


def _table(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """Format ``rows`` as a table, right-aligned under the titles in ``columns`` (key to title). Floats get 3 digits."""
    lines = [list(columns.values())]
    lines += [[f"{row[key]:.3f}" if isinstance(row[key], float) else f"{row[key]}" for key in columns] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def show(columns: dict[str, str], rows: Sequence[dict[str, Any]], json_path: str | None) -> None:
    """Print ``rows`` as a table, and write all of them to ``json_path`` if there is one."""
    print(_table(columns, rows))
    if json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
