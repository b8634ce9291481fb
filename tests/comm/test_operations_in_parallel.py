"""Several operations on one group at the same time, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeError
from tests.comm.messages import Note
from tests.harness.network import SimulatedNetwork, run_threads


def at_once(functions: list[Callable[[], Any]]) -> list[Any]:
    """What each returned; each in a thread of its own, started in this order."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [each.result() for each in [threads.submit(function) for function in functions]]


def test_operations_run_at_the_same_time_though_ranks_start_them_in_different_order() -> None:
    def gather_often(link: Link, operation: str) -> list[list[int] | None]:
        channel, found = Channel(Operation(link, operation, 40.0), 0), []
        for turn in range(10):
            _, notes = channel.gather(f"turn {turn}", lambda: Note(channel.rank, operation.encode() * 20_000), Note)
            found.append(
                None if notes is None else [note.rank for note in notes if note and operation.encode() in note.data]
            )
        return found

    def two_saves_and_a_load(link: Link) -> list[Any]:
        operations = ["load 1", "save 1", "save 2"]
        order = operations if link.rank % 2 else operations[::-1]
        found = at_once([lambda name=name: gather_often(link, name) for name in order])  # type: ignore[misc]
        return [found[order.index(name)] for name in operations]

    outcomes = run_threads(SimulatedNetwork(4), two_saves_and_a_load)
    assert outcomes == [[[[0, 1, 2, 3]] * 10] * 3, *[[[None] * 10] * 3] * 3]


def test_a_timeout_in_one_operation_leaves_the_other_alone() -> None:
    given_up = threading.Event()

    def one_times_out(link: Link) -> list[Any]:
        Channel(Operation(link, "connect", 40.0), 0).barrier("all are here")

        def time_out() -> list[int] | None:
            channel = Channel(Operation(link, "save 1", 3.0), 0)

            def wait_until_told() -> None:
                while link.rank == 1:
                    channel.stop_if_announced()
                    threading.Event().wait(0.02)

            channel.barrier("plan")
            with pytest.raises(ExchangeError) as caught:
                channel.barrier("write", wait_until_told)
            given_up.set()
            return caught.value.ranks

        def gather_until_then() -> int:
            channel, n_turns = Channel(Operation(link, "save 2", 40.0), 0), 0
            while not channel.agree(f"turn {n_turns}", lambda: Offer(flags=int(given_up.is_set())))[1].count(1):
                n_turns += 1
            return n_turns

        return at_once([time_out, gather_until_then])

    outcomes = run_threads(SimulatedNetwork(4), one_times_out, timeout_seconds=60)
    assert [ranks for ranks, _ in outcomes] == [[1]] * 4
    assert len({n_turns for _, n_turns in outcomes}) == 1
    assert outcomes[0][1] > 0
