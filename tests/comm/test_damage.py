"""What arrives damaged is asked for once more; what arrives damaged twice is named, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from robust_dcp.comm import Channel, Offer, patience
from robust_dcp.errors import ExchangeError
from tests.comm import faults
from tests.comm.messages import Note, OtherNote
from tests.harness.ranks import errors, run_ranks, values

Change = Callable[[bytearray], bytearray]
CHANGES = [faults.zeros, faults.one_bit_flipped, faults.second_half_missing]


def _exchange_with_damage(verb: str, sender: int, receiver: int, which: set[int], change: Change, where: str) -> bool:
    """Of what ``sender`` sends to ``receiver``, the arrivals ``which`` are damaged; the first frame is a greeting."""
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == receiver:
        damage = faults.Damage(which, change)
        if where == "frames":
            faults.inject(channel, sender, frames=damage.frame)
        else:
            faults.inject(channel, sender, payload=damage.payload)
    try:
        right = _exchange(channel, verb)
        channel.barrier("write")  # for the root, an exchange is over when its reply has left
    finally:
        # Whether it ended well or not, the next one does.
        found = channel.agree("next", lambda: Offer(value=channel.rank + 1))
        assert (found.lowest, found.highest) == (1, channel.size)
    return right


def _exchange(channel: Channel, verb: str) -> bool:
    ranks = range(channel.size)
    if verb == "agree":
        return channel.agree("plan", lambda: Offer(value=channel.rank + 1)).highest == channel.size
    if verb == "gather":
        notes = channel.gather("plan", lambda: Note(channel.rank, b"abc" * 100), Note)
        return notes is None or notes == [Note(rank, b"abc" * 100) for rank in ranks]
    if verb == "all_gather":
        return [note.rank for note in channel.all_gather("plan", lambda: Note(channel.rank), Note)] == list(ranks)
    if verb == "combine":
        return channel.combine("plan", lambda: Note(1), lambda a, b: Note(a.rank + b.rank), Note).rank == channel.size
    if verb == "broadcast":
        return channel.broadcast("plan", lambda: Note(7, b"abc" * 100), Note) == Note(7, b"abc" * 100)
    return channel.scatter("plan", lambda: [Note(rank) for rank in ranks], Note) == Note(channel.rank)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("sender", "receiver"), [(2, 0), (0, 2)])
def test_a_damaged_frame_is_asked_for_once_more_on_that_hop(change: Change, sender: int, receiver: int) -> None:
    assert values(run_ranks(4, _exchange_with_damage, "agree", sender, receiver, {1}, change, "frames")) == [True] * 4


def test_a_damaged_greeting_changes_nothing() -> None:
    assert values(run_ranks(3, _exchange_with_damage, "gather", 1, 0, {0}, faults.zeros, "frames")) == [True] * 3


def _exchange_where_a_request_is_damaged_too() -> bool:
    """Rank 0 gets a bad frame from rank 2, which gets the request to send it again as zeros."""
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 0:
        faults.inject(channel, 2, frames=faults.Damage({1}, faults.zeros).frame)
    if channel.rank == 2:
        faults.inject(channel, 0, frames=faults.Damage({1}, faults.zeros).frame)
    return _exchange(channel, "gather")


def test_a_damaged_request_for_repetition_is_asked_for_once_more_itself() -> None:
    assert values(run_ranks(3, _exchange_where_a_request_is_damaged_too)) == [True] * 3


def test_a_frame_that_is_damaged_twice_is_named_on_all_ranks() -> None:
    caught = errors(run_ranks(4, _exchange_with_damage, "gather", 2, 0, {1, 2}, faults.zeros, "frames"))
    assert len({error.message for error in caught}) == 1
    for error in caught:
        assert error.type_name == "ExchangeError"
        assert (
            "gather 'plan': what rank 2 sent to rank 0 arrived damaged twice: a frame arrived damaged: it is all zeros"
            in error.message
        )
        assert (error.fields["phase"], error.fields["ranks"]) == ("plan", [2])


def _lose_the_verdict() -> None:
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 2:
        faults.inject(channel, 0, frames=faults.Damage({1, 2}, faults.zeros).frame)
    # For the root the first exchange is over when the verdict has left: that it was lost it hears in the next one.
    channel.barrier("plan")
    channel.barrier("write")


def test_a_verdict_that_is_damaged_twice_ends_the_operation_on_all_ranks() -> None:
    caught = errors(run_ranks(4, _lose_the_verdict))
    assert len({error.message for error in caught}) == 1
    assert "barrier 'plan': what rank 0 sent to rank 2 arrived damaged twice" in caught[0].message
    assert caught[0].fields["ranks"] == [0]


@pytest.mark.parametrize("verb", ["gather", "broadcast", "scatter", "all_gather", "combine"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_payload_is_asked_for_once_more(verb: str, change: Change) -> None:
    sender, receiver = (1, 0) if verb in ("gather", "all_gather", "combine") else (0, 1)
    assert values(run_ranks(3, _exchange_with_damage, verb, sender, receiver, {0}, change, "payload")) == [True] * 3


def _exchange_with_two_damaged() -> bool:
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 0:
        for sender in (1, 2):
            faults.inject(channel, sender, payload=faults.Damage({0}, faults.one_bit_flipped).payload)
    return _exchange(channel, "gather")


def test_several_damaged_payloads_are_each_asked_for_once_more() -> None:
    assert values(run_ranks(3, _exchange_with_two_damaged)) == [True] * 3


@pytest.mark.parametrize(("verb", "sender", "receiver"), [("gather", 1, 0), ("broadcast", 0, 1)])
def test_a_payload_that_is_damaged_twice_is_named_on_all_ranks(verb: str, sender: int, receiver: int) -> None:
    caught = errors(run_ranks(3, _exchange_with_damage, verb, sender, receiver, {0, 1}, faults.zeros, "payload"))
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


def _other_operation() -> int:
    patience.ELSEWHERE_SECONDS = 2.0
    rank = Channel.for_group().rank
    name = "load 1" if rank == 2 else "save 3"
    channel = Channel.for_group(operation=name, timeout_seconds=50)
    try:
        channel.barrier("plan")
    except ExchangeError:
        # All go on with the same numbers: of either name, the next one is the next one on every rank.
        for following in ("load 1", "save 3"):
            Channel.for_group(operation=following, timeout_seconds=50).barrier("next")
        raise
    return 0


def test_ranks_in_different_operations_are_listed_by_what_they_do() -> None:
    caught = errors(run_ranks(4, _other_operation))
    assert {error.message for error in caught} == {
        "the ranks are in different operations: ranks [0, 1, 3] are in barrier 'plan' of save 3; "
        "rank 2 is in barrier 'plan' of load 1"
    }
    assert caught[0].fields["ranks"] == [2]
