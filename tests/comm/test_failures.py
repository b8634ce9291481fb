"""A failure on one rank, or what arrives damaged twice, is the same exception on all, and the group goes on in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError, PlanConflict, RobustCheckpointError, StorageError
from tests.comm.messages import Note, OtherNote
from tests.harness.network import Fault, FaultKind, SimulatedNetwork, run_channels


def the_one_error(errors: list[Any]) -> Any:
    assert len({(type(error), str(error), tuple(error.rank_failures)) for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize("verb", ["gather", "agree"])
def test_an_exception_on_one_rank_is_raised_on_all_with_its_traceback(verb: str) -> None:
    def fail(channel: Channel) -> None:
        def work() -> Note:
            if channel.rank == 1:
                raise KeyError(f"no weight on {channel.rank}")
            return Note(channel.rank)

        verbs: dict[str, Callable[[], object]] = {
            "gather": lambda: channel.gather("save 3: plan", work, Note),
            "agree": lambda: channel.agree("save 3: plan", lambda: Offer(value=work().rank)),
        }
        with pytest.raises(RobustCheckpointError) as caught:
            verbs[verb]()
        assert isinstance(caught.value.__cause__, KeyError) == (channel.rank == 1)
        # Still in step, in the same operation.
        assert channel.agree("next", Offer)[1].n_ranks == channel.size
        assert channel._operation.key.occurrence == 0
        raise caught.value

    error = the_one_error(run_channels(SimulatedNetwork(3), fail))
    assert error.message == "'save 3: plan' failed on rank 1: KeyError: 'no weight on 1'"
    (failure,) = error.rank_failures
    assert (failure.rank, failure.type_name) == (1, "KeyError")
    assert "no weight on 1" in failure.message
    assert "raise KeyError(f" in failure.traceback_text


def test_one_of_our_exceptions_keeps_class_and_fields_on_every_rank() -> None:
    of_rank = {
        1: StorageError("no space left on /ckpt/__1_0.distcp", path="/ckpt", errno=28, operation="write"),
        2: PlanConflict("two shapes", key="w", ranks=[1, 2]),
    }

    def write(channel: Channel) -> None:
        if channel.rank in of_rank:
            raise of_rank[channel.rank]

    error = the_one_error(
        run_channels(SimulatedNetwork(3), lambda channel: channel.barrier("save 3: write", lambda: write(channel)))
    )
    assert isinstance(error, StorageError) and isinstance(error, OSError)
    assert error.to_fields() == of_rank[1].to_fields()
    assert [(failure.rank, failure.type_name) for failure in error.rank_failures] == [
        (1, "StorageError"),
        (2, "PlanConflict"),
    ]


def damaging(size: int, kind: FaultKind, sender: int, receiver: int) -> SimulatedNetwork:
    """The first frame is a beat, which nobody misses."""
    return SimulatedNetwork(size, [Fault(kind, sender, receiver, number) for number in range(1, 1000)])


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
            _, found = channel.agree("next", lambda: Offer(value=channel.rank + 1))
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
