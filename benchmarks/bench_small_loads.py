"""Measures what a load costs for each of many small tensors, ours and stock's, in one run from the page cache.

Run it for a table: ``python -m benchmarks.bench_small_loads --tensors 10000 --bytes 4096 --json small.json``. One
process saves plain tensors, or DTensors on a mesh of one rank. It loads them whole into allocated tensors of the same
kind, by ``robust_dcp.load`` and ``torch.distributed.checkpoint.load`` in turn. Each figure is a median over rounds. CPU
time is that of all threads. If other programs use the machine, the ratio of CPU times says more than that of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import robust_dcp
from benchmarks.ranks import show
from robust_dcp import RobustWriter

__all__ = ["main"]

Row = dict[str, Any]
StateDict = dict[str, torch.Tensor]

_CASES = (("plain", "torch"), ("plain", "safetensors"), ("DTensor", "torch"))
_RATIOS = {"case": "case", "wall": "times less wall time", "cpu": "times less CPU time"}
_COSTS = {
    "case": "case",
    "ours_us": "ours, us each",
    "stock_us": "stock, us each",
    "ours_cpu_us": "ours, CPU us each",
    "stock_cpu_us": "stock, CPU us each",
}


def _state_dict(kind: str, n_tensors: int, nbytes: int, make: Callable[[int], torch.Tensor]) -> StateDict:
    mesh = init_device_mesh("cpu", (1,)) if kind == "DTensor" else None

    def one() -> torch.Tensor:
        local = make(nbytes // 4)
        return local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    return {f"decoder.layers.{number // 10}.part{number % 10}.weight": one() for number in range(n_tensors)}


def _cost(call: Callable[[], Any]) -> tuple[float, float]:
    seconds, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - seconds, time.process_time() - cpu


def _measured(case: tuple[str, str], directory: str, n_tensors: int, nbytes: int, rounds: int) -> Row:
    kind, layout = case
    saved = _state_dict(kind, n_tensors, nbytes, torch.randn)
    robust_dcp.save(dict(saved), storage_writer=RobustWriter(directory, layout=layout))  # type: ignore[arg-type]
    found = _state_dict(kind, n_tensors, nbytes, torch.zeros)
    stock_reader = dcp.FileSystemReader
    if layout == "safetensors":
        stock_reader = dcp.HuggingFaceStorageReader  # type: ignore[assignment]
    loads: dict[str, Callable[[], Any]] = {
        "ours": lambda: robust_dcp.load(dict(found), checkpoint_id=directory),
        "stock": lambda: dcp.load(dict(found), storage_reader=stock_reader(directory)),
    }
    costs: dict[str, list[tuple[float, float]]] = {who: [] for who in loads}
    for number in range(rounds + 1):
        for who, load in loads.items():
            cost = _cost(load)
            if number:  # the first turn does not count, because it allocates the targets' memory
                costs[who].append(cost)
    if not all(torch.equal(found[name], value) for name, value in saved.items()):
        raise AssertionError("what was loaded is not what was saved")
    each = 1e6 / n_tensors
    wall = {who: statistics.median(cost[0] for cost in of_it) * each for who, of_it in costs.items()}
    cpu = {who: statistics.median(cost[1] for cost in of_it) * each for who, of_it in costs.items()}
    return {
        "case": f"{n_tensors} {kind} tensors of {nbytes} bytes, {layout}",
        "wall": round(wall["stock"] / wall["ours"], 1),
        "cpu": round(cpu["stock"] / cpu["ours"], 1),
        **{f"{who}_us": round(wall[who], 1) for who in wall},
        **{f"{who}_cpu_us": round(cpu[who], 1) for who in cpu},
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark with these command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where the checkpoint is made")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for case in _CASES:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            rows.append(_measured(case, directory, options.tensors, options.bytes, options.rounds))
    dist.destroy_process_group()
    show(_RATIOS, rows, None)
    show(_COSTS, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
