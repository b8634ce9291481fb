"""Whole saves and loads, ours and stock's side by side in one run, on ranks of this machine.

Run it for a table: ``python -m benchmarks.bench_save_load --json save_load.json``. Each row is a median over rounds in
which ours and stock's alternate; ratios say how many times less time, or CPU time on the coordinator, ours takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import robust_dcp
from benchmarks.ranks import run, show
from robust_dcp.plan.cache import PLANS

__all__ = ["measure"]

_ROW_NBYTES = 1024

_COLUMNS = {
    "ranks": "ranks",
    "tensors": "tensors",
    "nbytes_each": "bytes each",
    "what": "what",
    "ours_seconds": "ours s",
    "stock_seconds": "stock s",
    "ratio": "ratio",
    "ours_cpu_seconds": "ours CPU s",
    "stock_cpu_seconds": "stock CPU s",
    "cpu_ratio": "ratio",
}


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until all ranks are done, and CPU seconds of this rank."""
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    call()
    cpu = time.process_time() - cpu_started
    dist.barrier()
    return time.perf_counter() - started, cpu


def measure(directory: str, n_tensors: int, nbytes_each: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Times of one case on this rank: what is measured, to (seconds, CPU seconds) of each round.

    Args:
        n_tensors: DTensors, each sharded over all ranks.
        nbytes_each: bytes of a rank's shard of each, a multiple of 1024.
    """
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.randn(world_size * (nbytes_each // _ROW_NBYTES), _ROW_NBYTES // 4)
    state_dict = {f"decoder.layers.{n}.weight": distribute_tensor(whole, mesh, [Shard(0)]) for n in range(n_tensors)}
    caching = dcp.DefaultSavePlanner(enable_plan_caching=True)
    found: dict[str, list[tuple[float, float]]] = {}
    for round_ in range(rounds):
        ours, stock = f"{directory}/ours-{round_}", f"{directory}/stock-{round_}"
        PLANS.clear()
        calls: dict[str, Callable[[], Any]] = {
            "first save, ours": lambda: robust_dcp.save(state_dict, checkpoint_id=ours),  # noqa: B023
            "first save, stock": lambda: dcp.save(state_dict, checkpoint_id=stock),  # noqa: B023
            "repeated save, ours": lambda: robust_dcp.save(state_dict, checkpoint_id=f"{ours}-2"),  # noqa: B023
            "repeated save, stock": lambda: dcp.save(state_dict, checkpoint_id=f"{stock}-2", planner=caching),  # noqa: B023
            "load, ours": lambda: robust_dcp.load(state_dict, checkpoint_id=ours),  # noqa: B023
            "load, stock": lambda: dcp.load(state_dict, checkpoint_id=stock),  # noqa: B023
        }
        if round_ == 0:
            dcp.save(state_dict, checkpoint_id=f"{stock}-0", planner=caching)  # fills stock's plan cache
        for what, call in calls.items():
            found.setdefault(what, []).append(_timed(call))
        dist.barrier()
        if dist.get_rank() == 0:
            for name in os.listdir(directory):
                shutil.rmtree(os.path.join(directory, name))
        dist.barrier()
    return found


def _rows(world_size: int, n_tensors: int, nbytes_each: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        coordinator = run(world_size, measure, directory, n_tensors, nbytes_each, rounds)[0]
    median = {
        what: [statistics.median(column) for column in zip(*times, strict=True)] for what, times in coordinator.items()
    }
    return [
        {
            "ranks": world_size,
            "tensors": n_tensors,
            "nbytes_each": nbytes_each,
            "what": what,
            "ours_seconds": median[f"{what}, ours"][0],
            "stock_seconds": median[f"{what}, stock"][0],
            "ratio": median[f"{what}, stock"][0] / median[f"{what}, ours"][0],
            "ours_cpu_seconds": median[f"{what}, ours"][1],
            "stock_cpu_seconds": median[f"{what}, stock"][1],
            "cpu_ratio": median[f"{what}, stock"][1] / median[f"{what}, ours"][1],
        }
        for what in ("first save", "repeated save", "load")
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--case", type=int, nargs=2, action="append", metavar=("TENSORS", "BYTES"), help="tensors, bytes of each shard"
    )
    parser.add_argument("--json", help="write all rows there as well")
    arguments = parser.parse_args()
    cases = arguments.case or [(2000, 1024), (8, 16 << 20)]
    rows = [row for case in cases for row in _rows(arguments.ranks, *case, arguments.rounds)]
    show(_COLUMNS, rows, arguments.json)


if __name__ == "__main__":
    main()
