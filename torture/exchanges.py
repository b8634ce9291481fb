"""Runs thousands of schedules of faults between ranks: ``python -m torture.exchanges --trials 3000 --seed 1``.

It prints each seed that broke a promise, and what was broken. It exits with 1 if there is any. To run a seed again, use
``--trials 1 --seed S --kind K``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.support.rank_threads import quick
from torture.schedules import KINDS, Run, complaints, make_schedule, run_schedule

__all__ = ["run_many"]


def run_many(first_seed: int, n_trials: int, kind: str | None = None, at_once: int = 8) -> list[Run]:
    """Run the schedules from ``first_seed`` on. Some run at the same time, because they mostly wait."""
    with quick(), ThreadPoolExecutor(at_once) as pool:
        schedules = [make_schedule(seed, kind) for seed in range(first_seed, first_seed + n_trials)]
        return list(pool.map(run_schedule, schedules))


def main() -> int:
    """Run the campaign. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--at-once", type=int, default=8)
    arguments = parser.parse_args()
    began, cpu = time.monotonic(), time.process_time()
    runs = run_many(arguments.seed, arguments.trials, arguments.kind, arguments.at_once)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    n_broken = 0
    for run in runs:
        found = complaints(run)
        if found:
            n_broken += 1
            print(f"seed {run.schedule.seed}: {run.schedule}\n  happened: {run.network.happened}")
            print("".join(f"  {each}\n" for each in found))
    kinds = Counter(run.schedule.kind for run in runs)
    struck = Counter(fault.kind.value for run in runs for fault in run.network.happened)
    raised = Counter(run.schedule.kind for run in runs if any(outcome.error for outcome in run.outcomes))
    print(f"{len(runs)} schedules in {seconds:.1f} s, CPU {cpu:.1f} s: {dict(kinds)}; raised {dict(raised)}")
    print(f"faults that struck: {dict(struck)}")
    print(f"{n_broken} schedules broke a promise")
    return 1 if n_broken else 0


if __name__ == "__main__":
    sys.exit(main())
