"""Kills, power cuts and refused calls, at every call to files: ``python -m torture.disk --seed 1 --only overwrite``.

The scenarios are those of ``tests/promises/scenarios.py``: saves of several kinds, a load, a manager, a copy and
conversions. The tests try some of the calls, this program each of them, and each errno. Whatever happens, both readers
have to find the checkpoint from before or the new one, and the next save has to work. Prints each trial that broke
this; ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.faults.disk import CHANGES, FaultDisk, each_call, each_kill
from tests.faults.power import cut_power
from tests.promises.scenarios import SCENARIOS, Scenario, where

__all__ = ["CAMPAIGNS", "run"]

REFUSALS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "EPERM", "ESTALE", "EMFILE", "ETIMEDOUT", "ENOTCONN")
EVERYTHING = CHANGES | {"open", "read", "close", "list", "stat", "room", "lock"}
NEXT_EVERY = 20
"""After so many power cuts the scenario is done once more."""

Trials = Iterator[tuple[str, str, bool]]
"""For each trial what happened, the directory as it was left, and whether the scenario is to be done once more."""


def kills(scenario: Scenario, root: str, seed: int) -> Trials:
    """Before each call."""
    for number, directory in each_kill(scenario.act, root, prepare=scenario.prepare, counted=scenario.counted):
        yield f"killed before call {number}", directory, True


def refusals(scenario: Scenario, root: str, seed: int) -> Trials:
    """Each call, by an errno that the seed draws."""
    names = random.Random(seed).choices(REFUSALS, k=10_000)
    for number, call, directory, raised in each_call(
        scenario.act,
        root,
        prepare=scenario.prepare,
        fault=lambda number: OSError(getattr(errno, names[number]), ""),
        counted=EVERYTHING,
    ):
        yield f"call {number}, {call.operation} {call.path}, {names[number]}: {raised!r}", directory, True


def power_cuts(scenario: Scenario, root: str, seed: int) -> Trials:
    """After each call, whatever is kept of what was not synced."""
    recorded = os.path.join(root, "recorded")
    scenario.prepare(recorded)
    before = {
        str(path.relative_to(recorded)): path.read_bytes() for path in Path(recorded).rglob("*") if path.is_file()
    }
    with FaultDisk(recorded, record=True) as disk:
        scenario.act(recorded)
    calls = [call for call in disk.calls if call.operation in CHANGES and call.is_done]
    for number, state in enumerate(cut_power(recorded, before, calls)):
        directory = os.path.join(root, str(number))
        state.put(directory)
        yield f"state {number}, after call {state.after}", directory, number % NEXT_EVERY == 0


CAMPAIGNS: dict[str, Callable[[Scenario, str, int], Trials]] = {
    "kills": kills,
    "refusals": refusals,
    "power cuts": power_cuts,
}


def run(name: str, scenario: Scenario, seed: int) -> tuple[int, list[str]]:
    """How many trials there were, and what broke a promise."""
    broken: list[str] = []
    n_trials = 0
    with tempfile.TemporaryDirectory() as root:
        for what, directory, is_repeated in CAMPAIGNS[name](scenario, root, seed):
            n_trials += 1
            try:
                with where(what):
                    scenario.check(directory)
                    if is_repeated:
                        scenario.check_next(directory, is_tidy=name != "power cuts")
            except AssertionError as error:
                broken.append(str(error)[:2000])
            shutil.rmtree(directory, ignore_errors=True)
    return n_trials, broken


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression for '<campaign>: <scenario>'")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a process that forks must have no threads
    logging.disable(logging.WARNING)
    n_broken = 0
    for name in CAMPAIGNS:
        for scenario in SCENARIOS:
            title = f"{name}: {scenario}"
            if not re.search(given.only, title) or title.startswith("power cuts: convert"):
                continue  # these make calls that Python code does not see
            n_trials, broken = run(name, scenario, given.seed)
            n_broken += len(broken)
            print(f"{title:34} {n_trials} trials, {len(broken)} broke a promise", *broken, sep="\n  ", flush=True)
    return 1 if n_broken else 0


if __name__ == "__main__":
    sys.exit(main())
