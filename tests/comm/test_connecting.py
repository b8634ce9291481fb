"""Ranks that die while others connect to them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel
from robust_dcp.comm.connections import Connections
from robust_dcp.errors import ExchangeTimeout
from tests.harness.ranks import errors, run_ranks


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
