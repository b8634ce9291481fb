"""The connections that tensors pass over end in bounded time, whatever the other rank does, and leave nothing open."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from robust_dcp.comm import process_group
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.pipe import GlooPipe, PipeBroken
from robust_dcp.comm.relay import RelayPipes
from tests.support.waiting import wait_until

Connect = Callable[[int, int, Callable[[], None]], GlooPipe]


class Closable:
    """A pipe that only keeps whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def receiving(pipes: RelayPipes, *, seconds: float = 30.0) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits for 4 bytes of rank 1, and what it raises."""
    raised: list[BaseException] = []

    def receive() -> None:
        try:
            pipes.move([], [(torch.zeros(4, dtype=torch.uint8), 1)], Deadline(seconds))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread, raised


def test_a_rank_that_does_not_come_to_connect_is_named_when_the_time_is_over() -> None:
    over = threading.Event()

    def never(peer: int, generation: int, waiting: Callable[[], None]) -> Any:
        over.wait(60)
        raise PipeBroken("over")

    thread, raised = receiving(RelayPipes(never), seconds=0.05)
    thread.join(30)
    over.set()
    assert [type(error) for error in raised] == [PipeBroken]
    assert "rank 1 did not come to connect" in str(raised[0])


def test_an_interrupt_ends_the_wait_for_a_rank_and_the_attempt_to_connect_to_it() -> None:
    connecting, ended = threading.Event(), threading.Event()

    def wait_for_the_other(peer: int, generation: int, waiting: Callable[[], None]) -> Any:
        connecting.set()
        try:
            while True:
                waiting()  # as a meeting does while it waits
                ended.wait(0.005)
        finally:
            ended.set()

    pipes = RelayPipes(wait_for_the_other)
    thread, raised = receiving(pipes)
    assert connecting.wait(30)
    pipes.interrupt()
    thread.join(30)
    assert "rank 1 had not come to connect" in str(raised[0])
    assert ended.wait(30), "nobody looks for that rank any more"


def test_a_rank_that_comes_after_the_interrupt_finds_the_connection_closed() -> None:
    pipe, interrupted = Closable(), threading.Event()

    def late(peer: int, generation: int, waiting: Callable[[], None]) -> Any:
        interrupted.wait(30)
        return pipe

    pipes = RelayPipes(late)
    thread, raised = receiving(pipes)
    wait_until(lambda: 1 in pipes._pipes)
    pipes.interrupt()
    thread.join(30)
    interrupted.set()
    wait_until(lambda: pipe.is_closed)
    assert isinstance(raised[0], PipeBroken)


def test_why_connecting_failed_is_what_the_relay_says_and_the_next_one_connects_anew() -> None:
    store = dist.HashStore()
    generations: list[int] = []

    def refuses_at_first(peer: int, generation: int, waiting: Callable[[], None]) -> GlooPipe:
        generations.append(generation)
        if generation == 0:
            raise PipeBroken("the store of the process group does not answer")
        timeout = datetime.timedelta(seconds=20)
        return GlooPipe(process_group.connect_pair(dist.PrefixStore(f"{generation}", store), 0, timeout), 1)

    pipes = RelayPipes(refuses_at_first)
    thread, raised = receiving(pipes)
    thread.join(30)
    assert "the store of the process group does not answer" in str(raised[0])
    pipes.reset()
    other = RelayPipes(
        lambda peer, generation, waiting: GlooPipe(
            process_group.connect_pair(dist.PrefixStore("1", store), 1, datetime.timedelta(seconds=20)), 0
        )
    )
    sender = threading.Thread(
        target=other.move, args=([(torch.arange(4, dtype=torch.uint8), 0)], [], Deadline(30)), daemon=True
    )
    sender.start()
    received = torch.zeros(4, dtype=torch.uint8)
    pipes.move([], [(received, 1)], Deadline(30))
    sender.join(30)
    assert received.tolist() == [0, 1, 2, 3] and generations == [0, 1]
    pipes.interrupt()
    other.interrupt()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connection_that_is_closed_ends_the_wait_of_the_other_side(rank: int) -> None:
    store = dist.HashStore()

    def connect(own: int) -> Connect:
        timeout = datetime.timedelta(seconds=20)
        return lambda peer, generation, waiting: GlooPipe(process_group.connect_pair(store, own, timeout), 1 - own)

    sides = [RelayPipes(connect(own)) for own in (0, 1)]
    raised: list[BaseException] = []

    def receive() -> None:
        try:
            sides[rank].move([], [(torch.zeros(4, dtype=torch.uint8), 1 - rank)], Deadline(60))
        except PipeBroken as error:
            raised.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    other = sides[1 - rank]
    other._pipe(rank).result(30)
    other.interrupt()
    thread.join(30)
    assert len(raised) == 1
    sides[rank].interrupt()
