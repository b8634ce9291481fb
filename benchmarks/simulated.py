"""Exchanges of thousands of ranks in virtual time: their verdicts, and what they cost a rank in messages and bytes.

Run it for a table: ``python -m benchmarks.simulated --ranks 1024 10240``. The state machines are the real ones, the
network and the clock are those of ``tests/harness/simulation.py``: a message takes 2 ms on average.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.measuring import Row, show
from robust_dcp.comm import Offer
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.waits import Steps
from tests.harness.simulation import Simulation

__all__ = ["main"]

_TIMEOUT_SECONDS = 300.0
_ITEMS_NBYTES = 8 * 60
_COLUMNS = {
    "what": "what happens",
    "ranks": "ranks",
    "verdict": "verdict",
    "seconds": "after s",
    "messages": "messages of a rank, mean",
    "most_messages": "most",
    "nbytes": "bytes, mean",
    "most_nbytes": "most",
    "store": "questions to the store, of a rank",
}


def _exchange(link: Link, nbytes: int, late_seconds: float) -> Steps[str]:
    operation = Operation(link, "save", _TIMEOUT_SECONDS)
    own = bytes([link.rank % 251]) * nbytes

    def merge(own: bytes, below: list[Any]) -> bytes:
        return b"".join([own, *below])

    def work() -> Steps[Any]:
        yield from link.pause(late_seconds)
        return own if nbytes else Offer(value=link.rank + 1)

    made = Work(work, merge, lambda own, below: None) if nbytes else Work(work)
    try:
        agreement, _, _ = yield from operation.run("agree", "plan", 0, made)
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'missing_ranks', None)}"
    return f"agreed, {agreement.n_ranks} ranks"


def _row(what: str, size: int, nbytes: int = 0, *, killed: int | None = None, late: int | None = None) -> Row:
    simulation = Simulation(size, seed=1)
    tasks = [
        simulation.start(rank, _exchange(link, nbytes, 200.0 if rank == late else 0.5))
        for rank, link in enumerate(simulation.links)
    ]
    if killed is not None:
        simulation.at(0.3, simulation.kill, killed)
    simulation.run(1000.0)
    outcomes = Counter(task.outcome.value for rank, task in enumerate(tasks) if task.outcome and rank != killed)
    return {
        "what": what,
        "ranks": size,
        "verdict": "; ".join(f"{text} ({count})" for text, count in outcomes.items()),
        "seconds": max(task.ended_seconds for rank, task in enumerate(tasks) if rank != killed) - 0.3,
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
    options = parser.parse_args()
    logging.disable()
    cases: dict[str, Callable[[int], Row]] = {
        "one exchange": lambda size: _row("one exchange", size),
        "first plan, 8 items each": lambda size: _row("first plan, 8 items each", size, _ITEMS_NBYTES),
        "a rank is killed": lambda size: _row("a rank is killed", size, killed=size - 1),
        "an inner rank is killed": lambda size: _row("an inner rank is killed", size, killed=size // 2),
        "a rank is 200 s late": lambda size: _row("a rank is 200 s late", size, late=size - 1),
    }
    for case in cases.values():
        show(_COLUMNS, [case(size) for size in options.ranks])


if __name__ == "__main__":
    main()
