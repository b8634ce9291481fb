"""Async saves of which a process is killed: ``python -m torture.async_kills --trials 200 --seed 1``.

In each trial 2 to 4 ranks train and save into one directory, again and again, with a thread or a process that writes.
Where two saves may be under way at once, they go into two directories in turn.
While one save is staged, written and committed, SIGKILL ends a rank or its writer process: before a call to the disk
that the seed draws where a thread writes, else after a time that the seed draws.

* A rank is killed: all others have to raise one error that names it, and its writer process has to end.
* A writer process is killed: at most one save may fail, on all ranks alike, and the saves after it have to be made.

In both cases the directory has to load, with stock's reader and with ours: as the checkpoint that was committed last,
or as the one that was on its way. Another job then has to save over it, and to leave nothing behind of what was killed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

import robust_dcp
from tests.faults.disk import Call, FaultDisk
from tests.harness.ranks import Outcome, RanksOverran, run_ranks
from torture.generations import files_not_named, generation_in, is_gone, make_state, set_generation, writer_pids
from torture.trials import Result, Trial, main

__all__ = ["Kill", "judge"]

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

LIMIT_SECONDS = 10.0
"""From the kill until a survivor has raised its error."""

_ARMED, _LAST = 2, 6
_KILLED_AT = "killed at "
_GENERATIONS = range(1, 61)
_OF_ANOTHER_JOB = 100
_SAVED = "committed "


class Raised(NamedTuple):
    """What a survivor raised, when, and whom it named."""

    at_seconds: float
    missing_ranks: Sequence[int]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Of an error that was just caught."""
        return cls(time.monotonic(), list(getattr(error, "missing_ranks", [])), str(error))


def end_process(pid: int | None = None) -> None:
    """Kill a process of this rank, by default its own; the output of the rank says when."""
    print(f"{_KILLED_AT}{time.monotonic()} ", flush=True)
    os.kill(os.getpid() if pid is None else pid, signal.SIGKILL)


def killed_at_seconds(outcome: Outcome) -> float | None:
    """When a process of this rank was killed; ``None`` if none was."""
    told = outcome.output.partition(_KILLED_AT)[2].split()
    return float(told[0]) if told else None


def judge_survivors(outcomes: Sequence[Outcome], victim: int, raised: dict[int, Raised]) -> Result:
    """Complain of a victim that lives, and of survivors that are late, name another rank or raise other errors."""
    killed_at = killed_at_seconds(outcomes[victim])
    if outcomes[victim].exitcode != -signal.SIGKILL or killed_at is None:
        return Result([f"rank {victim} was not killed, and raised {raised.get(victim)}: {outcomes[victim]}"])
    result = Result(seconds=[error.at_seconds - killed_at for error in raised.values()])
    result.complaints += [str(each) for each in outcomes if each.rank not in (victim, *raised)]
    for rank, error in raised.items():
        if list(error.missing_ranks) != [victim]:
            result.complaints.append(f"rank {rank} names {error.missing_ranks}: {error.message}")
    if max(result.seconds, default=0.0) > LIMIT_SECONDS:
        result.complaints.append(f"the errors took {result.seconds} s")
    messages = {rank: error.message for rank, error in raised.items()}
    if len(set(messages.values())) > 1:
        result.complaints.append(f"more than one error: {messages}")
    return result


