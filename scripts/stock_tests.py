"""Runs the own tests of PyTorch or Megatron-LM with stock and with robust_dcp, and prints what differs.

    python scripts/stock_tests.py path/to/pytorch/test/distributed/checkpoint [--only test_planner.py test_utils.py]
    python scripts/stock_tests.py path/to/Megatron-LM [--only '*/test_optimizer.py']

Of Megatron-LM these are the tests in tests/unit_tests/dist_checkpointing. None of the sources is in this repository.
Those of PyTorch are of the installed torch's version. They are copied to a temporary directory, with "cpu" in the place
of "cuda" and "gloo" in the place of "nccl", and each file runs twice in processes of its own: with ROBUST_DCP=0 and
with ROBUST_DCP=1. What differs is run once more, both ways, and counts if it differs again.

The exit code is 1 if a test differs that is not in tests/stock/known_differences.txt, and if robust_dcp has neither
saved nor loaded anything.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "tests" / "stock" / "known_differences.txt"
NO_RESULT = "no result"

# What tests say of devices, on CPU.
_ON_CPU = (
    (re.compile(r"/cuda:(\d+|\{[^{}]*\})"), "/cpu"),
    (re.compile(r"""(["'])cuda(:\d+|:\{[^{}]*\})?\1"""), '"cpu"'),
    (re.compile(r"""except_for=\[?["']cpu["']\]?"""), "except_for=None"),
    (re.compile(r"""(["'])(cpu:gloo,cuda:)?nccl\1"""), '"gloo"'),
)


class Suite(NamedTuple):
    """Whose tests they are.

    Attributes:
        runner: the script that runs pytest on some of them.
        copied: the folders that are copied from the sources.
        tests: the folder among them that holds the tests.
        on_path: whether Python is to find the sources, too.
        n_ranks: how many processes write what came of a test.
    """

    runner: str
    copied: str
    tests: str
    on_path: bool
    n_ranks: int


PYTORCH = Suite("on_cpu.py", ".", ".", on_path=False, n_ranks=1)
MEGATRON = Suite("megatron_on_cpu.py", "tests", "tests/unit_tests/dist_checkpointing", on_path=True, n_ranks=8)


class Outcome(NamedTuple):
    """What came of a test: ``passed``, ``failed``, ``skipped``, or that there is no result; and what pytest said."""

    verdict: str
    words: str = ""

    @classmethod
    def of_ranks(cls, ranks: dict[int, tuple[str, str]], n_ranks: int) -> Outcome:
        """The worst that came of it on a rank."""
        failed = [f"rank {rank}: {words}" for rank, (verdict, words) in sorted(ranks.items()) if verdict == "failed"]
        if failed:
            return cls("failed", failed[0])
        if len(ranks) < n_ranks:
            return cls(NO_RESULT, f"only ranks {sorted(ranks)} have ended it")
        return cls(*max(ranks.values()))  # skipped on one rank, skipped


