"""Exchanges of thousands of ranks in virtual time: their verdicts, and what they cost a rank in messages and bytes.

Run it for a table: ``python -m benchmarks.simulated --json simulated.json``. The state machines are the real ones, the
network and the clock are those of ``tests/harness/simulation.py``: a message takes 2 ms on average. So the figures do
not depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.measuring import Row, show, write_json
from robust_dcp.comm import Offer
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.waits import Steps
from robust_dcp.errors import ExchangeTimeout, ranks_in_words
from tests.harness.simulation import Simulation

__all__ = ["main"]

_TIMEOUT_SECONDS = 300.0
_WORK_SECONDS = 0.5
_KILLED_SECONDS = 0.3
_LATE_SECONDS = 200.0
_ITEMS_NBYTES = 8 * 60
_COLUMNS = {
    "what": "what happens",
    "ranks": "ranks",
    "verdict": "verdict",
    "seconds": "seconds",
    "messages": "messages of a rank, mean",
    "most_messages": "most",
    "nbytes": "bytes, mean",
    "most_nbytes": "most",
    "store": "questions to the store, mean",
}

# For a group of so many ranks: what happens, and to whom.
_CASES: dict[str, Callable[[int], dict[str, int]]] = {
    "one exchange": lambda size: {},
    "first plan, 8 items each": lambda size: {"nbytes": _ITEMS_NBYTES},
    "a rank is killed": lambda size: {"killed": size - 1},
    "an inner rank is killed": lambda size: {"killed": size // 2},
    "a rank is 200 s late": lambda size: {"late": size - 1},
}


def _exchange(link: Link, nbytes: int, seconds: float) -> Steps[str]:
    operation = Operation(link, "save", _TIMEOUT_SECONDS)
    own = bytes([link.rank % 251]) * nbytes

    def merge(own: bytes, below: list[Any]) -> bytes:
        return b"".join([own, *below])

    def work() -> Steps[Any]:
        yield from link.pause(seconds)
        return own if nbytes else Offer(value=link.rank + 1)

    made = Work(work, merge, lambda own, below: None) if nbytes else Work(work)
    try:
        agreement, _, _ = yield from operation.run("agree", "plan", 0, made)
    except ExchangeTimeout as error:
        return f"name {ranks_in_words(error.missing_ranks or ())}"
    return "agree" if agreement.n_ranks == link.size else f"agree on {agreement.n_ranks} ranks"


def _row(what: str, size: int) -> Row:
    gc.collect()
    gc.disable()  # it would look at all ranks again and again
    nbytes, killed, late = map(_CASES[what](size).get, ("nbytes", "killed", "late"))
    simulation = Simulation(size, seed=1)
    tasks = [
        simulation.start(rank, _exchange(link, nbytes or 0, _LATE_SECONDS if rank == late else _WORK_SECONDS))
        for rank, link in enumerate(simulation.links)
    ]
    if killed is not None:
        simulation.at(_KILLED_SECONDS, simulation.kill, killed)
    simulation.run(1000.0)
    survivors = [task for rank, task in enumerate(tasks) if rank != killed]
    outcomes = Counter(task.outcome.value if task.outcome else "wait for ever" for task in survivors)
    since = _KILLED_SECONDS if killed is not None else _LATE_SECONDS if late is not None else _WORK_SECONDS
    return {
        "what": what,
        "ranks": size,
        "verdict": "; ".join(f"{'all' if len(outcomes) == 1 else count} {text}" for text, count in outcomes.items()),
        "seconds": max(task.ended_seconds for task in survivors) - since,
        "messages": sum(simulation.n_messages) / size,
        "most_messages": max(simulation.n_messages),
        "nbytes": sum(simulation.nbytes) / size,
        "most_nbytes": max(simulation.nbytes),
        "store": simulation.store.n_calls[0] / size,
    }


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 10240])
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args()
    logging.disable()
    cases = [(what, size) for what in _CASES for size in options.ranks]
    # The last one takes longest, so it begins first.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(_row, *zip(*cases[::-1], strict=True)))[::-1]
    show(_COLUMNS, rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
