"""Ranks that do not come, end, or come late are named within the timeout, and the channel works again afterwards."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.frames import Frame, Kind
from robust_dcp.errors import ExchangeError, ExchangeTimeout
from tests.comm.messages import Note
from tests.harness.ranks import Outcome, RankError, errors, run_ranks, values


def _wait_for(key: str) -> None:
    dist.distributed_c10d._get_default_store().wait([key], datetime.timedelta(seconds=50))


def _signal(key: str) -> None:
    dist.distributed_c10d._get_default_store().set(key, "1")


def _one_comes_late(connected: bool, late: int) -> tuple[float, str]:
    channel = Channel.for_group(timeout_seconds=1.5)
    if connected:
        channel.barrier("connect")
    if channel.rank == late:
        _wait_for("given up")
    began = time.monotonic()
    with pytest.raises(ExchangeTimeout) as caught:
        channel.agree("save 3: plan", Offer)
    seconds = time.monotonic() - began
    _signal("given up")
    assert caught.value.phase == "save 3: plan"
    assert caught.value.missing_ranks == [late]
    assert caught.value.timeout_seconds == 1.5
    # All are here now.
    channel = Channel.for_group(timeout_seconds=40)
    assert len(channel.all_gather("next", lambda: Note(channel.rank), Note)) == channel.size
    return seconds, str(caught.value)


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("connected", [False, True])
def test_a_late_rank_is_named_on_both_sides_and_the_next_exchange_works(connected: bool, late: int) -> None:
    outcomes = values(run_ranks(4, _one_comes_late, connected, late))
    for rank, (seconds, message) in enumerate(outcomes):
        assert f"1 of 4 ranks missing: rank {late}" in message
        assert "did not finish: no progress for 1.5 seconds" in message
        if rank == late:
            assert message.startswith(f"this rank ({late}) came after the others had given up on it")
            assert seconds < 5
        else:
            assert 1.4 < seconds < 9
            assert "has not come" in message or "no sign of life" in message


def _slow_work() -> str:
    channel = Channel.for_group(timeout_seconds=6)
    channel.barrier("connect")

    def work() -> None:
        if channel.rank == 0:
            _wait_for("given up")

    with pytest.raises(ExchangeTimeout) as caught:
        channel.barrier("save 3: write", work)
    _signal("given up")
    return str(caught.value)


def test_a_rank_that_is_still_at_work_is_told_from_one_that_never_came() -> None:
    for message in values(run_ranks(3, _slow_work)):
        assert "rank 0 (host" in message
        assert "is still at its own work for barrier 'save 3: write', which has not got on for " in message


def _killed(when: str) -> float:
    channel = Channel.for_group(timeout_seconds=30)
    channel.barrier("connect")
    if channel.rank == 2:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "within":
            _die_after_header(channel)

    began = time.monotonic()
    try:
        for i in range(100):
            channel.gather(f"step {i}", partial(_work, channel, when, i), Note)
    finally:
        # None waits for the timeout: connections that break are noticed, and passed on.
        assert time.monotonic() - began < 15
    return 0


def _work(channel: Channel, when: str, i: int) -> Note:
    if channel.rank == 2 and when == "at work" and i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return Note(channel.rank, bytes(1000))


def _die_after_header(channel: Channel) -> None:
    """Killed when it has sent its part up the tree, and waits for the verdict."""
    send = channel._operation._send

    def send_and_die(exchange: Any, peer: int, frame: Frame, payload: Any) -> None:
        send(exchange, peer, frame, payload)
        if frame.kind == Kind.UP:
            os.kill(os.getpid(), signal.SIGKILL)

    channel._operation._send = send_and_die  # type: ignore[method-assign]


def _errors_of_survivors(outcomes: list[Outcome], killed: int) -> list[RankError]:
    assert outcomes[killed].exitcode == -signal.SIGKILL
    return errors(outcomes, [outcome.rank for outcome in outcomes if outcome.rank != killed])


@pytest.mark.parametrize("when", ["before", "at work", "within"])
def test_a_killed_rank_is_named_at_once_by_all_others(when: str) -> None:
    caught = _errors_of_survivors(run_ranks(5, _killed, when), 2)
    assert len({error.message for error in caught}) == 1
    for error in caught:
        assert error.type_name == "ExchangeTimeout"
        assert error.is_a(TimeoutError)
        assert error.fields["missing_ranks"] == [2]
        assert "broke off: connection lost; 1 of 5 ranks missing: rank 2" in error.message
        assert "closed its connection: its process has ended, or was cut off" in error.message


def _two_killed() -> list[list[int]]:
    channel = Channel.for_group(timeout_seconds=30)
    channel.barrier("connect")
    if channel.rank in (1, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    named: list[list[int]] = []
    for attempt in range(5):
        again = channel if attempt == 0 else Channel.for_group(timeout_seconds=4)
        with pytest.raises(ExchangeTimeout) as caught:
            again.gather("step", lambda: Note(channel.rank, bytes(1000)), Note)
        named.append(caught.value.missing_ranks or [])
        if {rank for ranks in named for rank in ranks} == {1, 4}:
            break
    return named


def test_two_killed_ranks_are_both_named_together_or_one_after_the_other() -> None:
    outcomes = run_ranks(6, _two_killed)
    named = values([outcomes[rank] for rank in (0, 2, 3, 5)])
    assert named[1:] == named[:1] * 3
    assert all(ranks and set(ranks) <= {1, 4} for ranks in named[0])
    assert {rank for ranks in named[0] for rank in ranks} == {1, 4}


def _killed_before_it_connects() -> None:
    channel = Channel.for_group(timeout_seconds=4)
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.barrier("first")


def test_a_rank_that_ended_before_the_first_exchange_is_named_after_the_timeout() -> None:
    for error in _errors_of_survivors(run_ranks(3, _killed_before_it_connects), 1):
        assert error.fields["missing_ranks"] == [1]
        assert "rank 1 has not come" in error.message


def _store_host_killed() -> None:
    rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["STORE_PORT"])
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=datetime.timedelta(seconds=40))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    channel = Channel.for_group(timeout_seconds=30)
    channel.barrier("connect")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        channel.barrier("step")
    finally:
        assert time.monotonic() - began < 20


def test_a_rank_that_is_killed_with_the_store_that_it_hosts_ends_the_exchange_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcomes = run_ranks(3, _store_host_killed, init=False, env={"STORE_PORT": str(port)})
    for error in _errors_of_survivors(outcomes, 0):
        assert error.type_name == "ExchangeTimeout"
        assert error.fields["missing_ranks"] == [0]


def _stopped_within() -> float:
    channel = Channel.for_group(timeout_seconds=1.5)
    channel.barrier("connect")
    if channel.rank == 1:
        send = channel._operation._send
        # Its work is done, but it hangs before it says so; its beats go on.
        channel._operation._send = lambda exchange, peer, frame, payload: (  # type: ignore[method-assign]
            _wait_for("done") if frame.kind == Kind.UP else None,
            send(exchange, peer, frame, payload),
        )
    began = time.monotonic()
    with pytest.raises(ExchangeTimeout) as caught:
        channel.gather("step", lambda: Note(channel.rank, bytes(1000)), Note)
    _signal("done")
    assert caught.value.missing_ranks == [1]
    if channel.rank == 1:
        channel._operation._send = send  # type: ignore[method-assign]
    channel.barrier("next")
    return time.monotonic() - began


def test_a_rank_that_hangs_within_an_exchange_is_named_and_can_come_back() -> None:
    assert max(values(run_ranks(3, _stopped_within))) < 30


def _fail_often() -> int:
    channel = Channel.for_group(timeout_seconds=3)
    for turn in range(4):
        late = turn % channel.size
        if channel.rank == late:
            _wait_for(f"given up {turn}")
        with pytest.raises(ExchangeTimeout) as caught:
            channel.barrier(f"turn {turn}")
        assert caught.value.missing_ranks == [late]
        _signal(f"given up {turn}")
        Channel.for_group(timeout_seconds=30).barrier(f"all {turn}")
    return channel._operation.key.occurrence


def test_a_channel_survives_any_number_of_failures() -> None:
    # Each failure ends an operation, and so does each of the channels in between.
    assert values(run_ranks(3, _fail_often)) == [6, 6, 6]


def _interrupted_while_waiting() -> tuple[str, float]:
    channel = Channel.for_group(timeout_seconds=40)
    channel.barrier("connect")
    store = dist.distributed_c10d._get_default_store()
    if channel.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store.set("pid", str(os.getpid()))
    else:
        _wait_for("pid")
        time.sleep(0.3)
        os.kill(int(store.get("pid").decode()), signal.SIGINT)
    began = time.monotonic()
    with pytest.raises((ExchangeError, KeyboardInterrupt)) as caught:
        channel.barrier("step")
    seconds = time.monotonic() - began
    channel.barrier("next")
    return repr(caught.value.args[0] if caught.value.args else caught.value), seconds


def test_an_interrupt_while_waiting_ends_the_exchange_on_all_ranks_at_once() -> None:
    (first, _), (second, seconds) = values(run_ranks(2, _interrupted_while_waiting))
    assert first == "KeyboardInterrupt()"
    assert "was left by rank 0: KeyboardInterrupt" in second
    assert seconds < 10
