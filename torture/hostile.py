"""Loads thousands of damaged and hostile checkpoints, each in its own process with limits on time and memory.

    python -m torture.hostile --trials 2000 --seed 1
    python -m torture.hostile --trials 4000 --seed 7 --json hostile.json
    python -m torture.hostile --only "special file|forged head"

A trial is *loaded* if the loaded values are the saved ones, or if a forged pickle was plain data after all. It is
*refused* if robust_dcp raises an exception that names the file. It is *lost* in every other case: other data, another
exception, a crash, code that was run, more than 20 seconds of CPU time, or more than 512 MiB. The program exits with 1
if any trial was lost.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator

import torch

from torture.inputs import Input, all_forged, random_inputs
from torture.samples import make_samples
from torture.trials import LOST, run_trial

__all__ = ["main", "run"]

SECONDS = 20.0
GROWTH_NBYTES = 512 << 20


def run(inputs: Iterator[Input], root: str) -> list[tuple[str, str, str, str]]:
    """Run each trial. Returns (group, input, verdict, text) for each. The samples are in ``root``."""
    outcomes = []
    work = os.path.join(root, "work")
    canary = os.path.join(root, "canary")
    for each in inputs:
        directory = os.path.join(work, "checkpoint")
        shutil.copytree(os.path.join(root, each.sample.name), directory)
        try:
            names = each.damage(directory, canary)
            verdict, text = run_trial(
                lambda directory=directory, each=each: each.load(directory),  # type: ignore[misc]
                names,
                seconds=SECONDS,
                growth_nbytes=GROWTH_NBYTES,
                canary=canary,
            )
        finally:
            shutil.rmtree(work)
        outcomes.append((each.group, each.name, verdict, text))
        if verdict == LOST:
            print(f"LOST after {len(outcomes)} trials: {each.group}: {each.name}: {text}", file=sys.stderr, flush=True)
    return outcomes


def _table(outcomes: list[tuple[str, str, str, str]]) -> list[dict[str, object]]:
    counts: dict[str, collections.Counter[str]] = {}
    for group, _, verdict, _ in outcomes:
        counts.setdefault(group, collections.Counter())[verdict] += 1
    rows: list[dict[str, object]] = [
        {"input": group, "trials": sum(found.values()), **{name: found[name] for name in ("loaded", "refused", LOST)}}
        for group, found in sorted(counts.items())
    ]
    together = sum(counts.values(), collections.Counter())
    verdicts = {name: together[name] for name in ("loaded", "refused", LOST)}
    rows.append({"input": "together", "trials": len(outcomes), **verdicts})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="at least so many, with every forged pickle in them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th forged pickle, as the seed draws")
    parser.add_argument("--only", default="", help="a regular expression: only inputs of the groups that it matches")
    parser.add_argument("--json", help="write rows, and the trials that were lost, to this file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        make_samples(root)
        forged = list(all_forged())[given.seed % given.every :: given.every]
        inputs = [*forged, *random_inputs(random.Random(given.seed), max(0, given.trials - len(forged)))]
        outcomes = run((each for each in inputs if re.search(given.only, each.group)), root)
    rows = _table(outcomes)
    print("| input | trials | loaded | refused | lost |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    lost = [outcome for outcome in outcomes if outcome[2] == LOST]
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"seed": given.seed, "rows": rows, "lost": lost}, file, indent=1)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
