"""What arrives damaged is asked for once more; what arrives damaged twice is named, on all ranks."""

from __future__ import annotations

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError
from tests.comm.faults import Damage
from tests.comm.messages import Note, OtherNote
from tests.harness.ranks import errors, run_ranks

FROM_NOW_ON = range(1000)
AFTER_THE_FIRST = range(1, 1000)
"""The first frame is a beat, which nobody misses."""


def _exchange_with_damage(verb: str, sender: int, receiver: int, which: range, frames: bool) -> bool:
    """Of what ``sender`` sends to ``receiver``, the arrivals ``which`` are damaged while one exchange runs."""
    channel = Channel.for_group(timeout_seconds=50)
    damage = Damage(sender, which if channel.rank == receiver else range(0), frames=frames)
    try:
        right = _exchange(channel, verb)
        channel.barrier("write")  # for the root, an exchange is over when its reply has left
    finally:
        damage.which = range(0)
        # Whether it ended well or not, the next one does.
        found = channel.agree("next", lambda: Offer(value=channel.rank + 1))
        assert (found.lowest, found.highest) == (1, channel.size)
    return right


def _exchange(channel: Channel, verb: str) -> bool:
    if verb == "gather":
        notes = channel.gather("plan", lambda: Note(channel.rank, b"abc" * 100), Note)
        return notes is None or notes == [Note(rank, b"abc" * 100) for rank in range(channel.size)]
    return channel.broadcast("plan", lambda: Note(7, b"abc" * 100), Note) == Note(7, b"abc" * 100)


def test_a_frame_that_is_damaged_twice_is_named_on_all_ranks() -> None:
    caught = errors(run_ranks(4, _exchange_with_damage, "gather", 2, 0, AFTER_THE_FIRST, True))
    assert len({error.message for error in caught}) == 1
    for error in caught:
        assert error.type_name == "ExchangeError"
        assert "gather 'plan': what rank 2 sent to rank 0 arrived damaged twice: a frame arrived" in error.message
        assert (error.fields["phase"], error.fields["ranks"]) == ("plan", [2])


def _lose_the_verdict() -> None:
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 2:
        Damage(0, AFTER_THE_FIRST, frames=True)
    # For the root the first exchange is over when the verdict has left: that it was lost it hears in the next one.
    channel.barrier("plan")
    channel.barrier("write")


def test_a_verdict_that_is_damaged_twice_ends_the_operation_on_all_ranks() -> None:
    caught = errors(run_ranks(4, _lose_the_verdict))
    assert len({error.message for error in caught}) == 1
    assert "barrier 'plan': what rank 0 sent to rank 2 arrived damaged twice" in caught[0].message
    assert caught[0].fields["ranks"] == [0]


@pytest.mark.parametrize(("verb", "sender", "receiver"), [("gather", 1, 0), ("broadcast", 0, 1)])
def test_a_payload_that_is_damaged_twice_is_named_on_all_ranks(verb: str, sender: int, receiver: int) -> None:
    caught = errors(run_ranks(3, _exchange_with_damage, verb, sender, receiver, FROM_NOW_ON, False))
    assert len({error.message for error in caught}) == 1
    for error in caught:
        assert error.type_name == "ExchangeError"
        assert f"rank {sender} sent to rank {receiver} arrived damaged twice: a payload of " in error.message
        assert "announced was 0x" in error.message
        assert error.fields["ranks"] == [sender]


def _send_something_else(verb: str) -> None:
    channel = Channel.for_group(timeout_seconds=50)
    message_type = OtherNote if channel.rank == 1 else Note
    with channel.together():
        if verb == "broadcast":
            channel.broadcast("plan", lambda: Note(7), message_type)
        else:
            channel.scatter("plan", lambda: [Note(rank) for rank in range(channel.size)], message_type)
        channel.barrier("write")


@pytest.mark.parametrize("verb", ["broadcast", "scatter"])
def test_a_rank_that_cannot_use_what_it_was_sent_ends_the_operation_on_all_ranks(verb: str) -> None:
    for error in errors(run_ranks(4, _send_something_else, verb)):
        assert error.type_name == "ExchangeError"
        told = [error.message, *(failure.message for failure in error.rank_failures)]
        assert any("rank 1 cannot use what rank 0 sent in 'plan'" in text for text in told)


def _other_phase() -> int:
    channel = Channel.for_group(timeout_seconds=50)
    channel.barrier("connect")
    try:
        if channel.rank == 2:
            channel.barrier("load 1: plan")
        else:
            channel.gather("save 3: plan", lambda: Note(channel.rank), Note)
    except ExchangeError:
        channel.barrier("next")
        raise
    return 0


def test_ranks_in_different_phases_of_an_operation_are_listed_by_what_they_do() -> None:
    caught = errors(run_ranks(4, _other_phase))
    assert len({error.message for error in caught}) == 1
    assert caught[0].message.startswith(
        "the ranks are in different operations: ranks [0, 1, 3] are in gather 'save 3: pl"
    )
    assert "rank 2 is in barrier 'load 1: plan' of checkpoint" in caught[0].message
    assert caught[0].fields["ranks"] == [2]
