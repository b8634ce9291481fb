"""A failure on one rank is the same exception on all, and the group goes on in step."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from robust_dcp.comm import Channel, Offer, Stopped
from robust_dcp.errors import PlanConflict, RobustCheckpointError, StorageError
from tests.comm.messages import Note
from tests.harness.ranks import errors, run_ranks, values
from tests.harness.verdicts import Verdict


def _fail_on(ranks: list[int], verb: str) -> None:
    channel = Channel.for_group(timeout_seconds=50)

    def work() -> Note:
        if channel.rank in ranks:
            raise KeyError(f"no weight on {channel.rank}")
        return Note(channel.rank)

    verbs: dict[str, Callable[[], object]] = {
        "gather": lambda: channel.gather("save 3: plan", work, Note),
        "agree": lambda: channel.agree("save 3: plan", lambda: Offer(value=work().rank)),
        "broadcast": lambda: channel.broadcast("save 3: plan", work, Note),
        "scatter": lambda: channel.scatter("save 3: plan", lambda: [work()] * channel.size, Note),
    }
    with pytest.raises(RobustCheckpointError) as caught:
        verbs[verb]()
    assert isinstance(caught.value.__cause__, KeyError) == (channel.rank in ranks)
    # Still in step, in the same operation.
    assert channel.agree("next", Offer).n_ranks == channel.size
    assert channel._operation.key.occurrence == 0
    raise caught.value


def _the_one_error(caught: list[Verdict]) -> Verdict:
    assert len({(error.type_name, error.message, error.rank_failures) for error in caught}) == 1
    return caught[0]


@pytest.mark.parametrize("verb", ["gather", "agree"])
def test_an_exception_on_one_rank_is_raised_on_all_with_its_traceback(verb: str) -> None:
    error = _the_one_error(errors(run_ranks(3, _fail_on, [1], verb)))
    assert error.message == "'save 3: plan' failed on rank 1: KeyError: 'no weight on 1'"
    (failure,) = error.rank_failures
    assert (failure.rank, failure.type_name) == (1, "KeyError")
    assert "no weight on 1" in failure.message
    assert "raise KeyError(f" in failure.traceback_text


def _fail_with_own_classes() -> None:
    channel = Channel.for_group(timeout_seconds=50)

    def work() -> None:
        if channel.rank == 1:
            raise StorageError("no space left on /ckpt/__1_0.distcp", path="/ckpt", errno=28, operation="write")
        if channel.rank == 2:
            raise PlanConflict("two shapes", key="w", ranks=[1, 2])

    channel.barrier("save 3: write", work)


def test_one_of_our_exceptions_keeps_class_and_fields_on_every_rank() -> None:
    error = _the_one_error(errors(run_ranks(3, _fail_with_own_classes)))
    assert error.type_name == "StorageError"
    assert error.is_a(OSError)
    assert error.message == "no space left on /ckpt/__1_0.distcp"
    assert error.fields == {
        "path": "/ckpt",
        "errno": 28,
        "operation": "write",
    }
    assert [(failure.rank, failure.type_name) for failure in error.rank_failures] == [
        (1, "StorageError"),
        (2, "PlanConflict"),
    ]


def _interrupted() -> str:
    channel = Channel.for_group(timeout_seconds=50)

    def work() -> None:
        if channel.rank == 0:
            raise KeyboardInterrupt

    try:
        channel.barrier("write", work)
    except BaseException as error:
        channel.barrier("next")
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_interrupt_is_told_to_the_others_and_raised_as_itself_where_it_came() -> None:
    first, second = values(run_ranks(2, _interrupted))
    assert first == "KeyboardInterrupt: "
    assert second.startswith("RobustCheckpointError: 'write' failed on rank 0: KeyboardInterrupt")


def _stop_early() -> float:
    channel = Channel.for_group(timeout_seconds=50)
    channel.barrier("connect")
    began = time.monotonic()

    def work() -> None:
        if channel.rank == 1:
            raise StorageError("no space", errno=28)
        while time.monotonic() - began < 40:
            channel.stop_if_announced()
            time.sleep(0.01)

    with pytest.raises(StorageError) as caught:
        channel.barrier("write", work)
    assert [failure.rank for failure in caught.value.rank_failures] == [1]
    assert isinstance(caught.value.__cause__, Stopped) == (channel.rank != 1)
    channel.barrier("next")
    assert channel.failure_announced() is None
    return time.monotonic() - began


def test_others_stop_their_work_when_one_fails_and_are_not_listed_as_failed() -> None:
    assert max(values(run_ranks(3, _stop_early))) < 20
