"""An operation that may take only so long ends on all ranks when the time is over, and so says the error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeTimeout
from tests.support.rank_threads import quick, run_threads
from tests.support.simulated_network import SimulatedNetwork


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.mark.parametrize("late", [0, 2, 3])
def test_a_rank_that_gets_on_all_the_time_is_still_late_at_the_deadline(late: int) -> None:
    """Progress moves the timeout, and never the deadline."""
    n_ranks = 4
    over = threading.Event()

    def save(link: Link) -> Any:
        channel = Channel(Operation(link, "save", 30.0, deadline_seconds=1.0), 0)
        channel.agree("plan", Offer)

        def write() -> None:
            done = 0
            while link.rank == late and not over.wait(0.01):
                channel.stop_if_announced()
                channel.note_progress(done := done + 1, 10_000)

        with pytest.raises(ExchangeTimeout) as caught:
            channel.barrier("write", write)
        return caught.value.message, caught.value.missing_ranks

    try:
        found = run_threads(SimulatedNetwork(n_ranks), save)
    finally:
        over.set()
    for message, missing in found:
        assert "barrier 'write' did not finish within its deadline of 1 seconds" in message
        assert missing == [late] and f"1 of {n_ranks} ranks missing: rank {late} " in message
    told = {message.partition("had given up on it: ")[2] or message for message, _ in found}
    assert len(told) == 1, "all ranks raise the same, and a late one is told that the others have given up on it"


def test_an_operation_that_keeps_its_deadline_is_not_disturbed() -> None:
    def save(link: Link) -> int:
        channel = Channel(Operation(link, "save", 30.0, deadline_seconds=60.0), 0)
        return channel.agree("plan", Offer).n_ranks + channel.agree("write", Offer).n_ranks

    assert run_threads(SimulatedNetwork(3), save) == [6, 6, 6]
