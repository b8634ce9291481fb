"""What arrives damaged is asked for once more; what arrives damaged twice is named, on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.frames import Frame
from robust_dcp.errors import ExchangeError
from tests.comm import faults
from tests.comm.messages import Note
from tests.support.ranks import errors, run_ranks, values

Change = Callable[[bytearray], bytearray]


def _exchange_with_damage(verb: str, rank: int, which: set[int], change: Change, where: str) -> tuple[bool, int]:
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == rank:
        damage = faults.Damage(which, change, frame_of=2)
        if where == "frames":
            faults.inject(channel, frames=damage.frames)
        else:
            faults.inject(channel, payload=damage.payload)
    with channel.recording() as stats:
        try:
            right = _exchange(channel, verb)
        finally:
            # Whether it ended well or not, the next one does.
            assert [offer.value for offer in channel.agree("next", lambda: Offer(value=channel.rank))] == [0, 1, 2]
    return right, stats.repeats


def _exchange(channel: Channel, verb: str) -> bool:
    ranks = range(channel.size)
    if verb == "agree":
        return [offer.value for offer in channel.agree("plan", lambda: Offer(value=channel.rank))] == list(ranks)
    if verb == "gather":
        notes = channel.gather("plan", lambda: Note(channel.rank, b"abc" * 100), Note)
        return notes is None or notes == [Note(rank, b"abc" * 100) for rank in ranks]
    if verb == "all_gather":
        return [note.rank for note in channel.all_gather("plan", lambda: Note(channel.rank), Note)] == list(ranks)
    if verb == "broadcast":
        return channel.broadcast("plan", lambda: Note(7, b"abc" * 100), Note) == Note(7, b"abc" * 100)
    return channel.scatter("plan", lambda: [Note(rank) for rank in ranks], Note) == Note(channel.rank)


@pytest.mark.parametrize("change", [faults.zeros, faults.one_bit_flipped, faults.second_half_missing])
def test_a_bad_header_on_one_rank_only_is_asked_for_once_more_by_all(change: Change) -> None:
    outcomes = values(run_ranks(3, _exchange_with_damage, "agree", 0, {0}, change, "frames"))
    assert outcomes == [(True, 1)] * 3


def test_a_bad_header_of_an_exchange_with_payload_is_cured() -> None:
    outcomes = values(run_ranks(3, _exchange_with_damage, "gather", 1, {0}, faults.zeros, "frames"))
    assert outcomes == [(True, 1)] * 3


def test_a_bad_confirmation_changes_nothing() -> None:
    outcomes = values(run_ranks(3, _exchange_with_damage, "agree", 1, {1}, faults.zeros, "frames"))
    assert outcomes == [(True, 0)] * 3


def test_a_rank_that_cannot_read_who_wants_a_repetition_repeats_all_the_same() -> None:
    outcomes = values(run_ranks(3, _exchange_where_a_complaint_is_lost))
    assert outcomes == [(True, 1)] * 3


def _exchange_where_a_complaint_is_lost() -> tuple[bool, int]:
    """Rank 2 gets a bad header; its complaint reaches rank 0 as zeros."""
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 2:
        faults.inject(channel, frames=faults.Damage({0}, faults.zeros, frame_of=1).frames)
    if channel.rank == 0:
        faults.inject(channel, frames=faults.Damage({1}, faults.zeros, frame_of=2).frames)
    with channel.recording() as stats:
        right = _exchange(channel, "agree")
    return right, stats.repeats


def test_a_header_that_is_bad_twice_is_named_on_all_ranks() -> None:
    outcomes = run_ranks(3, _exchange_with_damage, "gather", 0, {0, 2}, faults.zeros, "frames")
    for error in errors(outcomes):
        assert error.type_name == "ExchangeError"
        assert error.fields == {
            "message": "gather 'plan': headers were bad twice: that of rank 2 as rank 0 received it: "
            + ("all zeros" if "all zeros" in error.message else "zeros"),
            "phase": "plan",
            "ranks": [2],
        }
    assert len({error.message for error in errors(outcomes)}) == 1


@pytest.mark.parametrize("verb", ["gather", "broadcast", "scatter", "all_gather"])
@pytest.mark.parametrize("change", [faults.zeros, faults.one_bit_flipped, faults.second_half_missing])
def test_a_damaged_payload_is_asked_for_once_more(verb: str, change: Change) -> None:
    receiver = 0 if verb == "gather" else 1
    outcomes = values(run_ranks(3, _exchange_with_damage, verb, receiver, {0}, change, "payload"))
    assert outcomes == [(True, 1)] * 3


def test_several_damaged_payloads_are_each_asked_for_once_more() -> None:
    outcomes = values(run_ranks(3, _exchange_with_damage, "gather", 0, {0, 1}, faults.one_bit_flipped, "payload"))
    assert outcomes == [(True, 2)] * 3


@pytest.mark.parametrize(("verb", "sender", "which"), [("gather", 1, {0, 2}), ("broadcast", 0, {0, 1})])
def test_a_payload_that_is_damaged_twice_is_named_on_all_ranks(verb: str, sender: int, which: set[int]) -> None:
    receiver = 0 if verb == "gather" else 1
    caught = errors(run_ranks(3, _exchange_with_damage, verb, receiver, which, faults.zeros, "payload"))
    assert len({error.message for error in caught}) == 1
    for error in caught:
        assert error.type_name == "ExchangeError"
        assert f"rank {sender} in 'plan' arrived damaged twice at rank {receiver}" in error.message
        assert "expected" in error.message
        assert "found" in error.message
        assert error.fields["ranks"] == [sender]
        assert [failure.rank for failure in error.rank_failures] == [receiver]


def test_damage_without_end_ends() -> None:
    class_names = {
        error.type_name
        for error in errors(
            run_ranks(3, _exchange_with_damage, "all_gather", 1, set(range(1000)), faults.zeros, "payload")
        )
    }
    assert class_names == {"ExchangeError"}


def _failure_with_a_damaged_description() -> str:
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 1:
        faults.inject(channel, payload=faults.Damage({0, 1}, faults.zeros).payload)

    def work() -> None:
        if channel.rank == 0:
            raise OSError("disk gone")

    try:
        channel.barrier("write", work)
    except Exception as error:
        channel.barrier("next")
        return str(error)
    return ""


def test_a_failure_whose_description_never_arrives_whole_is_still_a_failure_of_that_rank() -> None:
    first, second, third = values(run_ranks(3, _failure_with_a_damaged_description))
    assert first == third
    assert "disk gone" in first
    assert "'write' failed on rank 0" in second
    assert "did not arrive whole" in second


def _sequence_changed(data: bytearray) -> bytearray:
    frame = Frame.decode(bytes(data))
    return bytearray(dataclasses.replace(frame, sequence=frame.sequence + 5).encode())


def test_a_whole_frame_of_another_exchange_is_asked_for_once_more() -> None:
    outcomes = values(run_ranks(3, _exchange_with_damage, "agree", 0, {0}, _sequence_changed, "frames"))
    assert outcomes == [(True, 1)] * 3


def test_a_whole_frame_of_another_exchange_twice_is_named() -> None:
    caught = errors(run_ranks(3, _exchange_with_damage, "agree", 0, {0, 2}, _sequence_changed, "frames"))
    assert {error.fields["ranks"][0] for error in caught} == {2}


def _elsewhere() -> int:
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


def test_ranks_in_different_operations_are_listed_by_what_they_do() -> None:
    caught = errors(run_ranks(4, _elsewhere))
    assert {error.message for error in caught} == {
        "the ranks are in different operations: ranks [0, 1, 3] in gather 'save 3: plan' (exchange 1); "
        "rank [2] in barrier 'load 1: plan' (exchange 1)"
    }
    assert caught[0].fields["ranks"] == [2]
