"""Async saves of which a process is killed: ``python -m torture.async_kills --trials 200 --seed 1``.

In each trial 2 to 4 ranks train and save into one directory, again and again, with a thread or a process that writes.
Where two saves may be under way at once, they go into two directories in turn.
While one save is staged, written and committed, SIGKILL ends a rank or its writer process: before a call to the disk
that the seed draws where a thread writes, else after a time that the seed draws.

* A rank is killed: all others have to raise one error that names it, and its writer process has to end.
* A writer process is killed: at most one save may fail, on all ranks alike, and the saves after it have to be made.

In both cases the directory has to load, with stock's reader and with ours: as the checkpoint that was committed last,
or as the one that was on its way. Another job then has to save over it, and to leave nothing behind of what was killed.
Prints each trial that broke this; ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import robust_dcp
from tests.faults.disk import Call, FaultDisk
from tests.harness.ranks import Outcome, RanksOverran, run_ranks
from tests.support.waiting import wait_until
from torture.generations import files_not_named, generation_in, is_gone, make_state, set_generation, writer_pids
from torture.survivors import (
    LIMIT_SECONDS,
    Raised,
    Result,
    end_process,
    judge_survivors,
    killed_at_seconds,
    print_table,
)

__all__ = ["KINDS", "Trial", "make_trial", "run_trial"]

KINDS = (("thread", "trainer"), ("process", "trainer"), ("process", "writer"))
"""Who writes, and who is killed."""

STAGINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lazy": {"staging": "lazy"},
    "waves": {"staging_nbytes": 1 << 19},
    "lazy waves": {"staging": "lazy", "staging_nbytes": 1 << 19},
}

_TIMEOUT_SECONDS = 60.0
"""Longer than a writer process takes to start on a busy machine. Who is dead is found out long before."""

_ARMED = 2
_LAST = 6
_GENERATIONS = range(1, 61)
_OF_ANOTHER_JOB = 100
_SAVED = "committed "


@dataclass(frozen=True)
class Trial:
    """What happens: while generation 2 is saved, a process of rank ``victim`` is killed.

    Attributes:
        kills: ``"trainer"`` or ``"writer"``.
        number: how many calls to the disk are made before; where no thread writes, so many hundredths of a second pass.
    """

    seed: int
    size: int
    victim: int
    executor: str
    kills: str
    number: int
    staging: str
    max_in_flight: int

    def directory(self, path: str, generation: int) -> str:
        """Where a generation is saved."""
        return path if self.max_in_flight == 1 else f"{path}{generation % 2}"

    @property
    def kind(self) -> str:
        """Its line in the table."""
        return f"{self.executor}: {self.kills}, staging {self.staging}"


@dataclass
class Told:
    """What a rank was told.

    Attributes:
        raised: the errors of saves, each once.
        loaded: what rank 0 found in the directory right after an error.
    """

    raised: list[Raised] = field(default_factory=list)
    loaded: list[int | str] = field(default_factory=list)
    outlived_by_writer: bool = False


def make_trial(seed: int) -> Trial:
    """The trial number ``seed``. Kinds and stagings are gone through in turn, all else is random."""
    rng = random.Random(f"async kill {seed}")
    executor, kills = KINDS[seed % len(KINDS)]
    staging = list(STAGINGS)[seed // len(KINDS) % len(STAGINGS)]
    size = rng.randint(2, 4) if executor == "thread" else rng.choice((2, 2, 2, 3))  # writers take long to start
    return Trial(seed, size, rng.randrange(size), executor, kills, rng.randrange(50), staging, rng.randint(1, 2))


def run_trial(trial: Trial) -> Result[Trial]:
    """Run it, and judge what came of it."""
    result = Result(trial)
    with tempfile.TemporaryDirectory(prefix="async-kill-") as directory:
        path = os.path.join(directory, "checkpoint")
        try:
            outcomes = run_ranks(
                *(trial.size, _be_rank, trial, path),
                timeout_seconds=90,
            )
        except RanksOverran as error:
            result.complaints.append(str(error)[:5000])
            return result
        told = {outcome.rank: outcome.value for outcome in outcomes if outcome.value is not None}
        if trial.kills == "trainer":
            first, last = ({rank: each.raised[n] for rank, each in told.items() if each.raised} for n in (0, -1))
            is_same = len({each.message for each in first.values()}) == 1
            judge_survivors(result, outcomes, trial.victim, first if is_same else last)
        else:
            _judge_writer_trial(result, outcomes, told)
        for rank, each in told.items():
            if each.outlived_by_writer:
                result.complaints.append(f"rank {rank}: the writer process outlives the rank that was killed")
        _judge_directory(result, outcomes, path)
    return result


def _judge_writer_trial(result: Result[Trial], outcomes: list[Outcome], told: dict[int, Told]) -> None:
    """At most one save has failed, on all ranks with the same words; the last one is there."""
    trial = result.trial
    if "killed at" not in outcomes[trial.victim].output:
        result.complaints.append(f"no writer was killed: {outcomes[trial.victim]}")
    messages = {rank: [error.message for error in each.raised] for rank, each in told.items()}
    if len(told) < trial.size:
        result.complaints.append("\n".join(str(outcome) for outcome in outcomes if outcome.value is None)[:5000])
    elif len({tuple(each) for each in messages.values()}) > 1 or len(messages[0]) > 1:
        result.complaints.append(f"more than one error: {messages}")
    elif any(f"the writer process of rank {trial.victim}" not in message for message in messages[0]):
        result.complaints.append(f"another error: {messages[0]}")
    killed_at = killed_at_seconds(outcomes[trial.victim])
    for each in told.values():
        result.complaints += [f"after the error: {found}" for found in each.loaded if isinstance(found, str)]
        result.seconds += [error.at_seconds - (killed_at or 0.0) for error in each.raised]
    if max(result.seconds, default=0.0) > LIMIT_SECONDS:
        result.complaints.append(f"the error took {max(result.seconds):.1f} s")


def _judge_directory(result: Result[Trial], outcomes: list[Outcome], path: str) -> None:
    """What is there is whole and not older than what any rank was told; and another job can save over it."""
    trial = result.trial
    saved = max(_numbers_after(_SAVED, outcomes), default=0)
    oldest, newest = (saved, saved + trial.max_in_flight) if trial.kills == "trainer" else (_LAST, _LAST)
    paths = [
        each
        for each in {trial.directory(path, number) for number in _GENERATIONS}
        if os.path.exists(f"{each}/.metadata")
    ]
    found = [generation_in(each, range(trial.size), _GENERATIONS) for each in paths]
    generations = [each for each in found if isinstance(each, int)]
    if len(generations) < len(found) or not oldest <= max(generations, default=0) <= newest:
        result.complaints.append(f"loaded: {found}; committed before: {saved}")
    for each in paths:
        try:
            robust_dcp.save(make_state(range(trial.size), _OF_ANOTHER_JOB), checkpoint_id=each, no_dist=True)
        except robust_dcp.RobustCheckpointError as error:
            result.complaints.append(f"another job cannot save over it: {error}")
            continue
        new = generation_in(each, range(trial.size), [_OF_ANOTHER_JOB])
        left = files_not_named(each)
        if new != _OF_ANOTHER_JOB or left:
            result.complaints.append(f"another job has saved over it, and there is: {new}; left behind: {left}")


def _numbers_after(words: str, outcomes: list[Outcome]) -> list[int]:
    return [int(part.split()[0]) for outcome in outcomes for part in outcome.output.split(words)[1:]]


def _be_rank(trial: Trial, path: str) -> Told:
    """One rank, which trains and saves until all generations are saved, or another rank is gone."""
    rank = dist.get_rank()
    state = make_state([rank], 0)
    told = Told()
    pending: list[tuple[int, Any]] = []
    first_writer = f"{os.path.dirname(path)}/writer"
    # A writer may die at any time, a rank will: so the others go on until they hear of it.
    generations = _GENERATIONS if trial.kills == "trainer" else range(1, _LAST + 1)
    for generation in generations:
        set_generation(state, generation)
        if generation == _ARMED and rank == trial.victim:
            with open(first_writer, "w") as file:
                file.write(" ".join(map(str, writer_pids())))
            _arm(trial, path)
        is_last = generation == generations[-1]
        is_over = bool(told.raised)
        try:
            pending.append((generation, _save(state, trial.directory(path, generation), trial)))
        except robust_dcp.RobustCheckpointError as error:
            _note(told, error)
            is_over = True
        while pending and (is_last or generation < _ARMED or len(pending) >= trial.max_in_flight):
            number, saving = pending.pop(0)
            try:
                saving.result(timeout=60)
                print(f"{_SAVED}{number} ", flush=True)
            except robust_dcp.RobustCheckpointError as error:
                _note(told, error)
        # Who was the only one to hear of the death, with the last message of a save, asks once more, as others do.
        if is_over and trial.kills == "trainer" and os.path.exists(first_writer):
            told.outlived_by_writer = _is_outlived(first_writer)
            return told
        if told.raised and not told.loaded and rank == 0 and trial.max_in_flight == 1:
            told.loaded.append(generation_in(path, range(trial.size), _GENERATIONS))
    return told


def _arm(trial: Trial, path: str) -> None:
    """Have this rank or its writer killed, from now on."""

    def strike(call: Call | None = None) -> None:
        for pid in writer_pids() if trial.kills == "writer" else [None]:
            end_process(pid)

    if trial.executor == "thread":
        FaultDisk(os.path.dirname(path), at=(trial.number, strike)).install()
    else:
        timer = threading.Timer(trial.number / 100, strike)
        timer.daemon = True
        timer.start()


def _save(state: dict[str, Any], path: str, trial: Trial) -> Any:
    saving = robust_dcp.async_save(
        state,
        checkpoint_id=path,
        executor=trial.executor,  # type: ignore[arg-type]
        max_in_flight=trial.max_in_flight,
        timeout_seconds=_TIMEOUT_SECONDS,
        **STAGINGS[trial.staging],
    )
    if isinstance(saving, robust_dcp.AsyncSave):
        saving.wait_staged()
        return saving.upload_completion
    return saving


def _note(told: Told, error: robust_dcp.RobustCheckpointError) -> None:
    """One that was told before is told again by ``result()``, if the next save has raised it."""
    raised = Raised.of(error)
    if raised.message.splitlines()[0] not in [each.message.splitlines()[0] for each in told.raised]:
        told.raised.append(raised)  # below its first line it says where it was asked for


def _is_outlived(path: str) -> bool:
    """Whether the writer process of the victim lives on."""
    with open(path) as file:
        pids = [int(pid) for pid in file.read().split()]
    try:
        wait_until(lambda: all(is_gone(pid) for pid in pids), 60.0)  # it may still be importing torch
    except AssertionError:
        return True
    return False


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    results: list[Result[Trial]] = []
    for seed in range(arguments.seed * 1000, arguments.seed * 1000 + arguments.trials):
        results.append(run_trial(make_trial(seed)))
        if len(results) % 20 == 0:
            print(f"{len(results)} trials", flush=True)
        if results[-1].complaints:
            print(results[-1].trial, *results[-1].complaints, sep="\n  ", flush=True)
    results.sort(key=lambda result: result.trial.kind)
    return int(not print_table([(result.trial.kind, result) for result in results]))


if __name__ == "__main__":
    sys.exit(main())
