"""The words in which an operation ends: who is missing, in bounded length, and whose loss is the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from robust_dcp.comm import wire
from robust_dcp.comm.conclusion import conclude, settle
from robust_dcp.comm.failures import EndMessage, Problem
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeTimeout
from tests.support.rank_threads import quick
from tests.support.simulated_network import SimulatedNetwork

SIZE = 40


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def ended(network: SimulatedNetwork, missing: range, *, store_host: int | None = None) -> ExchangeTimeout:
    """The error that all raise when rank 1 has lost the ranks ``missing``, with none of which it ever was connected."""
    link = Link(rank=1, ranks=tuple(range(SIZE)), meeting=network.meeting(1), store_host=store_host)
    operation = Operation(link, "save", 5.0)
    operation.what, operation.phase = "barrier 'plan'", "plan"
    problem = Problem("did not finish", missing={rank: f"rank {rank} has not come" for rank in missing})
    end_message = settle(conclude(problem, operation, link), operation, link)
    link.close()
    network.close()
    error = wire.decode(end_message, EndMessage).error.to_error()
    assert isinstance(error, ExchangeTimeout)
    return error


def test_of_very_many_missing_ranks_the_first_are_described_and_all_are_listed() -> None:
    error = ended(SimulatedNetwork(SIZE), range(10, 40))
    assert error.missing_ranks == list(range(10, 40))
    assert f"30 of {SIZE} ranks missing: rank 10 has not come; " in error.message
    assert error.message.endswith(f"rank 25 has not come; and 14 more: {list(range(26, 40))}")


def test_of_a_few_each_is_described() -> None:
    error = ended(SimulatedNetwork(SIZE), range(2, 4))
    assert error.message.endswith("2 of 40 ranks missing: rank 2 has not come; rank 3 has not come")


def test_if_the_store_is_gone_before_anybody_was_met_its_host_is_the_one_that_is_missing() -> None:
    network = SimulatedNetwork(SIZE, store_host=0)
    network.kill(0)
    error = ended(network, range(2, 5), store_host=0)
    assert error.missing_ranks == [0]
    assert "1 of 40 ranks missing: rank 0, whose process hosts the store unless a launcher's does" in error.message
    assert "the store of the process group does not answer (connection reset by peer)" in error.message


def test_if_no_rank_of_the_group_hosts_the_store_the_missing_ranks_are_named_and_the_store_too() -> None:
    network = SimulatedNetwork(SIZE, store_host=39)
    network.kill(39)
    error = ended(network, range(2, 4))
    assert error.missing_ranks == [2, 3]
    assert "the process that hosts it, rank 0 unless a launcher does, has ended or is frozen" in error.message
