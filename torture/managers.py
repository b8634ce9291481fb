"""Kills a job while its manager saves, removes and loads: ``python -m torture.managers --trials 200 --seed 1``.

In each trial a job has saved three steps. It then saves a fourth, removes an old one and loads the latest. Before a
random call that opens, renames or removes a file, the job is killed. A second job must then find a whole checkpoint:
the third step or the fourth. It saves once more. Afterwards nothing may be there that the killed job has left.

In every fourth trial two jobs do this at the same time below one directory, and only one of them is killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from typing import Any

import torch

from robust_dcp import CheckpointManager
from tests.harness.file_calls import FileCalls
from tests.harness.ranks import run_ranks, values
from torture.campaign import run_campaign

__all__ = ["run_trial"]

_KEPT = 2


def _state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((5000,), float(step)), "step": step}


def _run_job(root: str, first_step: int, stride: int, killed_before: dict[int, int | None]) -> int:
    """One job of one rank. Return how many calls to files it made after its third save."""
    rank = int(os.environ["RANK"])
    manager = CheckpointManager(root, keep_last=_KEPT)
    steps = [first_step + number * stride + rank for number in range(4)]
    for step in steps[:3]:
        manager.save(step, _state(step), no_dist=True)
    calls = FileCalls(root, killed_before.get(rank))
    manager.save(steps[3], _state(steps[3]), no_dist=True)
    found = _state(-1)
    manager.load_latest(found, no_dist=True)
    return calls.count


def _find_and_go_on(root: str) -> tuple[int, list[str], list[str]]:
    """Return the step that loads, what is wrong with it, and what lies in the root after one more save.

    This job starts an hour later: before, all that lies there is made so old.
    """
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            modified = os.stat(path).st_mtime - 3600
            os.utime(path, (modified, modified))
    manager = CheckpointManager(root, keep_last=_KEPT)
    found = _state(-1)
    loaded = manager.load_latest(found)
    if loaded is None:
        return -1, ["nothing was found"], []
    step = loaded.checkpoint.step
    wrong = [f"{each.path}: {each.reason}" for each in loaded.skipped]
    if found["step"] != step or not bool((found["weight"] == step).all()):
        wrong.append(f"step {step} holds {found['step']} and {found['weight'].unique().tolist()}")
    manager.save(1000, _state(1000))
    # A directory that the killed job had only just made carries no mark of ours, so it stays.
    names = [name for name in os.listdir(root) if not os.path.isdir(f"{root}/{name}") or os.listdir(f"{root}/{name}")]
    return step, wrong, sorted(names)


def run_trial(seed: int) -> list[str]:
    """Run one trial.

    Returns:
        What was wrong, in words; nothing if all was right.
    """
    draw = random.Random(seed)
    n_jobs = 2 if seed % 4 == 3 else 1
    with tempfile.TemporaryDirectory() as directory:
        counted = values(run_ranks(1, _run_job, f"{directory}/counted", 1, 1, {}, init=False))[0]
        number = draw.randrange(counted)
        root = f"{directory}/root"
        first, *others = run_ranks(n_jobs, _run_job, root, 1, n_jobs, {0: number}, init=False)
        # Of two jobs each may find less to remove than one alone, so that the call never comes.
        if first.exitcode != -signal.SIGKILL and (n_jobs == 1 or first.exitcode != 0):
            return [f"it was not killed before call {number} of {counted}: {first}"]
        wrong = [f"the other job failed: {each}" for each in others if each.exitcode != 0]
        ((step, damage, names),) = values(run_ranks(1, _find_and_go_on, root, init=False))
        wrong += damage
        allowed = (3, 4) if n_jobs == 1 else range(1, 9)
        if step not in allowed:
            wrong.append(f"step {step} was found, and not one of {list(allowed)}")
        kept = [name for name in names if name.startswith("step_")]
        if len(kept) != _KEPT or set(names) != {*kept, "latest"}:
            wrong.append(f"left after one more save: {names}")
        return [f"killed before call {number} of {counted}: {each}" for each in wrong]


if __name__ == "__main__":
    sys.exit(run_campaign(__doc__, run_trial, trials=200))