class Run:
    """Runs of tests one way, and what came of them.

    Args:
        suite: whose tests.
        sources: where Megatron's other modules are.
        directory: of the copied sources.
        switch: the value of ``ROBUST_DCP``.
        seconds: that a file may take.
    """

    def __init__(self, suite: Suite, sources: Path, directory: Path, switch: str, seconds: int) -> None:
        self.suite, self.sources, self.directory, self.switch, self.seconds = suite, sources, directory, switch, seconds
        self.outcomes: dict[str, Outcome] = {}
        self.calls: Counter[tuple[str, str]] = Counter()

    def run(self, tests: list[str]) -> dict[str, Outcome]:
        """Run a file, or some tests of one, in a process of its own; all that it has started ends with it."""
        with tempfile.TemporaryDirectory(prefix="stock-tests-") as notes:
            outcomes, calls = Path(notes, "outcomes"), Path(notes, "calls")
            path = [str(self.directory), str(self.sources)] if self.suite.on_path else []
            path += [str(ROOT), os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {
                "ROBUST_DCP": self.switch,
                "STOCK_OUTCOMES": str(outcomes),
                "STOCK_CALLS": str(calls),
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                "CUDA_VISIBLE_DEVICES": "",
                "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
            }
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", "/dev/null", "--rootdir", "."]
            runner = ROOT / "tests" / "stock" / self.suite.runner
            command = [sys.executable, "-W", "ignore", str(runner), *options, *tests]
            with open(self.directory / f"output.{self.switch}", "ab") as output:
                process = subprocess.Popen(
                    command, cwd=self.directory, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                try:
                    process.wait(self.seconds)
                except subprocess.TimeoutExpired:
                    print(f"{tests[0]}: ended after {self.seconds} seconds", flush=True)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            by_rank: dict[str, dict[int, tuple[str, str]]] = {}
            for name, rank, verdict, words in _lines(outcomes):
                by_rank.setdefault(name, {})[rank] = verdict, words
            ended = {name: Outcome.of_ranks(ranks, self.suite.n_ranks) for name, ranks in by_rank.items()}
            if not ended:
                words = (self.directory / f"output.{self.switch}").read_text(errors="replace")[-1000:]
                print(f"{tests[0]}: nothing came of it with ROBUST_DCP={self.switch}:\n{words}", flush=True)
            self.outcomes |= ended
            self.calls.update((name, kind) for name, kind in _lines(calls))
            return ended

    def verdict(self, name: str) -> str:
        """What came of a test. One that has not ended has none."""
        return self.outcomes.get(name, Outcome(NO_RESULT)).verdict


def _lines(path: Path) -> Iterable[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def copy_sources(sources: Path, directory: Path, suite: Suite) -> None:
    """Copy the tests, for CPU and gloo."""
    for path in (sources / suite.copied).rglob("*.py"):
        text = path.read_text()
        for pattern, replacement in _ON_CPU:
            text = pattern.sub(replacement, text)
        target = directory / path.relative_to(sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def known_differences() -> dict[str, str]:
    """For each pattern of tests that differ, why they do."""
    lines = [line.split(maxsplit=1) for line in KNOWN.read_text().splitlines()]
    return {words[0]: words[1] for words in lines if len(words) == 2 and not words[0].startswith("#")}


def differing(stock: Run, switched: Run, names: Iterable[str]) -> list[str]:
    """The tests with other verdicts than stock's."""
    return [name for name in names if stock.verdict(name) != switched.verdict(name)]


def main() -> int:
    """Run all files both ways, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="test/distributed/checkpoint of PyTorch, or Megatron-LM")
    parser.add_argument("--only", nargs="*", default=[], help="names of files, or patterns of them")
    parser.add_argument("--every", type=int, default=1, help="run only every n-th test of each file of Megatron's")
    parser.add_argument("--seconds", type=int, default=1800, help="how long a file may take")
    given = parser.parse_args()
    os.environ["STOCK_EVERY"] = str(given.every)
    with tempfile.TemporaryDirectory(prefix="stock-tests-") as scratch:
        directory, sources = Path(scratch), given.sources.resolve()
        suite = MEGATRON if (sources / MEGATRON.tests).is_dir() else PYTORCH
        copy_sources(sources, directory, suite)
        stock, switched = (Run(suite, sources, directory, switch, given.seconds) for switch in ("0", "1"))
        files = sorted(str(path.relative_to(directory)) for path in (directory / suite.tests).rglob("test_*.py"))
        chosen = [file for file in files if not given.only or any(fnmatch.fnmatch(file, each) for each in given.only)]
        if not chosen:
            parser.error(f"{given.sources} holds no test_*.py that is asked for")
        for file in chosen:
            names = [*stock.run([file]), *switched.run([file])]
            if again := differing(stock, switched, dict.fromkeys(names)):
                for run in (stock, switched):
                    for name in again:
                        run.run([name])
            counts = [Counter(run.verdict(name) for name in dict.fromkeys(names)) for run in (stock, switched)]
            stock_words, switched_words = (
                ", ".join(f"{count} {verdict}" for verdict, count in sorted(each.items())) for each in counts
            )
            print(f"{file}: stock {stock_words or 'nothing'}; switched {switched_words or 'nothing'}", flush=True)
        return report(stock, switched)


def report(stock: Run, switched: Run) -> int:
    """Print what differs, and what the list of known differences says of it. Returns the exit code."""
    names = sorted({*stock.outcomes, *switched.outcomes})
    known = known_differences()
    different = differing(stock, switched, names)
    new = []
    for name in different:
        reasons = [reason for pattern, reason in known.items() if fnmatch.fnmatchcase(name, pattern)]
        print(f"\n{name}: stock {stock.verdict(name)}, switched {switched.verdict(name)}: {reasons or 'NOT LISTED'}")
        if not reasons:
            new.append(name)
            outcome = max(
                stock.outcomes.get(name), switched.outcomes.get(name), key=lambda each: len((each or [""])[-1])
            )
            print(f"  {(outcome.words if outcome else '')[-2000:]}".replace("\n", "\n  "))
    for pattern in known:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if matched and not set(matched) & set(different):
            print(f"\n{pattern}: listed in {KNOWN.relative_to(ROOT)}, but does not differ any more")
    kinds = Counter(kind for _, kind in switched.calls.elements())
    n_tests = len({name for name, _ in switched.calls})
    passed = [name for name in names if stock.verdict(name) == "passed"]
    print(
        f"\n{len(names)} tests, {len(passed)} passed by stock; {len(different)} differ, {len(new)} of them not listed. "
        f"robust_dcp made {kinds['save']} saves and {kinds['load']} loads (of a rank each) in {n_tests} tests"
    )
    return int(bool(new) or not kinds)


if __name__ == "__main__":
    sys.exit(main())
