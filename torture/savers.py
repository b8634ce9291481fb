"""Lets two jobs save into one directory: ``python -m torture.savers --trials 300 --seed 1``.

In each round two processes save different values under the same names. Our writer runs with locks or without them, as
on many network file systems. The second process may use stock's writer. Either both start at the same time, or one is
stopped (SIGSTOP) before a random call to its disk and goes on when the other has ended. Then a third process loads. The
load must not fail. It must give the whole checkpoint of a job that was told that it has saved, or the checkpoint that
was there before.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustReader, RobustWriter
from tests.faults.disk import CHANGES, Call, FaultDisk
from tests.harness.ranks import RanksOverran, run_ranks
from tests.support.waiting import wait_until
from torture.generations import is_stopped
from torture.trials import Result, Trial, main

HOW = ("ours", "ours without locks", "stock")
_COUNTED = CHANGES | {"open", "lock", "read"}
_MOST_CALLS = 60
_NUMELS = (10, 300_000, 700_000)


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        exists: whether the directory has a checkpoint before the round.
        jobs: how each of the two jobs saves.
        stop_at: the first job is stopped before this call to its disk until the second has ended. With ``None`` both
            run at the same time.
    """

    seed: int
    exists: bool
    jobs: tuple[str, str]
    stop_at: int | None


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """One round for each seed."""
    for number in range(seed * 1_000_000, seed * 1_000_000 + n_trials):
        rng = random.Random(f"savers {number}")
        first, second = rng.choice(HOW[:2]), rng.choice(HOW)
        stop_at = rng.randrange(_MOST_CALLS) if rng.random() < 0.6 else None
        made = Round(number, rng.random() < 0.5, (first, second), stop_at)
        yield Trial("at once" if stop_at is None else "stopped", made, partial(_run, made))


def _run(made: Round) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "checkpoint")
        told = {}
        if made.exists:
            robust_dcp.save(_state(0), checkpoint_id=path, no_dist=True)
            told[0] = "saved"
        try:
            told |= {outcome.rank + 1: outcome.value for outcome in run_ranks(2, _be_job, made, path)}
        except RanksOverran as error:
            return Result([f"unexpected: they did not end: {error!s:.3000}"])
        (loaded,) = run_ranks(1, _load, path)
        return Result(_complaints(told, loaded.value))


def _be_job(made: Round, path: str) -> str:
    """Each rank is a job of its own; the second one waits until the first one stands still or has ended."""
    stands, rank = Path(f"{path}.stands"), dist.get_rank()
    if rank == 0:
        told = _save(made.jobs[0], 1, path, made.stop_at, stands)
        stands.touch()
        return told
    if made.stop_at is not None:
        wait_until(lambda: stands.exists() and (not (pid := stands.read_text()) or is_stopped(int(pid))), 60.0)
    told = _save(made.jobs[1], 2, path, None, stands)
    if made.stop_at is not None and (pid := stands.read_text()):
        os.kill(int(pid), signal.SIGCONT)
    return told


def _complaints(told: dict[int, str], found: int | str) -> list[str]:
    saved = {step for step, words in told.items() if words == "saved"}
    complaints = []
    if isinstance(found, str):
        if saved:
            complaints.append(f"it does not load: {found}")
    elif found not in saved:
        complaints.append(f"step {found} was loaded, whose job was told: {told.get(found)}")
    new = saved - {0}
    if found == 0 and new:
        complaints.append(f"step 0 was loaded, and jobs {sorted(new)} were told that they have saved")
    complaints += [f"job {step} was told: {words}" for step, words in told.items() if "unexpected" in words]
    return [f"{each}; {told}" for each in complaints]


def _save(how: str, step: int, path: str, stop_at: int | None, stands: Path) -> str:
    def stop(call: Call) -> None:
        stands.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    at = None if stop_at is None else (stop_at, stop)
    lacks = {"lock": OSError(errno.ENOLCK, "")} if how == "ours without locks" else {}
    try:
        if how == "stock":
            dcp.save(_state(step), checkpoint_id=path, no_dist=True)
        else:
            with FaultDisk(path, on=lacks, counted=_COUNTED, at=at):
                robust_dcp.save(_state(step), storage_writer=RobustWriter(path, threads=1), no_dist=True)
        return "saved"
    except RobustCheckpointError as error:
        return f"refused: {error.message}"
    except BaseException as error:
        return f"unexpected: {type(error).__name__}: {error}"


def _state(step: int) -> dict[str, Any]:
    tensors = {f"w{n}": torch.full((numel,), float(step)) for n, numel in enumerate(_NUMELS)}
    return {**tensors, "step": f"step {step}"}


def _load(path: str) -> int | str:
    """The step that loads, or the reason why none does."""
    try:
        found: dict[str, Any] = {key: torch.zeros_like(v) if key != "step" else "" for key, v in _state(0).items()}
        robust_dcp.load(found, storage_reader=RobustReader(path, verify_checksums=True), no_dist=True)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    steps = {int(found["step"].split()[1])}
    for number in range(len(_NUMELS)):
        steps.update(found[f"w{number}"].to(torch.int64).unique().tolist())
    return steps.pop() if len(steps) == 1 else f"mixed: {sorted(steps)}"


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=300))
