"""Compares whole saves and loads of ours and stock's in one run on ranks of this machine.

Run it for a table: ``python -m benchmarks.bench_save_load --json save_load.json``. Each row is a median over rounds in
which ours and stock's alternate. A ratio says how many times less time, or CPU time on the coordinator, ours takes.
``--many`` measures a state dict of 20,000 small tensors, for which stock takes minutes.
"""

from __future__ import annotations

import argparse
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
_MANY = (20_000, 1024)

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
    """The seconds until all ranks are done, and the CPU seconds of this rank."""
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    call()
    cpu = time.process_time() - cpu_started
    dist.barrier()
    return time.perf_counter() - started, cpu


def measure(directory: str, n_tensors: int, nbytes_each: int, loads: bool) -> dict[str, tuple[float, float]]:
    """Measure one round of one case on this rank. Returns (seconds, CPU seconds) by the name of the measurement.

    Args:
        directory: an empty directory for checkpoints.
        n_tensors: the number of DTensors. Each is sharded over all ranks.
        nbytes_each: the bytes of a rank's shard of each DTensor, a multiple of 1024.
        loads: whether to measure loads too.
    """
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.randn(world_size * (nbytes_each // _ROW_NBYTES), _ROW_NBYTES // 4)
    state_dict = {f"decoder.layers.{n}.weight": distribute_tensor(whole, mesh, [Shard(0)]) for n in range(n_tensors)}
    ours, stock = f"{directory}/ours", f"{directory}/stock"
    caching = dcp.DefaultSavePlanner(enable_plan_caching=True)
    _warm_up(directory)
    PLANS.clear()
    calls: dict[str, Callable[[], Any]] = {
        "first save, ours": lambda: robust_dcp.save(state_dict, checkpoint_id=ours),
        "first save, stock": lambda: dcp.save(state_dict, checkpoint_id=stock),
        "fill stock's plan cache": lambda: dcp.save(state_dict, checkpoint_id=f"{stock}-1", planner=caching),
        "repeated save, ours": lambda: robust_dcp.save(state_dict, checkpoint_id=f"{ours}-2"),
        "repeated save, stock": lambda: dcp.save(state_dict, checkpoint_id=f"{stock}-2", planner=caching),
    }
    if loads:
        calls |= {
            "load, ours": lambda: robust_dcp.load(state_dict, checkpoint_id=ours),
            "load, stock": lambda: dcp.load(state_dict, checkpoint_id=stock),
        }
    return {what: _timed(call) for what, call in calls.items()}


def _warm_up(directory: str) -> None:
    """Make connections and imports, which are not part of a save. The state dict differs, so no plan can help later."""
    small = {"step": torch.zeros(1)}
    dcp.save(small, checkpoint_id=f"{directory}/warm-stock")
    robust_dcp.save(small, checkpoint_id=f"{directory}/warm-ours")


def _rows(world_size: int, case: tuple[int, int], rounds: int, *, loads: bool) -> list[dict[str, Any]]:
    """Run each round in new processes, so that every first save really is a first one."""
    n_tensors, nbytes_each = case
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            found.append(run(world_size, measure, directory, n_tensors, nbytes_each, loads)[0])
    median = {
        what: [statistics.median(column) for column in zip(*(each[what] for each in found), strict=True)]
        for what in found[0]
    }
    pairs = {
        "first save": ("first save, ours", "first save, stock"),
        "repeated save": ("repeated save, ours", "repeated save, stock"),
        # Without a plan cache every save of stock's is like a first one.
        "repeated save, stock without cache": ("repeated save, ours", "first save, stock"),
    }
    if loads:
        pairs["load"] = ("load, ours", "load, stock")
    return [
        {
            "ranks": world_size,
            "tensors": n_tensors,
            "nbytes_each": nbytes_each,
            "what": what,
            "ours_seconds": median[ours][0],
            "stock_seconds": median[stock][0],
            "ratio": median[stock][0] / median[ours][0],
            "ours_cpu_seconds": median[ours][1],
            "stock_cpu_seconds": median[stock][1],
            "cpu_ratio": median[stock][1] / median[ours][1],
        }
        for what, (ours, stock) in pairs.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--case", type=int, nargs=2, action="append", metavar=("TENSORS", "BYTES"), help="tensors, bytes of each shard"
    )
    parser.add_argument(
        "--many", action="store_true", help="20,000 tensors of 1 KiB, saves only, instead: minutes a round"
    )
    parser.add_argument("--json", help="write all rows there as well")
    arguments = parser.parse_args()
    cases = arguments.case or ([_MANY] if arguments.many else [(2000, 1024), (8, 16 << 20)])
    rows = [row for case in cases for row in _rows(arguments.ranks, case, arguments.rounds, loads=not arguments.many)]
    show(_COLUMNS, rows, arguments.json)


if __name__ == "__main__":
    main()
