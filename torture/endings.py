"""Processes that end as Python does, after one of them was killed: ``python -m torture.endings --trials 200 --seed 1``.

In each trial 3 to 5 processes save, and one of them is killed by SIGKILL: before the first save, between two saves, or
while it writes. The others get an exception, which some catch and some do not, and run to the end of Python with all
its exit handlers. Each has to end with exit code 1, and none by a signal. Rank 0 hosts the store.

The processes are forked from this one, which has imported torch and started no thread.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import robust_dcp
import robust_dcp.api  # here, and not in each rank anew: that takes longer than all else in a trial
from tests.promises.programs import free_port
from torture.trials import Result, Trial, main

WHEN = ("before the first save", "between two saves", "while it writes")
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Ending:
    """What happens: ``victim`` is killed ``when``; the others catch what the save raises, or do not."""

    seed: int
    size: int
    victim: int
    when: str
    is_caught: bool


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """One trial for each seed."""
    for number in range(seed, seed + n_trials):
        rng = random.Random(f"ending {number}")
        size = rng.randint(3, 5)
        ending = Ending(number, size, rng.randrange(size), rng.choice(WHEN), rng.random() < 0.5)
        yield Trial(ending.when, ending, partial(_run, ending))


def _run(ending: Ending) -> Result:
    directory = tempfile.mkdtemp(prefix="endings-")  # the ranks must not remove it when they end
    codes = _exit_codes(ending, directory)
    expected = {rank: -signal.SIGKILL if rank == ending.victim else 1 for rank in range(ending.size)}
    complaints = []
    if codes != expected:
        outputs = [f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(Path(directory).glob("rank*.txt"))]
        complaints = [f"exit codes {codes}", *outputs]
    shutil.rmtree(directory)
    return Result(complaints, verdict="ended with exit code 1" if not complaints else "")


def _exit_codes(ending: Ending, directory: str) -> dict[int, int]:
    """The exit code of each rank; a signal is negative. A rank that takes too long gets SIGABRT.

    In a rank this raises what ends the process.
    """
    port, pids = free_port(), []
    for rank in range(ending.size):
        pid = os.fork()
        if pid == 0:
            _be_rank(ending, rank, port, directory)
            raise SystemExit("no rank was lost")
        pids.append(pid)
    codes: dict[int, int] = {}
    until = time.monotonic() + _LIMIT_SECONDS
    while len(codes) < ending.size:
        for rank, pid in enumerate(pids):
            ended, status = os.waitpid(pid, os.WNOHANG) if rank not in codes else (0, 0)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
            elif rank not in codes and time.monotonic() > until:
                print(f"seed {ending.seed}: rank {rank} still runs after {_LIMIT_SECONDS:g} seconds", flush=True)
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.02)
    return codes


def _be_rank(ending: Ending, rank: int, port: int, directory: str) -> None:
    output = os.open(f"{directory}/rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    store = dist.TCPStore("127.0.0.1", port, ending.size, is_master=rank == 0, timeout=datetime.timedelta(seconds=40))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ending.size)
    dist.barrier()

    def die(event: object = None) -> None:
        if rank == ending.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    # Whoever dies before the first save is missed at the timeout only.
    timeout_seconds = 4.0 if ending.when == WHEN[0] else 60.0

    def save(step: int) -> None:
        state = {f"own{rank}": torch.full((100_000,), float(step)), "shared": torch.ones(10)}
        robust_dcp.save(state, checkpoint_id=f"{directory}/{step}", timeout_seconds=timeout_seconds)

    try:
        if ending.when == WHEN[0]:
            die()
        save(1)
        if ending.when == WHEN[1]:
            die()
        robust_dcp.on_event(lambda event: die() if event.name == "progress" else None)
        save(2)
    except robust_dcp.ExchangeError:
        if ending.is_caught:
            sys.exit(1)
        raise


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=200))
