"""The one loop of all campaigns: their options, what they print of a trial that broke a promise, and the table.

A campaign is a module that makes trials from a seed, and calls :func:`main`:

    python -m torture.async_kills --trials 200 --seed 1 --only writer
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field

__all__ = ["Result", "Trial", "main", "run"]


@dataclass
class Result:
    """What came of a trial.

    Attributes:
        complaints: what should not have happened.
        seconds: how long it took until ranks had raised their errors.
        verdict: a word that the table counts.
    """

    complaints: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    verdict: str = ""


@dataclass(frozen=True)
class Trial:
    """A trial: its line in the table, what tells it from others, and how it is run."""

    kind: str
    what: object
    run: Callable[[], Result]


def run(trials: Iterable[Trial], at_once: int = 1, n_processes: int = 1) -> Iterator[tuple[Trial, Result]]:
    """Run trials, some at once, in threads or in processes. Those that broke a promise are printed as soon as they have
    ended."""
    trials = list(trials)
    pool: Executor = ThreadPoolExecutor(at_once)
    if n_processes > 1:
        pool = ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn"), _prepare, (trials[0],))
    with pool:
        # A campaign that forks runs its trials in the main thread.
        results = pool.map(_run, trials, chunksize=100) if at_once * n_processes > 1 else map(_run, trials)
        for number, (trial, result) in enumerate(zip(trials, results, strict=True)):
            if result.complaints:
                print(f"trial {number}: {trial.kind}: {trial.what}", *result.complaints, sep="\n  ", flush=True)
            yield trial, result


def _prepare(trial: Trial) -> None:
    """In a process of its own. What ``trial`` needs is imported by now, and the collector need not look at it."""
    logging.disable()
    gc.freeze()
    gc.set_threshold(50_000)


def _run(trial: Trial) -> Result:
    return trial.run()


def main(
    description: str | None,
    make_trials: Callable[[int, int], Iterable[Trial]],
    n_trials: int,
    at_once: int = 1,
    n_processes: int = 1,
    arguments: list[str] | None = None,
) -> int:
    """Run the campaign that the command line asks for.

    Args:
        description: the docstring of the campaign.
        make_trials: given the number of trials and the seed.
        n_trials: how many there are if the command line does not say.
        at_once: how many are run at the same time, in threads.
        n_processes: in how many processes they are run instead.
        arguments: of the command line.

    Returns:
        The exit code: 1 if a trial broke a promise.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=n_trials)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression: only trials of the kinds that it matches")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    chosen = (trial for trial in make_trials(given.trials, given.seed) if re.search(given.only, trial.kind))
    results: dict[str, list[Result]] = defaultdict(list)
    for trial, result in run(chosen, at_once, n_processes):
        results[trial.kind].append(result)
    together = [result for each in results.values() for result in each]
    for kind, each in [*sorted(results.items()), ("all", together)]:
        print(f"{kind:40} {_summary(each)}", flush=True)
    return int(any(result.complaints for result in together))


def _summary(results: list[Result]) -> str:
    n_broken = sum(bool(result.complaints) for result in results)
    words = [f"{len(results)} trials, {n_broken} broke a promise"]
    verdicts = Counter(result.verdict for result in results if result.verdict)
    words += [f"{count} {verdict}" for verdict, count in sorted(verdicts.items())]
    if seconds := [each for result in results for each in result.seconds]:
        words.append(f"errors after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s at most")
    return ", ".join(words)
