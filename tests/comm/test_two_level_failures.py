"""What can go wrong on the way through node leaders: cured or named, the same on all ranks, within the timeout."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel, bundle, wire
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.nodes import RANKS_PER_NODE, TWO_LEVEL_GATHER
from robust_dcp.comm.transport import Transport
from robust_dcp.errors import ExchangeTimeout
from tests.comm import faults
from tests.comm.messages import Note, OtherNote
from tests.support.ranks import Outcome, RankError, errors, run_ranks, values

TWO_NODES = {RANKS_PER_NODE: "2", TWO_LEVEL_GATHER: "on"}
"""For 4 ranks: 0 is the coordinator and leads 1, rank 2 leads 3."""

Change = Callable[[bytearray], bytearray]


def _the_one_error(caught: list[RankError]) -> RankError:
    assert len({(error.type_name, error.message, error.rank_failures) for error in caught}) == 1
    return caught[0]


def _gather(channel: Channel, phase: str = "plan") -> bool:
    notes = channel.gather(phase, lambda: Note(channel.rank, b"abc" * 100), Note)
    return notes is None or notes == [Note(rank, b"abc" * 100) for rank in range(channel.size)]


def _gather_with_damage(damaged: dict[int, set[int]], change: Change) -> tuple[bool, int]:
    """``damaged``: which arrivals at which rank."""
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank in damaged:
        faults.inject(channel, payload=faults.Damage(damaged[channel.rank], change).payload)
    with channel.recording() as stats:
        try:
            right = _gather(channel)
        finally:
            assert _gather(channel, "next")
            assert channel._link.generation == 0
    return right, stats.repeats


@pytest.mark.parametrize("change", [faults.zeros, faults.one_bit_flipped, faults.second_half_missing])
def test_what_is_damaged_on_the_way_to_the_leader_is_asked_for_once_more(change: Change) -> None:
    assert values(run_ranks(4, _gather_with_damage, {2: {0}}, change, env=TWO_NODES)) == [(True, 1)] * 4


@pytest.mark.parametrize("change", [faults.zeros, faults.one_bit_flipped, faults.second_half_missing])
def test_a_bundle_that_is_damaged_is_asked_for_once_more(change: Change) -> None:
    # At the coordinator: first the payload of rank 1, then the bundle.
    assert values(run_ranks(4, _gather_with_damage, {0: {1}}, change, env=TWO_NODES)) == [(True, 1)] * 4


def test_damage_at_the_coordinator_and_at_leaders_at_once_is_cured() -> None:
    damaged = {0: {0, 2}, 2: {0}, 4: {0}}
    outcomes = values(run_ranks(6, _gather_with_damage, damaged, faults.zeros, env=TWO_NODES))
    # All three of the first level in one more round, one of the two bundles in another.
    assert outcomes == [(True, 2)] * 6


@pytest.mark.parametrize(("sender", "receiver", "which"), [(3, 2, {0, 1}), (2, 0, {1, 2}), (1, 0, {0, 1})])
def test_what_is_damaged_twice_is_named_on_all_ranks(sender: int, receiver: int, which: set[int]) -> None:
    caught = errors(run_ranks(4, _gather_with_damage, {receiver: which}, faults.zeros, env=TWO_NODES))
    error = _the_one_error(caught)
    assert error.type_name == "ExchangeError"
    assert f"rank {sender} in 'plan' arrived damaged twice at rank {receiver}" in error.message
    assert error.fields["ranks"] == [sender]
    assert [failure.rank for failure in error.rank_failures] == [receiver]


def _fail_on(ranks: list[int]) -> None:
    channel = Channel.for_group(timeout_seconds=50)

    def work() -> Note:
        if channel.rank in ranks:
            raise KeyError(f"no weight on {channel.rank}")
        return Note(channel.rank)

    try:
        channel.gather("plan", work, Note)
    finally:
        assert _gather(channel, "next")
        assert channel._link.generation == 0


@pytest.mark.parametrize("ranks", [[3], [2], [0, 2, 3]])
def test_an_exception_on_any_rank_is_raised_on_all(ranks: list[int]) -> None:
    error = _the_one_error(errors(run_ranks(4, _fail_on, ranks, env=TWO_NODES)))
    assert [(failure.rank, failure.type_name) for failure in error.rank_failures] == [
        (rank, "KeyError") for rank in ranks
    ]


def _send_nonsense(culprit: int) -> None:
    channel = Channel.for_group(timeout_seconds=50)
    try:
        if channel.rank == culprit:
            wire_encode = wire.encode
            wire.encode = lambda message: wire_encode(OtherNote("nonsense") if isinstance(message, Note) else message)
        channel.gather("plan", lambda: Note(channel.rank), Note)
    finally:
        if channel.rank == culprit:
            wire.encode = wire_encode
        assert _gather(channel, "next")
        assert channel._link.generation == 0


@pytest.mark.parametrize(("culprit", "receiver"), [(3, 2), (2, 2), (1, 0)])
def test_a_rank_that_sends_nonsense_is_named_itself_and_not_its_leader(culprit: int, receiver: int) -> None:
    error = _the_one_error(errors(run_ranks(4, _send_nonsense, culprit, env=TWO_NODES)))
    assert error.type_name == "ExchangeError"
    assert f"rank {receiver} cannot use what rank {culprit} sent in 'plan'" in error.message
    assert "are no Note" in error.message
    assert error.fields["ranks"] == [culprit]
    assert error.fields["phase"] == "plan"


def _make_a_bundle_of(others: bool) -> None:
    channel = Channel.for_group(timeout_seconds=50)
    encode = bundle.Bundler.encode

    def encode_wrongly(bundler: bundle.Bundler[Note]) -> bytes:
        if not others:
            raise MemoryError("no memory for a bundle")
        other: bundle.Bundler[Note] = bundle.Bundler(Note)
        other.add(7, wire.encode(Note(7)))
        return encode(other)

    if channel.rank == 2:
        bundle.Bundler.encode = encode_wrongly  # type: ignore[method-assign]
    try:
        channel.gather("plan", lambda: Note(channel.rank), Note)
    finally:
        bundle.Bundler.encode = encode  # type: ignore[method-assign]
        assert _gather(channel, "next")
        assert channel._link.generation == 0


def test_a_bundle_of_other_ranks_than_expected_names_the_leader_on_all_ranks() -> None:
    error = _the_one_error(errors(run_ranks(4, _make_a_bundle_of, True, env=TWO_NODES)))
    assert error.type_name == "ExchangeError"
    assert error.message == (
        "rank 0 cannot use what rank 2 sent in 'plan': "
        "the bundle that rank 2 made for ranks [2, 3] is malformed: it is for ranks [7]"
    )
    assert error.fields["ranks"] == [2]


def test_a_leader_that_cannot_make_its_bundle_fails_all_ranks() -> None:
    error = _the_one_error(errors(run_ranks(4, _make_a_bundle_of, False, env=TWO_NODES)))
    assert [(failure.rank, failure.type_name) for failure in error.rank_failures] == [(2, "MemoryError")]


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(rank: int, method: str) -> None:
    channel = Channel.for_group(timeout_seconds=30)
    assert _gather(channel, "connect")
    if channel.rank == rank:
        setattr(channel._link.transport(Deadline(1)), method, _die)
    channel.gather("plan", lambda: Note(channel.rank, bytes(1000)), Note)


def _errors_of_survivors(outcomes: list[Outcome], killed: int) -> list[RankError]:
    assert outcomes[killed].exitcode == -signal.SIGKILL
    return errors(outcomes, [outcome.rank for outcome in outcomes if outcome.rank != killed])


@pytest.mark.parametrize(
    ("rank", "method"),
    [
        pytest.param(4, "start_receiving", id="leader before it has the messages of its node"),
        pytest.param(4, "send", id="leader before it sends its bundle"),
        pytest.param(5, "send", id="rank before it sends to its leader"),
        pytest.param(0, "start_receiving", id="coordinator"),
    ],
)
def test_a_rank_that_is_killed_on_the_way_is_named_at_once_by_all_others(rank: int, method: str) -> None:
    error = _the_one_error(_errors_of_survivors(run_ranks(8, _killed, rank, method, env=TWO_NODES), rank))
    assert error.type_name == "ExchangeTimeout"
    assert error.fields["missing_ranks"] == [rank]
    # None waited for the timeout: connections that break are noticed, and passed on.
    assert f"broke off: connection lost; 1 of 8 ranks missing: rank {rank} (host " in error.message


def _a_leader_hangs() -> None:
    channel = Channel.for_group(timeout_seconds=1.5)
    assert _gather(channel, "connect")
    store = dist.distributed_c10d._get_default_store()
    transport: Transport = channel._link.transport(Deadline(1))
    if channel.rank == 2:
        transport.send = lambda *_: store.wait(["done"], datetime.timedelta(seconds=50))  # type: ignore[method-assign]
    with pytest.raises(ExchangeTimeout) as caught:
        _gather(channel)
    store.set("done", "1")
    assert caught.value.missing_ranks == [2]
    assert _gather(channel, "next")


def test_a_leader_that_hangs_is_named_within_the_timeout_and_can_come_back() -> None:
    values(run_ranks(4, _a_leader_hangs, env=TWO_NODES))
