"""Compares loads of replicas in which each rank reads for itself with loads in which the ranks share reads.

``python -m benchmarks.bench_shared_reads --path /data --json shared.json``. The figures are medians over rounds in
which both alternate. "cold" means that the files are not in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from benchmarks.drive.measurement import evict
from benchmarks.ranks import run, show

__all__ = ["measure"]

_COLUMNS = {
    "ranks": "ranks",
    "items": "items",
    "nbytes_each": "bytes each",
    "cold": "cold",
    "shared": "reads",
    "seconds": "s",
    "cpu_seconds": "CPU s",
    "messages": "messages",
}


def measure(directory: str, n_items: int, nbytes_each: int, rounds: int) -> list[dict[str, Any]]:
    """Measure each way to load the checkpoint in ``directory``, and return a row for each. All ranks call it."""
    targets = {f"item.{number}": torch.zeros(nbytes_each // 4) for number in range(n_items)}
    found: dict[tuple[bool, bool], list[tuple[float, float, int]]] = defaultdict(list)
    for _ in range(rounds):
        for shared in (False, True):
            for cold in (True, False):
                if cold and dist.get_rank() == 0:
                    evict(directory)
                dist.barrier()
                started, cpu_started = time.perf_counter(), time.process_time()
                reader = robust_dcp.RobustReader(directory, share_reads=shared)
                report = robust_dcp.load(targets, storage_reader=reader)
                messages = sum(phase.messages for phase in report.phases)
                seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
                found[shared, cold].append((seconds, cpu_seconds, messages))
    return [
        {
            "ranks": dist.get_world_size(),
            "items": n_items,
            "nbytes_each": nbytes_each,
            "cold": "yes" if cold else "no",
            "shared": "shared" if shared else "by each",
            "seconds": statistics.median(each[0] for each in rows),
            "cpu_seconds": statistics.median(each[1] for each in rows),
            "messages": rows[-1][2],
        }
        for (shared, cold), rows in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for n_items, nbytes_each in ((8, 64 << 20), (5000, 16 << 10)):
        directory = tempfile.mkdtemp(prefix="shared-reads-", dir=options.path)
        try:
            state_dict = {f"item.{number}": torch.ones(nbytes_each // 4) for number in range(n_items)}
            robust_dcp.save(state_dict, checkpoint_id=directory, no_dist=True)
            rows += run(options.ranks, measure, directory, n_items, nbytes_each, options.rounds)[0]
        finally:
            shutil.rmtree(directory)
    show(_COLUMNS, rows, options.json)


if __name__ == "__main__":
    main()
