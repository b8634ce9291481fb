"""Measures the CPU time of a repeated save of many ShardedTensors on one rank, and in which functions it goes.

Run it for a table: ``python -m benchmarks.bench_megatron_repeat --json repeat.json`` (about half a minute). Two ranks
each hold ``--tensors`` small ShardedTensors with names like Megatron's. ``dist_checkpointing.save`` saves them with
robust_dcp as the planner. Megatron makes new ShardedTensors for every save, and so does this benchmark. That part is
not counted. ``--profile`` prints the functions in which one rank's last save spends its time, from cProfile. The
profiler slows down each call, so only compare its seconds with each other.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import os
import pstats
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import run, show

__all__ = ["measure"]

_COLUMNS = {"what": "what", "plan": "plan", "cpu_seconds": "CPU s", "seconds": "seconds", "us_per_tensor": "us/tensor"}
_RANKS = 2
_SAVES = 5


def _state(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """A state dict like that of ``model.sharded_state_dict()`` and the optimizer's. A layer has 40 tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {}
    for number, tensor in enumerate(tensors):
        layer = state.setdefault(f"decoder.layers.{number // 40}", {})
        key = f"decoder.layers.{number // 40}.mlp.experts.local_experts.{number % 40}.linear_fc1.weight"
        if number % 4:
            layer[key] = ShardedTensor.from_rank_offsets(key, tensor, (0, rank, size), replica_id=(0, 0, 0))
        else:
            layer[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=(0, 0, rank))
    return {"model": state, "iteration": 1}


def measure(directory: str, n_tensors: int, profile: bool) -> tuple[list[dict[str, Any]], str]:
    """Measure one run on this rank. Returns its rows, and the profile of the last save."""
    from megatron.core import dist_checkpointing

    import robust_dcp.megatron

    robust_dcp.megatron.install()
    tensors = [torch.full((4, 4), float(number)) for number in range(n_tensors)]
    rows = []
    profiler = cProfile.Profile()
    for number in range(1, _SAVES + 1):
        path = f"{directory}/{number}"
        if dist.get_rank() == 0:
            os.mkdir(path)
        strategy = _strategy()
        state = _state(tensors)
        gc.collect()  # garbage from making the state dict must not count for the save
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        if profile and number == _SAVES:
            profiler.runcall(dist_checkpointing.save, state, path, strategy)
        else:
            dist_checkpointing.save(state, path, strategy)
        cpu_seconds = time.process_time() - cpu_started
        rows.append(
            {
                "what": f"save {number}",
                "plan": strategy.last_report.plan,
                "cpu_seconds": cpu_seconds,
                "seconds": time.perf_counter() - started,
                "us_per_tensor": 1e6 * cpu_seconds / n_tensors,
            }
        )
    text = io.StringIO()
    if profile:
        pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(45)
    robust_dcp.megatron.uninstall()
    return rows, text.getvalue()


def _strategy() -> Any:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return TorchDistSaveShardedStrategy("torch_dist", 1)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true", help="print where the last save spends its time on rank 0")
    parser.add_argument("--json", help="write the rows to this file as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ranks = run(_RANKS, measure, directory, arguments.tensors, arguments.profile)
    rows = [
        {**row, "what": f"rank {rank}, {row['what']}"} for rank, (of_rank, _) in enumerate(ranks) for row in of_rank
    ]
    show(_COLUMNS, rows, arguments.json)
    print(ranks[0][1], end="")


if __name__ == "__main__":
    _main()
