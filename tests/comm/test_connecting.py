"""Ranks that die while others connect to them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel, connections
from robust_dcp.comm.connections import Connections
from robust_dcp.errors import ExchangeTimeout
from tests.comm.messages import Note
from tests.harness.ranks import errors, run_ranks, values


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_when_it_has_said_where_it_listens(victim: int) -> None:
    if dist.get_rank() == victim:
        Connections.receive = die  # type: ignore[method-assign, assignment]
    Channel.for_group(operation="save 1", timeout_seconds=100).barrier("plan")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_before_it_answers_where_it_listens_is_named_long_before_the_timeout(victim: int) -> None:
    outcomes = run_ranks(4, dies_when_it_has_said_where_it_listens, victim, timeout_seconds=80)
    for error in errors(outcomes, [rank for rank in range(4) if rank != victim]):
        assert error.is_a(ExchangeTimeout)
        assert error.fields["missing_ranks"] == [victim]


def dies_as_its_own_work_begins(victim: int) -> None:
    channel = Channel.for_group(operation="save 1", timeout_seconds=100)
    channel.barrier("plan", die if channel.rank == victim else lambda: None)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_as_its_own_work_begins_is_named_long_before_the_timeout(victim: int) -> None:
    outcomes = run_ranks(4, dies_as_its_own_work_begins, victim, timeout_seconds=40)
    for error in errors(outcomes, [rank for rank in range(4) if rank != victim]):
        assert error.is_a(ExchangeTimeout)
        assert error.fields["missing_ranks"] == [victim]


def _connect_each_to_each() -> None:
    """As torch 2.7 does, which knows no connections at first use."""
    connections.make_device = lambda address: (dist.ProcessGroupGloo.create_device(hostname=address), False)


def _exchange_in_a_mesh() -> list[int]:
    _connect_each_to_each()
    channel = Channel.for_group(timeout_seconds=40)
    return [note.rank for note in channel.all_gather("all", lambda: Note(channel.rank), Note)]


def test_ranks_exchange_where_torch_connects_each_to_each() -> None:
    assert values(run_ranks(4, _exchange_in_a_mesh)) == [[0, 1, 2, 3]] * 4


def _killed_in_a_mesh() -> list[list[int] | None]:
    _connect_each_to_each()
    channel = Channel.for_group(timeout_seconds=40)
    channel.barrier("connect")
    if channel.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    named = []
    for seconds in (40, 2):
        with pytest.raises(ExchangeTimeout) as caught:
            Channel.for_group(timeout_seconds=seconds).barrier("step")
        named.append(caught.value.missing_ranks)
    return named


def test_a_killed_rank_is_named_where_torch_connects_each_to_each() -> None:
    outcomes = run_ranks(4, _killed_in_a_mesh)
    assert values([outcomes[rank] for rank in (0, 1, 3)]) == [[[2], [2]]] * 3


def _one_never_comes_to_a_mesh() -> list[int] | None:
    _connect_each_to_each()
    if dist.get_rank() == 3:
        return None
    with pytest.raises(ExchangeTimeout) as caught:
        Channel.for_group(timeout_seconds=2).barrier("step")
    return caught.value.missing_ranks


def test_a_rank_that_never_comes_is_named_where_torch_connects_each_to_each() -> None:
    assert values(run_ranks(4, _one_never_comes_to_a_mesh)) == [[3], [3], [3], None]