@dataclass(frozen=True)
class Kill:
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
    """The errors of saves that a rank was told, each once; and whether the victim's writer process outlives it."""

    raised: list[Raised] = field(default_factory=list)
    outlived_by_writer: bool = False


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """Kinds and stagings are gone through in turn, all else is random."""
    for number in range(seed * 1000, seed * 1000 + n_trials):
        rng = random.Random(f"async kill {number}")
        executor, kills = KINDS[number % len(KINDS)]
        staging = list(STAGINGS)[number // len(KINDS) % len(STAGINGS)]
        size = rng.randint(2, 4) if executor == "thread" else rng.choice((2, 2, 2, 3))  # writers take long to start
        kill = Kill(number, size, rng.randrange(size), executor, kills, rng.randrange(50), staging, rng.randint(1, 2))
        yield Trial(kill.kind, kill, partial(judge, kill))


def judge(kill: Kill) -> Result:
    """Run it, and judge what came of it."""
    with tempfile.TemporaryDirectory(prefix="async-kill-") as directory:
        path = os.path.join(directory, "checkpoint")
        try:
            outcomes = run_ranks(kill.size, _be_rank, kill, path)
        except RanksOverran as error:
            return Result([str(error)[:5000]])
        told = {outcome.rank: outcome.value for outcome in outcomes if outcome.value is not None}
        if kill.kills == "trainer":
            first, last = ({rank: each.raised[n] for rank, each in told.items() if each.raised} for n in (0, -1))
            is_same = len({each.message for each in first.values()}) == 1
            result = judge_survivors(outcomes, kill.victim, first if is_same else last)
        else:
            result = _judge_writer_kill(kill, outcomes, told)
        if any(each.outlived_by_writer for each in told.values()):
            result.complaints.append("the writer process outlives the rank that was killed")
        result.complaints += _complaints_of_directory(kill, outcomes, path)
    return result


def _judge_writer_kill(kill: Kill, outcomes: list[Outcome], told: dict[int, Told]) -> Result:
    """At most one save has failed, on all ranks with the same words; the last one is there."""
    killed_at = killed_at_seconds(outcomes[kill.victim])
    if len(told) < kill.size:
        return Result([f"a rank has not returned: {[*map(str, outcomes)]}"[:5000]])
    if killed_at is None:  # all saves were made before
        return Result(verdict="not struck")
    errors = {rank: [error.message for error in each.raised] for rank, each in told.items()}
    result = Result(seconds=[error.at_seconds - killed_at for each in told.values() for error in each.raised])
    if len({tuple(each) for each in errors.values()}) > 1 or len(errors[0]) > 1:
        result.complaints.append(f"more than one error: {errors}")
    elif any(f"the writer process of rank {kill.victim}" not in message for message in errors[0]):
        result.complaints.append(f"another error: {errors[0]}")
    if max(result.seconds, default=0.0) > LIMIT_SECONDS:
        result.complaints.append(f"the error took {max(result.seconds):.1f} s")
    return result


def _complaints_of_directory(kill: Kill, outcomes: list[Outcome], path: str) -> list[str]:
    """What is there is whole and not older than what any rank was told; and another job can save over it."""
    ranks = range(kill.size)
    # A line of the log may say that a save may be committed all the same.
    saved = max((int(number) for each in outcomes for number in re.findall(rf"{_SAVED}(\d+) ", each.output)), default=0)
    oldest, newest = (saved, saved + kill.max_in_flight) if kill.kills == "trainer" else (_LAST, _LAST)
    paths = [each for each in {kill.directory(path, 0), kill.directory(path, 1)} if os.path.exists(f"{each}/.metadata")]
    found = [generation_in(each, ranks, _GENERATIONS) for each in paths]
    generations = [each for each in found if isinstance(each, int)]
    complaints = []
    if len(generations) < len(found) or not oldest <= max(generations, default=0) <= newest:
        complaints.append(f"loaded: {found}; committed before: {saved}")
    for each in paths:
        try:
            robust_dcp.save(make_state(ranks, _OF_ANOTHER_JOB), checkpoint_id=each, no_dist=True)
        except robust_dcp.RobustCheckpointError as error:
            complaints.append(f"another job cannot save over it: {error}")
            continue
        new, left = generation_in(each, ranks, [_OF_ANOTHER_JOB]), files_not_named(each)
        if new != _OF_ANOTHER_JOB or left:
            complaints.append(f"another job has saved over it, and there is: {new}; left behind: {left}")
    return complaints


def _be_rank(kill: Kill, path: str) -> Told:
    """One rank, which trains and saves until all generations are saved, or another rank is gone."""
    rank = dist.get_rank()
    state = make_state([rank], 0)
    told = Told()
    pending: list[tuple[int, Any]] = []
    first_writer = f"{os.path.dirname(path)}/writer"
    # A writer may die at any time, a rank will: so the others go on until they hear of it.
    generations = _GENERATIONS if kill.kills == "trainer" else range(1, _LAST + 1)
    for generation in generations:
        set_generation(state, generation)
        if generation == _ARMED and rank == kill.victim:
            with open(first_writer, "w") as file:
                file.write(" ".join(map(str, writer_pids())))
            _arm(kill, path)
        is_last = generation == generations[-1]
        is_over = bool(told.raised)
        try:
            saving: Any = robust_dcp.async_save(
                state,
                checkpoint_id=kill.directory(path, generation),
                executor=kill.executor,  # type: ignore[arg-type]
                max_in_flight=kill.max_in_flight,
                timeout_seconds=_TIMEOUT_SECONDS,
                **STAGINGS[kill.staging],
            )
            saving.wait_staged()
            pending.append((generation, saving))
        except robust_dcp.RobustCheckpointError as error:
            _note(told, error)
            is_over = True
        while pending and (is_last or generation < _ARMED or len(pending) >= kill.max_in_flight):
            number, saved = pending.pop(0)
            try:
                saved.result()
                print(f"{_SAVED}{number} ", flush=True)
            except robust_dcp.RobustCheckpointError as error:
                _note(told, error)
        # Who was the only one to hear of the death, with the last message of a save, asks once more, as others do.
        if is_over and kill.kills == "trainer" and os.path.exists(first_writer):
            told.outlived_by_writer = _is_outlived(first_writer)
            return told
    return told


def _arm(kill: Kill, path: str) -> None:
    """Have this rank or its writer killed, from now on."""

    def strike(call: Call | None = None) -> None:
        for pid in writer_pids() if kill.kills == "writer" else [None]:
            end_process(pid)

    if kill.executor == "thread":
        FaultDisk(os.path.dirname(path), at=(kill.number, strike)).install()
    else:
        timer = threading.Timer(kill.number / 100, strike)
        timer.daemon = True
        timer.start()


def _note(told: Told, error: robust_dcp.RobustCheckpointError) -> None:
    """One that was told before is told again by ``result()``, if the next save has raised it."""
    raised = Raised.of(error)
    if raised.message.splitlines()[0] not in [each.message.splitlines()[0] for each in told.raised]:
        told.raised.append(raised)  # below its first line it says where it was asked for


def _is_outlived(path: str) -> bool:
    """Whether the writer process of the victim lives on."""
    with open(path) as file:
        pids = [int(pid) for pid in file.read().split()]
    until = time.monotonic() + 60  # it may still be importing torch
    while not all(map(is_gone, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not all(map(is_gone, pids))


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=200))
