"""Ranks that are slow are waited for, until a deadline; ranks that are silent are not. On a simulated network."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from robust_dcp.comm import Channel, Offer, patience
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeError, ExchangeTimeout
from tests.harness.network import Fault, FaultKind, SimulatedNetwork, quick, run_threads


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def channel_of(link: Link, name: str = "save", timeout_seconds: float = 1.5) -> Channel:
    return Channel(Operation(link, name, timeout_seconds), 0)


def works_for(channel: Channel, seconds: float, *, says_so: bool) -> None:
    """Work that takes ``seconds``, in steps of 20 ms."""
    end, n_steps = time.monotonic() + seconds, int(seconds / 0.02)
    for step in range(n_steps):
        channel.stop_if_announced()
        time.sleep(max(0.0, end - time.monotonic()) / (n_steps - step))
        if says_so:
            channel.note_progress(step + 1, n_steps)


class _Raises(logging.Handler):
    n_raised = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n_raised += 1
        raise LookupError("a handler of the user fails")


def test_an_exception_in_the_thread_of_the_beats_ends_no_beats() -> None:
    def save(link: Link) -> str:
        channel = channel_of(link)
        channel.barrier("write", lambda: works_for(channel, 4.0, says_so=True) if link.rank == 1 else None)
        return "saved"

    handler, logger = _Raises(), logging.getLogger("robust_dcp.comm.operation")
    logger.addHandler(handler)  # rank 0 logs for whom it waits, and so do failing beats
    try:
        with mock.patch.object(patience, "LOG_SECONDS", 0.2):
            assert run_threads(SimulatedNetwork(2), save) == ["saved"] * 2
    finally:
        logger.removeHandler(handler)
    assert handler.n_raised > 0


@pytest.mark.parametrize("kind", ["works without end", "freezes before it answers"])
def test_a_rank_that_does_not_get_on_fails_at_the_timeout_and_is_named(kind: str) -> None:
    frozen = [Fault(FaultKind.FREEZE_RECEIVER, 4, 5, 1, seconds=6.0)] if kind.startswith("freezes") else []

    def save(link: Link) -> Any:
        channel, began = channel_of(link), time.monotonic()
        with pytest.raises(ExchangeTimeout) as caught:  # noqa: PT012
            channel.barrier("plan")
            channel.barrier("write", lambda: works_for(channel, 20, says_so=False) if link.rank == 5 else None)
        return caught.value.missing_ranks, "barrier 'write'" in str(caught.value), time.monotonic() - began

    for missing, says_where, seconds in run_threads(SimulatedNetwork(9, frozen), save):
        assert missing == [5]
        assert says_where
        assert 1 < seconds < 18


def test_a_rank_that_failed_and_waits_until_its_deadline_is_told_by_what_it_failed_of() -> None:
    """Not as one that waited for a rank that is elsewhere: that one has done nothing wrong."""
    over = threading.Barrier(3)

    def save(link: Link) -> Any:
        channel = Channel(Operation(link, "save", 30.0, deadline_seconds=1.0 if link.rank == 1 else None), 0)
        message, failures = "", []
        if link.rank:
            with pytest.raises(ExchangeError) as caught:
                channel.agree("plan", lambda: Offer(value=1 // (link.rank - 1)))
            message, failures = str(caught.value), [each.rank for each in caught.value.rank_failures]
        over.wait(30)
        return message, failures

    (elsewhere, *told) = run_threads(SimulatedNetwork(3), save)
    assert elsewhere == ("", [])
    for message, failures in told:
        assert "was left by rank 1: ZeroDivisionError" in message and failures == [1] and "missing" not in message


@pytest.mark.parametrize("late", [(0,), (2,), (3,), (0, 1, 2, 3)])
def test_a_rank_that_gets_on_all_the_time_is_still_late_at_the_deadline(late: tuple[int, ...]) -> None:
    """Progress moves the timeout, and never the deadline. It need not be that another rank waits."""
    n_ranks = 4
    over = threading.Event()

    def save(link: Link) -> Any:
        if link.rank:  # the deadline of the root passes first; another one would name the root, for which it waits
            time.sleep(1.0)
        channel = Channel(Operation(link, "save", 30.0, deadline_seconds=4.0), 0)
        channel.agree("plan", Offer)

        def write() -> None:
            done = 0
            while link.rank in late and not over.wait(0.01):
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
        assert "barrier 'write' did not finish within its deadline of 4 seconds" in message
        assert missing and set(missing) <= set(late)
        assert f"{len(missing)} of {n_ranks} ranks missing: rank {missing[0]}" in message
    told = {message.partition("had given up on it: ")[2] or message for message, _ in found}
    assert len(told) == 1, "all ranks raise the same, and a late one is told that the others have given up on it"
