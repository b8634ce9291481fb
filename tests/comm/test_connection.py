"""One connection between two ranks, on real gloo."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch.distributed as dist

from robust_dcp.comm import process_group
from robust_dcp.comm.connection import Connection
from robust_dcp.comm.frames import Frame, Kind
from robust_dcp.comm.meeting import Meeting
from robust_dcp.comm.pipe import GlooPipe, Payload, PipeBroken
from robust_dcp.comm.process_group import Address
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


def connect(store: dist.Store, rank: int) -> Callable[[Callable[[Address], None]], GlooPipe]:
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


def test_a_rank_that_does_not_answer_is_lost_when_nobody_listens_any_more_where_it_said_and_not_before() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def wait_in_vain(met: Callable[[Address], None]) -> GlooPipe:
        met(listener.getsockname())
        is_over.wait(60)
        raise PipeBroken("it never answered")

    receiver = Receiver()
    connection = Connection(1, wait_in_vain, receiver)
    in_an_hour = time.monotonic() + 3600
    wait_until(lambda: connection.claim_probe(in_an_hour))
    connection.probe()
    assert not connection.is_lost
    listener.close()
    connection.probe()
    assert connection.is_lost and "nobody listens any more" in receiver.lost_detail
    is_over.set()
    connection.close()


def test_each_rank_finds_where_the_other_listens_in_what_gloo_puts_into_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found: list[Address] = []
    store = dist.HashStore()
    meetings = [Meeting(lambda: store, "group", rank) for rank in (0, 1)]
    pipes: list[Future[GlooPipe]] = [Future(), Future()]

    def meet(rank: int) -> None:
        pipes[rank].set_result(meetings[rank].connect(1 - rank, 0, met=found.append))

    for rank in (0, 1):
        threading.Thread(target=meet, args=(rank,), daemon=True).start()
    for pipe in pipes:
        pipe.result(30)
    assert len(found) == 2
    for address in found:
        socket.create_connection(address, timeout=5).close()
    for pipe in pipes:
        pipe.result().close()


def test_looking_for_sockets_leaves_no_file_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile():
        before = os.listdir("/proc/self/fd")
        found = [each.getsockname() for each in process_group.tcp_sockets()]
        assert listener.getsockname() in found
        assert os.listdir("/proc/self/fd") == before


def test_an_address_that_cannot_be_reached_at_all_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is down for a moment must not make a rank seem dead."""
    is_over, receiver = threading.Event(), Receiver()

    def wait_in_vain(met: Callable[[Address], None]) -> GlooPipe:
        met(("192.0.2.1", 9))
        is_over.wait(60)
        raise PipeBroken("it never answered")

    def unreachable(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(101, "Network is unreachable")

    connection = Connection(1, wait_in_vain, receiver)
    in_an_hour = time.monotonic() + 3600
    wait_until(lambda: connection.claim_probe(in_an_hour))
    monkeypatch.setattr(socket, "create_connection", unreachable)
    connection.probe()
    assert not connection.is_lost and receiver.lost_detail == ""
    is_over.set()
    wait_until(lambda: receiver.lost_detail == "it never answered")
    connection.close()


def test_a_rank_that_answers_after_it_was_found_dead_is_not_talked_to_any_more() -> None:
    """All others have been told that it is gone, so it must not come back into the middle of an exchange."""
    listener = socket.create_server(("127.0.0.1", 0))
    may_answer, closed, receiver = threading.Event(), threading.Event(), Receiver()

    class Answers:
        def close(self) -> None:
            closed.set()

    def answer_late(met: Callable[[Address], None]) -> Answers:
        met(listener.getsockname())
        may_answer.wait(60)
        return Answers()

    connection = Connection(1, answer_late, receiver)  # type: ignore[arg-type]
    in_an_hour = time.monotonic() + 3600
    wait_until(lambda: connection.claim_probe(in_an_hour))
    listener.close()
    connection.probe()
    assert connection.is_lost
    may_answer.set()
    assert closed.wait(30)
    assert connection.pipe() is None and not connection.is_open
    connection.close()
    connection.send(Frame(Kind.BEAT))
    assert connection.n_unacknowledged <= 1, "nothing is kept for a connection that is closed"


def test_a_fault_of_our_own_in_a_connection_is_logged_and_ends_it_as_a_lost_rank_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(met: Callable[[Address], None]) -> GlooPipe:
        raise KeyError("a bug")

    receiver = Receiver()
    connection = Connection(7, fail, receiver)
    wait_until(lambda: receiver.lost_detail != "")
    assert receiver.lost_detail == "KeyError: 'a bug'" and connection.is_lost
    assert "the connection to rank 7 ends" in caplog.text and "Traceback" in caplog.text
    connection.close()
