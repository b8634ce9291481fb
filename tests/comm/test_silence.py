"""Ranks that are slow are waited for, ranks that are silent are not; on a simulated network, with short times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from robust_dcp.comm import Channel
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeTimeout
from tests.support.rank_threads import quick, run_threads
from tests.support.simulated_network import Fault, FaultKind, SimulatedNetwork


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def channel_of(link: Link, name: str = "save", timeout_seconds: float = 0.6) -> Channel:
    return Channel(Operation(link, name, timeout_seconds), 0)


def works_for(channel: Channel, seconds: float, *, says_so: bool) -> None:
    """Work that takes ``seconds``, in steps of 20 ms."""
    end, n_steps = time.monotonic() + seconds, int(seconds / 0.02)
    for step in range(n_steps):
        channel.stop_if_announced()
        time.sleep(max(0.0, end - time.monotonic()) / (n_steps - step))
        if says_so:
            channel.note_progress(step + 1, n_steps)


@pytest.mark.parametrize("straggler", [0, 2, 3])
def test_a_straggler_that_gets_on_is_waited_for_longer_than_the_timeout(straggler: int) -> None:
    def save(link: Link) -> str:
        channel = channel_of(link)
        channel.barrier("plan")
        channel.barrier("write", lambda: works_for(channel, 2.5, says_so=True) if link.rank == straggler else None)
        return "saved"

    assert run_threads(SimulatedNetwork(4), save) == ["saved"] * 4
