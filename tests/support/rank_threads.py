"""Ranks that are threads of this process, on a simulated network: the real channel, with beats of milliseconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from robust_dcp.comm import patience
from robust_dcp.comm.link import Link
from tests.support.simulated_network import SimulatedNetwork

__all__ = ["quick", "run_threads"]


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Beats every 50 ms, and other times in proportion: within the block, for all links of the process.

    But the store may take long, since a frozen rank does not reach it, while its clock goes on.
    """
    seconds_of = {"BEAT": 0.05, "RECONNECT": 0.5, "TICK": 0.01, "GONE": 0.005, "STORE_ANSWER": 20.0}
    seconds_of |= {"ROLL_CALL": 3.0, "VERDICT": 8.0}  # who is alive has to answer, also where 72 ranks share a core
    with contextlib.ExitStack() as stack:
        for name, seconds in seconds_of.items():
            stack.enter_context(mock.patch.object(patience, f"{name}_SECONDS", seconds))
        yield


def run_threads(
    network: SimulatedNetwork, function: Callable[[Link], Any], *, timeout_seconds: float = 30.0
) -> list[Any]:
    """What ``function(link)`` returned on each rank, in rank order, or the exception that it raised.

    Raises:
        AssertionError: a rank that was not killed has not ended within ``timeout_seconds``.
    """
    ranks = tuple(range(network.size))
    links = [network.link(rank) for rank in ranks]
    results: dict[int, Any] = {}

    def be_rank(rank: int) -> None:
        try:
            results[rank] = function(links[rank])
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_seconds
    for rank, thread in enumerate(threads):
        while thread.is_alive() and rank not in network.killed and time.monotonic() < end:
            thread.join(0.05)
    found = [results.get(rank) for rank in ranks]
    late = [rank for rank in ranks if rank not in results and rank not in network.killed]
    network.close()
    for each in links:
        each.close()
    for thread in threads:
        thread.join(timeout_seconds)
    if late:
        raise AssertionError(f"ranks {late} had not ended after {timeout_seconds:g} seconds; the others: {results}")
    return found
