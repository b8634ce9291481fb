"""Lets two jobs save into one directory: ``python -m torture.savers --rounds 300 --seed 1``.

In each round two processes save different values under the same names. Our writer runs with locks or without them, as
on many network file systems. The second process may use stock's writer. Either both start at the same time, or one is
stopped (SIGSTOP) before a random call to its disk and goes on when the other has ended. Then a third process loads. The
load must not fail. It must give the whole checkpoint of a job that was told that it has saved, or the checkpoint that
was there before. The program prints each round that broke this. It exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustReader, RobustWriter
from tests.faults.disk import CHANGES, Call, FaultDisk

__all__ = ["HOW", "Round", "make_round", "run_round"]

HOW = ("ours", "ours without locks", "stock")
_COUNTED = CHANGES | {"open", "lock", "read"}
_MOST_CALLS = 60
_LIMIT_SECONDS = 60.0
_NUMELS = (10, 300_000, 700_000)
_FORK = multiprocessing.get_context("fork")


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


def make_round(seed: int) -> Round:
    """The round number ``seed``."""
    rng = random.Random(f"savers {seed}")
    first, second = rng.choice(HOW[:2]), rng.choice(HOW)
    stop_at = rng.randrange(_MOST_CALLS) if rng.random() < 0.6 else None
    return Round(seed, rng.random() < 0.5, (first, second), stop_at)


def run_round(made: Round) -> list[str]:
    """Run the round, and list what should not have happened."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "checkpoint")
        told = {}
        if made.exists:
            robust_dcp.save(_state(0), checkpoint_id=path, no_dist=True)
            told[0] = "saved"
        told.update(_run_jobs(made, path))
        found = _loaded(path)
        return _complaints(made, told, found)


def _complaints(made: Round, told: dict[int, str], found: int | str) -> list[str]:
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


def _run_jobs(made: Round, path: str) -> dict[int, str]:
    first, hears_first = _start(made.jobs[0], 1, path, made.stop_at)
    if made.stop_at is not None:
        # The job stops, or ends before it makes that call.
        os.waitid(os.P_PID, first.pid or 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    second, hears_second = _start(made.jobs[1], 2, path, None)
    told = {}
    if made.stop_at is not None:
        told[2] = _heard(second, hears_second)
        with contextlib.suppress(ProcessLookupError):
            os.kill(first.pid or 0, signal.SIGCONT)
    told[1] = _heard(first, hears_first)
    if 2 not in told:
        told[2] = _heard(second, hears_second)
    return told


def _start(how: str, step: int, path: str, stop_at: int | None) -> tuple[Any, Connection]:
    hears, tells = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_job, args=(how, step, path, stop_at, tells))
    process.start()
    tells.close()
    return process, hears


def _heard(process: Any, hears: Connection) -> str:
    """The result that a job was told."""
    try:
        words = hears.recv() if hears.poll(_LIMIT_SECONDS) else "unexpected: it did not end"
    except EOFError:
        words = "unexpected: it died"
    process.kill()
    process.join()
    return str(words)


def _job(how: str, step: int, path: str, stop_at: int | None, tells: Connection) -> None:
    def stop(call: Call) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    torch.set_num_threads(1)
    try:
        if how == "stock":
            dcp.save(_state(step), checkpoint_id=path, no_dist=True)
        else:
            FaultDisk(
                path,
                on={"lock": OSError(errno.ENOLCK, "")} if how == "ours without locks" else {},
                counted=_COUNTED,
                at=None if stop_at is None else (stop_at, stop),
            ).install()
            robust_dcp.save(_state(step), storage_writer=RobustWriter(path, threads=1), no_dist=True)
        tells.send("saved")
    except RobustCheckpointError as error:
        tells.send(f"refused: {error.message}")
    except BaseException as error:
        tells.send(f"unexpected: {type(error).__name__}: {error}")


def _state(step: int) -> dict[str, Any]:
    tensors = {f"w{n}": torch.full((numel,), float(step)) for n, numel in enumerate(_NUMELS)}
    return {**tensors, "step": f"step {step}"}


def _loaded(path: str) -> int | str:
    """The step that loads, or the reason why none does."""
    hears, tells = _FORK.Pipe(duplex=False)

    def load() -> None:
        try:
            found: dict[str, Any] = {key: torch.zeros_like(v) if key != "step" else "" for key, v in _state(0).items()}
            robust_dcp.load(found, storage_reader=RobustReader(path, verify_checksums=True), no_dist=True)
            steps = {int(found["step"].split()[1])}
            for number in range(len(_NUMELS)):
                steps.update(found[f"w{number}"].to(torch.int64).unique().tolist())
            tells.send(steps.pop() if len(steps) == 1 else f"mixed: {sorted(steps)}")
        except BaseException as error:
            tells.send(f"{type(error).__name__}: {error}")

    process = _FORK.Process(target=load)
    process.start()
    found = hears.recv() if hears.poll(_LIMIT_SECONDS) else "it hangs"
    process.kill()
    process.join()
    return found  # type: ignore[no-any-return]


def main() -> int:
    """Run the campaign. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process that forks must have no threads
    logging.disable(logging.WARNING)
    n_broken, kinds = 0, Counter[str]()
    for number in range(options.rounds):
        made = make_round(options.seed * 1_000_000 + number)
        complaints = run_round(made)
        kinds["at once" if made.stop_at is None else "stopped"] += 1
        n_broken += bool(complaints)
        for complaint in complaints:
            print(f"{made}: {complaint}", flush=True)
    how_many = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{options.rounds} rounds ({how_many}), seed {options.seed}: {n_broken} broken")
    return 1 if n_broken else 0


if __name__ == "__main__":
    sys.exit(main())
