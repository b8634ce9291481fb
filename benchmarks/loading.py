"""Measures what it costs a rank to plan a load, by ours and by stock's code, in one run on the same checkpoint.

Run it for a table: ``python -m benchmarks.loading --ranks 128 --items 5000 --json loading.json``. The checkpoint is
that of many virtual ranks and has no data. The rank that loads is real. It has DTensors on a mesh of all ranks, and
torch's "fake" process group stands for the others. It reads the metadata, and makes its plan with the code of both
loads. Each contender runs in its own process. CPU seconds are user and system time. Memory is the peak above what the
process had before.

In ``same`` as many ranks load as have saved, so each item is one stored chunk. In ``reshard`` three quarters as many
ranks load a tensor of ``--chunks`` chunks. It is cut along the same dimension, or along the other one, where each rank
needs a part of every chunk. The cost is given for one tensor.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measuring import Row, Stopwatch, in_new_process, show, write_json
from benchmarks.simulation.stored import Shape, tensors_of, write_checkpoint
from robust_dcp import RobustLoadPlanner, RobustReader

__all__ = ["main"]

_MIB = 1 << 20
_SHAPES: Sequence[Shape] = ((3, 16), (1, 16), (4, 16), (1, 64), (2,), (1,))
_RESHARDED: Sequence[Shape] = ((3, 768),)
_TENSORS_RESHARDED = 64
_CASES = ("same", "reshard 0", "reshard 1")

_RATIOS = {
    "case": "case",
    "ranks": "saved by",
    "items": "tensors",
    "cpu_ratio": "CPU time",
    "wall_ratio": "wall time",
    "peak_ratio": "peak memory",
    "read_ratio": "metadata read",
    "planning_ratio": "CPU of planning alone",
}
_COSTS = {
    "case": "case",
    "ranks": "saved by",
    "items": "tensors",
    "who": "who",
    "cpu_seconds": "CPU s",
    "wall_seconds": "wall s",
    "peak_mib": "peak MiB",
    "metadata_seconds": "metadata, CPU s",
    "set_up_seconds": "set up, CPU s",
    "planning_seconds": "planning, CPU s",
    "planning_ms_each": "planning, ms a tensor",
    "places_seconds": "places, CPU s",
    "file_mib": "file MiB",
    "reads": "reads planned",
}


def main() -> None:
    """Measure, and print the ratios and then the figures of each contender."""
    arguments = _arguments()
    rows: list[Row] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory(prefix="loading-", dir=arguments.directory) as directory:
            ranks, shapes, count = arguments.ranks, _SHAPES, arguments.items
            if case != "same":
                ranks, shapes, count = arguments.chunks, _RESHARDED, _TENSORS_RESHARDED
            tensors = tensors_of(count, shapes)
            print(f"{case}: {ranks} ranks x {count} tensors ...", file=sys.stderr)
            write_checkpoint(directory, ranks, tensors)
            contenders = ("ours",) if arguments.no_stock else ("ours", "ours, no index", "stock")
            rows += [in_new_process(measure, who, case, directory, ranks, tensors) for who in contenders]
    ratios = _ratios(rows)
    if ratios:
        print("How many times less ours takes than stock:")
        show(_RATIOS, ratios)
        print()
    show(_COSTS, rows)
    write_json(arguments.json, {"ratios": ratios, "costs": rows})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=128, help="that saved (default: %(default)s)")
    parser.add_argument("--items", type=int, default=5000, help="tensors of each (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=1024, help="of a resharded tensor (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", default=_CASES, choices=_CASES)
    parser.add_argument("--no-stock", action="store_true", help="ours alone, by the index")
    parser.add_argument("--directory", help="where checkpoints lie for the time being")
    parser.add_argument("--json", help="write all figures there as well")
    return parser.parse_args()


def measure(who: str, case: str, directory: str, ranks: int, tensors: dict[str, Shape]) -> Row:
    """Measure how one rank plans a load from ``directory``."""
    loading_ranks = ranks if case == "same" else max(1, ranks * 3 // 4)
    rank = loading_ranks // 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=loading_ranks)
    state_dict = _state_dict(case, rank, ranks, loading_ranks, tensors)
    _warm_up(who)
    watch = Stopwatch()
    watch.start()
    reader: Any = FileSystemReader(directory) if who == "stock" else RobustReader(directory)
    planner = DefaultLoadPlanner() if who == "stock" else RobustLoadPlanner()
    by_file = who == "ours, no index"
    metadata = reader.source.decode_metadata(reader.source.metadata_bytes()) if by_file else reader.read_metadata()
    watch.lap("metadata")
    planner.set_up_planner(state_dict, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, False)
    watch.lap("set up")
    plan = planner.create_local_plan()
    watch.lap("planning")
    plan = reader.prepare_local_plan(plan)  # here ours looks up the place of each item; stock does that when it reads
    watch.lap("places")
    total, laps = watch.total, watch.laps
    name = ".robust_dcp.index" if who == "ours" else ".metadata"
    return {
        "case": case,
        "ranks": ranks,
        "items": len(tensors),
        "who": who,
        "cpu_seconds": total.cpu_seconds,
        "wall_seconds": total.wall_seconds,
        "peak_mib": watch.peak_nbytes / _MIB,
        **{f"{step.replace(' ', '_')}_seconds": cost.cpu_seconds for step, cost in laps.items()},
        "planning_ms_each": 1000 * laps["planning"].cpu_seconds / len(tensors),
        "file_mib": os.path.getsize(os.path.join(directory, name)) / _MIB,
        "reads": len(plan.items),
    }


def _state_dict(case: str, rank: int, ranks: int, loading_ranks: int, tensors: dict[str, Shape]) -> dict[str, Any]:
    """The state dict that a rank loads into: a DTensor for each name, and an object too if nothing is resharded."""
    mesh = init_device_mesh("cpu", (loading_ranks,))
    dim = 1 if case == "reshard 1" else 0

    def one(held: Shape) -> DTensor:
        whole = (held[0] * ranks, *held[1:])
        local = list(whole)
        local[dim] = whole[dim] // loading_ranks
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            torch.empty(local), mesh, [Shard(dim)], run_check=False, shape=torch.Size(whole), stride=stride
        )

    state_dict: dict[str, Any] = {"model": {name: one(held) for name, held in tensors.items()}}
    return state_dict | ({f"rng_state.{rank}": 0} if case == "same" else {})


def _warm_up(who: str) -> None:
    """Plan a small load first, so that one-time work of Python and torch does not count."""
    with tempfile.TemporaryDirectory() as directory:
        tensors = tensors_of(2, _SHAPES)
        world = dist.get_world_size()
        write_checkpoint(directory, world, tensors)
        reader: Any = FileSystemReader(directory) if who == "stock" else RobustReader(directory)
        planner = DefaultLoadPlanner() if who == "stock" else RobustLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(_state_dict("same", dist.get_rank(), world, world, tensors), metadata)
        reader.set_up_storage_reader(metadata, False)
        reader.prepare_local_plan(planner.create_local_plan())


def _ratios(rows: Sequence[Row]) -> list[Row]:
    """The ratios for each case in which both were measured."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["who"]] = row
    keys = {
        "cpu_ratio": "cpu_seconds",
        "wall_ratio": "wall_seconds",
        "peak_ratio": "peak_mib",
        "read_ratio": "metadata_seconds",
        "planning_ratio": "planning_seconds",
    }
    return [
        {
            **{key: both["ours"][key] for key in ("case", "ranks", "items")},
            **{name: both["stock"][key] / max(both["ours"][key], 1e-9) for name, key in keys.items()},
        }
        for both in found.values()
        if "stock" in both
    ]


if __name__ == "__main__":
    main()
