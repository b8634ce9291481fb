"""Several operations on one group at the same time, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError
from tests.comm.messages import Note
from tests.harness.ranks import run_ranks, values


def at_once(functions: list[Callable[[], Any]]) -> list[Any]:
    """What each returned, or the exception that it raised; each in a thread of its own, started in this order."""
    results: list[Any] = [None] * len(functions)

    def call(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _gather_often(operation: str, nbytes: int) -> list[list[int] | None]:
    channel = Channel.for_group(operation=operation, timeout_seconds=40)
    found = []
    for turn in range(10):
        notes = channel.gather(f"turn {turn}", lambda: Note(channel.rank, operation.encode() * nbytes), Note)
        found.append(
            None if notes is None else [note.rank for note in notes if note and operation.encode() in note.data]
        )
    return found


def _saves_and_a_load() -> list[Any]:
    operations = ["save 1", "save 2", "load 1"]
    if dist.get_rank() % 2:
        operations.reverse()
    found = at_once([lambda name=name: _gather_often(name, 20_000) for name in operations])  # type: ignore[misc]
    return [found[operations.index(name)] for name in sorted(operations)]


def test_operations_run_at_the_same_time_though_ranks_start_them_in_different_order() -> None:
    outcomes = values(run_ranks(4, _saves_and_a_load))
    assert outcomes[0] == [[[0, 1, 2, 3]] * 10] * 3
    assert outcomes[1:] == [[[None] * 10] * 3] * 3


def _one_times_out() -> list[Any]:
    given_up = threading.Event()
    Channel.for_group(operation="connect", timeout_seconds=40).barrier("all are here")

    def time_out() -> list[int] | None:
        channel = Channel.for_group(operation="save 1", timeout_seconds=1.5)
        try:
            channel.barrier("plan")
            with pytest.raises(ExchangeError) as caught:
                channel.barrier("write", (lambda: None) if channel.rank != 1 else lambda: _wait_until_told(channel))
            return caught.value.ranks
        finally:
            given_up.set()

    def gather_until_then() -> int:
        channel = Channel.for_group(operation="save 2", timeout_seconds=40)
        n_turns = 0
        while not channel.agree(f"turn {n_turns}", lambda: Offer(flags=int(given_up.is_set()))).count(1):
            n_turns += 1
        return n_turns

    return at_once([time_out, gather_until_then])


def _wait_until_told(channel: Channel) -> None:
    while channel.failure_announced() is None:
        threading.Event().wait(0.02)
    channel.stop_if_announced()


def test_a_timeout_in_one_operation_leaves_the_other_alone() -> None:
    outcomes = values(run_ranks(4, _one_times_out))
    assert [ranks for ranks, _ in outcomes] == [[1]] * 4
    assert len({n_turns for _, n_turns in outcomes}) == 1
    assert outcomes[0][1] > 0
