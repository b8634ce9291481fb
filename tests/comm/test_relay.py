"""Tensors pass from one rank to others, and whoever fails or damages something on the way is named."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from robust_dcp.comm import Bucket, Channel, Relay
from robust_dcp.comm.connections import Connections, Moving
from robust_dcp.errors import ExchangeError
from tests.harness.ranks import errors, run_ranks, values

BUCKETS = (
    Bucket(0, (0, 1, 2, 3), 1000),
    Bucket(0, (2, 0, 1, 3), 1),
    Bucket(0, (1, 3), 3 << 20),
    Bucket(1, (0, 1, 2, 3), 70_000),
    Bucket(1, (3, 0, 2), 17),
    Bucket(5, (1, 3), 2),
)


def contents(bucket: Bucket, number: int) -> torch.Tensor:
    return (torch.arange(bucket.nbytes) * 7 + number + bucket.ranks[0]).to(torch.uint8)


class Boxes:
    """The buckets of one rank; ``die`` ends the process instead of sending or receiving."""

    def __init__(self, rank: int, *, die: bool = False) -> None:
        self.mine = [(number, bucket) for number, bucket in enumerate(BUCKETS) if rank in bucket.ranks]
        self.found: dict[int, torch.Tensor] = {}
        self.die = die

    def relay(self) -> Relay:
        return Relay([bucket for _, bucket in self.mine], self.outgoing, self.incoming, self.arrived)

    def outgoing(self, number: int) -> torch.Tensor:
        self._die_if_told()
        whole, bucket = self.mine[number]
        return contents(bucket, whole)

    def incoming(self, number: int) -> torch.Tensor:
        self._die_if_told()
        return torch.zeros(self.mine[number][1].nbytes, dtype=torch.uint8)

    def arrived(self, number: int, received: torch.Tensor) -> None:
        self.found[self.mine[number][0]] = received

    def _die_if_told(self) -> None:
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL)

    def check(self, rank: int) -> None:
        assert sorted(self.found) == [number for number, bucket in self.mine if bucket.ranks[0] != rank]
        for number, received in self.found.items():
            assert torch.equal(received, contents(BUCKETS[number], number))


def relay_all() -> int:
    channel = Channel.for_group(operation="test", timeout_seconds=20)
    boxes = Boxes(channel.rank)
    with channel.recording() as stats:
        channel.relay("pass on", boxes.relay())
    boxes.check(channel.rank)
    channel.barrier("in step")
    return stats.payload_nbytes_sent


def test_every_rank_gets_its_buckets() -> None:
    sent = values(run_ranks(4, relay_all))
    nbytes = sum(bucket.nbytes * (len(bucket.ranks) - 1) for bucket in BUCKETS)
    assert sum(sent) == nbytes


def relay_with_damage() -> Any:
    channel = Channel.for_group(operation="test", timeout_seconds=20)
    if channel.rank == 3:
        finish = Connections.finish

        def finish_and_damage(self: Connections, moving: Moving, *args: Any) -> None:
            finish(self, moving, *args)
            if isinstance(moving.data, torch.Tensor) and moving.data.numel() == BUCKETS[0].nbytes:
                moving.data[500] ^= 0x10

        Connections.finish = finish_and_damage  # type: ignore[assignment, method-assign]
    boxes = Boxes(channel.rank)
    try:
        channel.relay("pass on", boxes.relay())
    except ExchangeError as error:
        channel.barrier("in step")
        return error.message, error.ranks
    return None


def test_what_arrives_damaged_is_named_on_all_ranks() -> None:
    for message, ranks in values(run_ranks(4, relay_with_damage)):
        assert "arrived damaged at rank 3" in message
        assert ranks == [BUCKETS[0].ranks[0]] or ranks[0] in (0, 1, 2)


def relay_with_a_death() -> None:
    channel = Channel.for_group(operation="test", timeout_seconds=100)
    channel.barrier("all are here")
    channel.relay("pass on", Boxes(channel.rank, die=channel.rank == 1).relay())


def test_a_rank_that_dies_on_the_way_is_named() -> None:
    outcomes = run_ranks(4, relay_with_a_death)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for error in errors([outcome for outcome in outcomes if outcome.rank != 1]):
        assert error.type_name == "ExchangeTimeout" and "1" in error.message
