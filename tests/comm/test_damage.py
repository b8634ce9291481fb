"""What arrives damaged is asked for once more; what arrives damaged twice is named, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError
from tests.comm.messages import Note, OtherNote
from tests.harness.network import Fault, FaultKind, SimulatedNetwork, run_channels


def damaging(size: int, kind: FaultKind, sender: int, receiver: int) -> SimulatedNetwork:
    """The first frame is a beat, which nobody misses."""
    return SimulatedNetwork(size, [Fault(kind, sender, receiver, number) for number in range(1, 1000)])


def the_one_error(errors: list[Any]) -> ExchangeError:
    assert {type(error) for error in errors} == {ExchangeError}, errors
    assert len({error.message for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("kind", "verb", "sender", "receiver"),
    [
        (FaultKind.DAMAGE_FRAME, "gather", 2, 0),
        (FaultKind.DAMAGE_PAYLOAD, "gather", 1, 0),
        (FaultKind.DAMAGE_PAYLOAD, "broadcast", 0, 1),
    ],
)
def test_what_is_damaged_twice_is_named_on_all_ranks(kind: FaultKind, verb: str, sender: int, receiver: int) -> None:
    network = damaging(4, kind, sender, receiver)

    def exchange(channel: Channel) -> None:
        note = Note(channel.rank, b"abc" * 100)
        try:
            if verb == "gather":
                channel.gather("plan", lambda: note, Note)
            else:
                channel.broadcast("plan", lambda: note, Note)
            channel.barrier("write")  # for the root, an exchange is over when its reply has left
        finally:
            if channel.rank == receiver:
                network.heal()
            # Whether it ended well or not, the next one does.
            found = channel.agree("next", lambda: Offer(value=channel.rank + 1))
            assert (found.lowest, found.highest) == (1, channel.size)

    error = the_one_error(run_channels(network, exchange))
    assert f"{verb} 'plan': what rank {sender} sent to rank {receiver} arrived damaged twice: " in error.message
    assert "a frame arrived" in error.message or (" payload of " in error.message and "was 0x" in error.message)
    assert (error.phase, error.ranks) == ("plan", [sender])


def test_a_verdict_that_is_damaged_twice_ends_the_operation_on_all_ranks() -> None:
    def lose_the_verdict(channel: Channel) -> None:
        # For the root the first exchange is over when the verdict has left: that it was lost it hears in the next one.
        channel.barrier("plan")
        channel.barrier("write")

    error = the_one_error(run_channels(damaging(4, FaultKind.DAMAGE_FRAME, 0, 2), lose_the_verdict))
    assert "barrier 'plan': what rank 0 sent to rank 2 arrived damaged twice" in error.message
    assert error.ranks == [0]


@pytest.mark.parametrize("verb", ["broadcast", "scatter"])
def test_a_rank_that_cannot_use_what_it_was_sent_ends_the_operation_on_all_ranks(verb: str) -> None:
    def send_something_else(channel: Channel) -> None:
        message_type = OtherNote if channel.rank == 1 else Note
        with channel.together():
            if verb == "broadcast":
                channel.broadcast("plan", lambda: Note(7), message_type)
            else:
                channel.scatter("plan", lambda: [Note(rank) for rank in range(channel.size)], message_type)
            channel.barrier("write")

    for error in run_channels(SimulatedNetwork(4), send_something_else):
        assert isinstance(error, ExchangeError)
        told = [error.message, *(failure.message for failure in error.rank_failures)]
        assert any("rank 1 cannot use what rank 0 sent in 'plan'" in text for text in told)


def test_ranks_in_different_phases_of_an_operation_are_listed_by_what_they_do() -> None:
    def other_phase(channel: Channel) -> None:
        channel.barrier("connect")
        try:
            if channel.rank == 2:
                channel.barrier("load 1: plan")
            else:
                channel.gather("save 3: plan", lambda: Note(channel.rank), Note)
        except ExchangeError:
            channel.barrier("next")
            raise

    error = the_one_error(run_channels(SimulatedNetwork(4), other_phase))
    assert error.message.startswith("the ranks are in different operations: ranks [0, 1, 3] are in gather 'save 3: pl")
    assert "rank 2 is in barrier 'load 1: plan' of save" in error.message
    assert error.ranks == [2]
