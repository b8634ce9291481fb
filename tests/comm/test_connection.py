"""One connection between two ranks, on real gloo."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

import torch.distributed as dist

from robust_dcp.comm import process_group
from robust_dcp.comm.connection import Connection
from robust_dcp.comm.frames import Frame, Kind
from robust_dcp.comm.pipe import GlooPipe, Payload
from tests.support.waiting import wait_until


class Receiver:
    """Keeps what arrives, and does something before it reads on."""

    def __init__(self, then: Callable[[int], None] = lambda number: None) -> None:
        self.exchanges: list[int] = []
        self.lost_detail = ""
        self._then = then

    def deliver(self, peer: int, frame: Frame, payload: Payload) -> None:
        self.exchanges.append(frame.exchange)
        self._then(frame.exchange)

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None:
        self.lost_detail = detail


def connect(store: dist.Store, rank: int) -> Callable[[Callable[[], None]], GlooPipe]:
    return lambda met: GlooPipe(process_group.connect_pair(store, rank, datetime.timedelta(seconds=20)), 1 - rank)


def test_what_was_sent_twice_and_acknowledged_once_does_not_hold_up_what_comes_after() -> None:
    store = dist.HashStore()
    asked_again, acknowledged = threading.Event(), threading.Event()

    def hold_up(number: int) -> None:
        if number == 0:  # nothing is read before all has been sent twice
            slow.send(Frame(Kind.AGAIN, exchange=0))
            asked_again.wait(20)
        if number == 9:  # the second copies are still to be read when all is acknowledged
            slow.send(Frame(Kind.BEAT))
            wait_until(lambda: fast.n_unacknowledged == 0)
            acknowledged.set()

    receiver = Receiver(hold_up)
    fast = Connection(1, connect(store, 0), Receiver())
    slow = Connection(0, connect(store, 1), receiver)
    for number in range(10):
        fast.send(Frame(Kind.UP, exchange=number))
    wait_until(lambda: fast.repeats == 1)
    asked_again.set()
    assert acknowledged.wait(30)
    for number in range(10, 20):
        fast.send(Frame(Kind.UP, exchange=number))
    wait_until(lambda: len(receiver.exchanges) == 20, 15)
    assert receiver.exchanges == list(range(20))
    fast.close()
    slow.close()
