"""Async saves without a pause, and what they leave behind: ``python -m torture.back_to_back --trials 8 --seed 1``.

In each trial two ranks save a state that grows and shrinks into one of two directories in turn, 300 times in one way:
by a thread or a process, one or two saves under way. After each quarter all saves are waited for and everything is
counted: memory, shared memory, open files, threads, processes, and files that are no part of a checkpoint. What is
counted must be the same after the last quarter as after the first, memory but for a few MiB.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp.staging.staging_buffers import SHARED_STAGING, STAGING
from robust_dcp.structure_cache import clear_caches
from tests.harness.ranks import run_ranks, values
from torture.generations import child_pids, files_not_named, writer_pids
from torture.trials import Result, Trial, main

__all__ = ["judge"]

_N_RANKS = 2
_N_QUARTERS = 4
_MEMORY_MIB = 24
"""What memory may differ by: allocators keep some of what was freed, and the state that was saved last varies."""


_ROOM_MIB = dict.fromkeys(("memory", "memory of the writer", "shared memory"), _MEMORY_MIB)


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """All ways in turn."""
    ways = list(product(("thread", "process"), (1, 2)))
    for number in range(seed - 1, seed - 1 + n_trials):
        executor, max_in_flight = ways[number % len(ways)]
        options = {"executor": executor, "max_in_flight": max_in_flight}
        kind = f"{executor}, {max_in_flight} in flight"
        yield Trial(kind, f"seed {number}", partial(judge, options, 300, number))


def judge(options: dict[str, Any], n_saves: int, seed: int) -> Result:
    """Save, count after each quarter, and say what is more after the last than after the first."""
    with tempfile.TemporaryDirectory(prefix="back-to-back-") as directory:
        timeout_seconds = 300 + 5.0 * n_saves
        counts = values(
            run_ranks(_N_RANKS, _be_rank, options, n_saves, seed, directory, timeout_seconds=timeout_seconds)
        )[0]
    first, last = counts[0], counts[-1]
    grown = {name: (first[name], last[name]) for name in first if last[name] > first[name] + _ROOM_MIB.get(name, 0)}
    complaints = [f"{name}: {before}, then {after}" for name, (before, after) in grown.items()]
    if last["files left behind"]:
        complaints.append(f"{last['files left behind']} files are no part of a checkpoint")
    return Result(complaints)


def _be_rank(options: dict[str, Any], n_saves: int, seed: int, directory: str) -> list[dict[str, int]]:
    rng = random.Random(f"back to back {seed}")  # the same on all ranks
    counts = []
    for quarter in range(_N_QUARTERS):
        n_first, n_end = quarter * n_saves // _N_QUARTERS, (quarter + 1) * n_saves // _N_QUARTERS
        futures = []
        for number in range(n_first, n_end):
            futures.append(robust_dcp.async_save(_state(rng), checkpoint_id=f"{directory}/{number % 2}", **options))
            if len(futures) == 20 or number == n_end - 1:  # their reports are not to be counted
                for each in futures:
                    each.result()
                futures.clear()
        dist.barrier()
        counts.append(_count(directory))
        dist.barrier()
    return counts


def _state(rng: random.Random) -> dict[str, Any]:
    """Another one each time: it has more or fewer tensors, and larger or smaller ones."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"replicated": torch.ones(rng.randrange(1, 1 << 19)), "step": rng.random()}
    for number in range(rng.randrange(1, 60)):
        state[f"{rank}.{number}"] = torch.ones(rng.randrange(1, 1 << rng.randrange(4, 19)))
    return state


def _count(directory: str) -> dict[str, int]:
    """What there is on this rank and in its writer while no save is under way. Memory is in MiB."""
    for thread in threading.enumerate():
        if thread.name in ("robust_dcp: beats", "robust_dcp: gloo"):  # they end soon after the last exchange
            thread.join()
    STAGING.release()  # of a size that depends on the last saves
    SHARED_STAGING.release()
    clear_caches()  # it has a limit, and keeps the plans of some hundred structures until then
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    writers = writer_pids()
    pids = [os.getpid(), *writers]
    return {
        "memory": _mib(os.getpid(), "RssAnon") + _mib(os.getpid(), "RssFile"),
        "memory of the writer": sum(_mib(pid, "RssAnon") + _mib(pid, "RssFile") for pid in writers),
        "shared memory": sum(_mib(pid, "RssShmem") for pid in pids),
        "open files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        # One that has ended may be there for a moment.
        "threads": min(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids) for _ in _pauses()),
        "processes": len(child_pids()),
        "files left behind": sum(len(files_not_named(f"{directory}/{name}")) for name in os.listdir(directory)),
    }


def _pauses() -> Iterator[None]:
    for _ in range(20):
        time.sleep(0.02)
        yield


def _mib(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) >> 10


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=8))
