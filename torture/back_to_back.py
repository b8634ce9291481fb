"""Async saves without a pause, and what they leave behind: ``python -m torture.back_to_back --saves 300 --seed 1``.

Two ranks save a state that grows and shrinks into one of two directories in turn, 300 times for each way of saving: by
a thread or a process, with one or two saves under way, ``when_busy`` ``"wait"`` and ``"skip"``. After each quarter all
saves are waited for and everything is counted: memory, shared memory, open files, threads, processes, and files that
are no part of a checkpoint. What is counted must be the same after the last quarter as after the first, memory but for
a few MiB. Prints the table; ends with 1 if anything has grown.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import sys
import tempfile
from dataclasses import astuple, dataclass, fields
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

__all__ = ["WAYS", "Counts", "Way", "grown", "run_way"]

_N_RANKS = 2
_N_QUARTERS = 4
_MEMORY_MIB = 24
"""What memory may differ by: allocators keep some of what was freed, and the state that was saved last varies."""


@dataclass(frozen=True)
class Way:
    """How is saved."""

    executor: str
    max_in_flight: int
    when_busy: str

    def __str__(self) -> str:
        return f"{self.executor}, {self.max_in_flight} in flight, {self.when_busy}"


WAYS = tuple(Way(*way) for way in product(("thread", "process"), (1, 2), ("wait", "skip")))


@dataclass(frozen=True)
class Counts:
    """What there is on rank 0 while no save is under way. Memory is in MiB, of this process and of its writer."""

    committed: int
    skipped: int
    rss: int
    writer_rss: int
    shared: int
    files: int
    threads: int
    processes: int
    left_behind: int


def run_way(way: Way, n_saves: int, seed: int) -> list[Counts]:
    """Save, and count after each quarter."""
    with tempfile.TemporaryDirectory(prefix="back-to-back-") as directory:
        timeout_seconds = 300 + 5.0 * n_saves
        outcomes = run_ranks(_N_RANKS, _be_rank, way, n_saves, seed, directory, timeout_seconds=timeout_seconds)
        counts: list[Counts] = values(outcomes)[0]
        return counts


def grown(counts: list[Counts]) -> list[str]:
    """What is more after the last quarter than after the first."""
    first, last = counts[0], counts[-1]
    room = dict.fromkeys(("rss", "writer_rss", "shared"), _MEMORY_MIB) | dict.fromkeys(
        ("files", "threads", "processes"), 0
    )
    found = [
        f"{name}: {getattr(first, name)}, then {getattr(last, name)}"
        for name, more in room.items()
        if getattr(last, name) > getattr(first, name) + more
    ]
    if last.left_behind:
        found.append(f"{last.left_behind} files are no part of a checkpoint")
    return found


def _be_rank(way: Way, n_saves: int, seed: int, directory: str) -> list[Counts]:
    rng = random.Random(f"back to back {seed}")  # the same on all ranks
    counts = []
    committed = skipped = n_taken = 0
    for quarter in range(_N_QUARTERS):
        n_first, n_end = quarter * n_saves // _N_QUARTERS, (quarter + 1) * n_saves // _N_QUARTERS
        futures = []
        for number in range(n_first, n_end):
            future = robust_dcp.async_save(
                _state(rng),
                checkpoint_id=f"{directory}/{n_taken % 2}",
                executor=way.executor,  # type: ignore[arg-type]
                max_in_flight=way.max_in_flight,
                when_busy=way.when_busy,  # type: ignore[arg-type]
            )
            futures.append(future)
            n_taken += not (future.done() and future.result() is None)
            if len(futures) == 20 or number == n_end - 1:  # their reports are not to be counted
                reports: list[Any] = [future.result(timeout=120) for future in futures]
                committed += sum(report is not None for report in reports)
                skipped += sum(report is None for report in reports)
                futures.clear()
        dist.barrier()
        counts.append(_count(committed, skipped, directory))
        dist.barrier()
    return counts


def _state(rng: random.Random) -> dict[str, Any]:
    """Another one each time: it has more or fewer tensors, and larger or smaller ones."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"replicated": torch.ones(rng.randrange(1, 1 << 19)), "step": rng.random()}
    for number in range(rng.randrange(1, 60)):
        state[f"{rank}.{number}"] = torch.ones(rng.randrange(1, 1 << rng.randrange(4, 19)))
    return state


def _count(committed: int, skipped: int, directory: str) -> Counts:
    STAGING.release()  # of a size that depends on the last saves
    SHARED_STAGING.release()
    clear_caches()  # it has a limit, and keeps the plans of some hundred structures until then
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    children, writers = child_pids(), writer_pids()
    names = os.listdir(directory)
    return Counts(
        committed=committed,
        skipped=skipped,
        rss=_mib(os.getpid(), "RssAnon") + _mib(os.getpid(), "RssFile"),
        writer_rss=sum(_mib(pid, "RssAnon") + _mib(pid, "RssFile") for pid in writers),
        shared=sum(_mib(pid, "RssShmem") for pid in [os.getpid(), *writers]),
        files=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *writers]),
        threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in [os.getpid(), *writers]),
        processes=len(children),
        left_behind=sum(len(files_not_named(f"{directory}/{name}")) for name in names),
    )


def _mib(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) >> 10


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{'after the first quarter, after the last':34}", *(f"{field.name:>13}" for field in fields(Counts)))
    has_grown = False
    for way in WAYS:
        counts = run_way(way, arguments.saves, arguments.seed)
        changes = (f"{a}, {b}" for a, b in zip(astuple(counts[0]), astuple(counts[-1]), strict=True))
        print(f"{way!s:34}", *(f"{change:>13}" for change in changes), flush=True)
        for words in grown(counts):
            has_grown = True
            print(f"  has grown: {words}", flush=True)
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())
