"""Beats and deadlines of real threads. What silence leads to is in ``test_schedules``, in virtual time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from robust_dcp.comm import Channel, Offer, operation, patience
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeError
from tests.harness.network import GlooNetwork, SimulatedNetwork, quick, run_threads


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


class _Raises(logging.Handler):
    n_raised = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n_raised += 1
        raise LookupError("a handler of the user fails")


def test_an_exception_in_the_thread_of_the_beats_ends_no_beats() -> None:
    def save(link: Link) -> str:
        channel = Channel(Operation(link, "save", 60.0), 0)

        def work() -> None:
            while link.rank == 1 and handler.n_raised < 2:
                channel.stop_if_announced()
                time.sleep(0.02)

        channel.barrier("write", work)
        return "saved"

    handler, logger = _Raises(), logging.getLogger("robust_dcp.comm.operation")
    logger.addHandler(handler)  # rank 0 logs for whom it waits, and so do failing beats
    try:
        with mock.patch.object(patience, "LOG_SECONDS", 0.2):
            assert run_threads(SimulatedNetwork(2), save, timeout_seconds=100) == ["saved"] * 2
    finally:
        logger.removeHandler(handler)


def test_a_rank_keeps_few_beats_however_long_an_exchange_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "_MANY_BEATS", 4)
    n_kept: list[int] = []

    def save(link: Link) -> str:
        channel = Channel(Operation(link, "save", 60.0), 0)

        def work() -> None:
            until = time.monotonic() + 60
            while link.rank and (len(n_kept) < 50 or n_kept[-1] >= 10) and time.monotonic() < until:
                time.sleep(0.06)
                n_kept.append(sum(map(len, link.connections.kept.values())) if link.connections is not None else 0)

        channel.barrier("write", work)
        channel.barrier("commit")
        return "saved"

    assert run_threads(GlooNetwork(2), save, timeout_seconds=100) == ["saved"] * 2
    assert n_kept[-1] < 10, "about fifty were sent"


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
