"""What the ranks that live on say after another was killed, and the table of a campaign of kills.

Owns how a kill and the errors of the survivors are told, timed and judged. Never decides who is killed, or when.
Used by ``torture.kills`` and ``torture.async_kills``.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tests.harness.ranks import Outcome

__all__ = ["LIMIT_SECONDS", "Raised", "Result", "end_process", "judge_survivors", "killed_at_seconds", "print_table"]

T = TypeVar("T")

LIMIT_SECONDS = 10.0
"""From the kill until a survivor has raised its error."""

_KILLED_AT = "killed at "


class Raised(NamedTuple):
    """What a survivor raised, when, and whom it named."""

    at_seconds: float
    missing_ranks: Sequence[int]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Of an error that was just caught."""
        return cls(time.monotonic(), list(getattr(error, "missing_ranks", [])), str(error))


@dataclass
class Result(Generic[T]):
    """What came of a trial: seconds from the kill to the errors of the survivors, and what should not have happened."""

    trial: T
    seconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def end_process(pid: int | None = None) -> None:
    """Kill a process of this rank, by default its own; the output of the rank says when."""
    print(f"{_KILLED_AT}{time.monotonic()} ", flush=True)
    os.kill(os.getpid() if pid is None else pid, signal.SIGKILL)


def killed_at_seconds(outcome: Outcome) -> float | None:
    """When a process of this rank was killed; ``None`` if none was."""
    told = outcome.output.partition(_KILLED_AT)[2].split()
    return float(told[0]) if told else None


def judge_survivors(
    result: Result[T], outcomes: Sequence[Outcome], victim: int, raised: dict[int, Raised], *, same_error: bool = True
) -> None:
    """Complain of a victim that lives, and of survivors that are late, name another rank or raise other errors."""
    killed_at = killed_at_seconds(outcomes[victim])
    if outcomes[victim].exitcode != -signal.SIGKILL or killed_at is None:
        result.complaints.append(f"rank {victim} was not killed: {outcomes[victim]}")
        return
    for outcome in outcomes:
        if outcome.rank != victim and outcome.rank not in raised:
            result.complaints.append(f"rank {outcome.rank}: {outcome}")
    for rank, error in raised.items():
        seconds = error.at_seconds - killed_at
        result.seconds.append(seconds)
        if list(error.missing_ranks) != [victim]:
            result.complaints.append(f"rank {rank} names {error.missing_ranks}: {error.message}")
        if seconds > LIMIT_SECONDS:
            result.complaints.append(f"rank {rank} took {seconds:.1f} s")
    messages = {rank: error.message for rank, error in raised.items()}
    if same_error and len(set(messages.values())) > 1:
        result.complaints.append(f"more than one error: {messages}")


def print_table(results: Collection[tuple[str, Result[T]]]) -> bool:
    """One line for each kind of trial, in the order in which they are first met, and one for all.

    Returns:
        Whether all went right.
    """
    for kind in (*dict.fromkeys(kind for kind, _ in results), None):
        chosen = [result for each, result in results if kind in (None, each)]
        seconds = [each for result in chosen for each in result.seconds]
        n_right = sum(not result.complaints for result in chosen)
        line = f"{kind or 'all':36} {n_right} of {len(chosen)} right"
        if seconds:
            median, most = statistics.median(seconds), max(seconds)
            line += f", {len(seconds)} errors, raised after {median:.2f} s (median), {most:.2f} s at most"
        print(line)
    return not any(result.complaints for _, result in results)
