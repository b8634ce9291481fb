"""Tensors pass from one rank to others, and whoever fails or damages something on the way is named."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from robust_dcp.comm import Bucket, Channel, Relay
from robust_dcp.comm.connections import Connections, Moving
from tests.harness.ranks import errors, run_ranks, values

BUCKETS = (
    Bucket(0, (0, 1, 2, 3), 1000),
    Bucket(0, (2, 0, 1, 3), 1),
    Bucket(0, (1, 3), 3 << 20),
    Bucket(1, (0, 1, 2, 3), 70_000),
    Bucket(5, (1, 3), 2),
)


def contents(number: int, bucket: Bucket) -> torch.Tensor:
    return (torch.arange(bucket.nbytes) * 7 + number + bucket.ranks[0]).to(torch.uint8)


class Boxes:
    def __init__(self, rank: int) -> None:
        self.mine = [(number, bucket) for number, bucket in enumerate(BUCKETS) if rank in bucket.ranks]
        self.found: dict[int, torch.Tensor] = {}

    def relay(self) -> Relay:
        return Relay([bucket for _, bucket in self.mine], self.outgoing, self.incoming, self.arrived)

    def outgoing(self, number: int) -> torch.Tensor:
        return contents(*self.mine[number])

    def incoming(self, number: int) -> torch.Tensor:
        return torch.zeros(self.mine[number][1].nbytes, dtype=torch.uint8)

    def arrived(self, number: int, received: torch.Tensor) -> None:
        self.found[self.mine[number][0]] = received

    def check(self, rank: int) -> None:
        assert sorted(self.found) == [number for number, bucket in self.mine if bucket.ranks[0] != rank]
        for number, received in self.found.items():
            assert torch.equal(received, contents(number, BUCKETS[number]))


def relay_all() -> int:
    channel = Channel.for_group(operation="test", timeout_seconds=20)
    boxes = Boxes(channel.rank)
    channel.relay("pass on", boxes.relay())
    boxes.check(channel.rank)
    return channel.stats.payload_nbytes_sent


def test_every_rank_gets_its_buckets() -> None:
    assert sum(values(run_ranks(4, relay_all))) == sum(each.nbytes * (len(each.ranks) - 1) for each in BUCKETS)


def relay_with_faults(fault: str, n_faults: int) -> bool:
    """Whether the fault has struck on this rank."""
    channel = Channel.for_group(operation="test", timeout_seconds=4 if fault == "hang" else 20)
    channel.barrier("all are here")
    boxes, struck, finish = Boxes(channel.rank), list[str](), Connections.finish

    def finish_and_fail(self: Connections, moving: Moving, *args: Any, **named: Any) -> None:
        finish(self, moving, *args, **named)
        is_hit = isinstance(moving.data, torch.Tensor) and moving.data.numel() == BUCKETS[3].nbytes
        if is_hit and channel.rank == 3 and len(struck) < n_faults:
            struck.append(fault)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "cut":
                self.drop()
            else:
                moving.data[500] ^= 0x10

    Connections.finish = finish_and_fail  # type: ignore[assignment, method-assign]
    if fault == "hang" and channel.rank == 3:
        boxes.incoming = lambda number: time.sleep(4)  # type: ignore[assignment, method-assign, return-value]
    try:
        channel.relay("pass on", boxes.relay())
        boxes.check(channel.rank)
    finally:
        if fault in ("damage", "cut"):
            channel.barrier("in step")
    return len(struck) == n_faults


@pytest.mark.parametrize("fault", ["damage", "cut"])
def test_what_arrives_damaged_or_breaks_off_once_is_passed_on_again(fault: str) -> None:
    assert values(run_ranks(4, relay_with_faults, fault, 1)) == [False, False, False, True]


def test_who_damages_what_it_passes_on_or_dies_or_hangs_is_named_on_all_ranks() -> None:
    for error in errors(run_ranks(4, relay_with_faults, "damage", 9)):
        assert error.type_name == "ExchangeError" and "arrived damaged at rank 3" in error.message
    *outcomes, killed = run_ranks(4, relay_with_faults, "kill", 1)
    assert killed.exitcode == -signal.SIGKILL
    for error in errors([*outcomes, *run_ranks(4, relay_with_faults, "hang", 1)]):
        assert error.type_name == "ExchangeTimeout" and "1 of 4 ranks missing: rank 3" in error.message
