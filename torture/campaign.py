"""The command line of campaigns that run one trial for each seed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["run_campaign"]


def run_campaign(description: str | None, run_trial: Callable[[int], list[str]], *, trials: int) -> int:
    """Run the trials that the command line asks for, and print what went wrong in each.

    Args:
        description: what ``--help`` says.
        run_trial: runs the trial of a seed. It returns the promises that were broken.
        trials: how many trials, unless ``--trials`` says otherwise.

    Returns:
        The exit code: 1 if any promise was broken.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    n_broken = 0
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        wrong = run_trial(seed)
        n_broken += bool(wrong)
        for each in wrong:
            print(f"seed {seed}: {each}", flush=True)
    print(f"{arguments.trials} trials, {n_broken} broke a promise")
    return 1 if n_broken else 0
