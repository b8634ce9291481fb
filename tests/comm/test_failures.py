"""A failure on one rank is the same exception on all, and the group goes on in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import PlanConflict, RobustCheckpointError, StorageError
from tests.comm.messages import Note
from tests.harness.network import SimulatedNetwork, run_channels


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
        assert channel.agree("next", Offer).n_ranks == channel.size
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
