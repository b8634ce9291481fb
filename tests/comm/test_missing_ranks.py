"""A wait ends in time: by an interrupt, or because a rank dies or does not come where torch makes a mesh."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel, connections
from robust_dcp.errors import ExchangeTimeout, RobustCheckpointError
from tests.harness.ranks import run_ranks, values


def _wait_for(key: str) -> None:
    dist.distributed_c10d._get_default_store().wait([key], datetime.timedelta(seconds=50))


def _interrupted_while_waiting() -> tuple[str, float]:
    channel = Channel.for_group(timeout_seconds=40)
    channel.barrier("connect")
    store = dist.distributed_c10d._get_default_store()

    def say_who_it_is() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store.set("pid", str(os.getpid()))

    def interrupt_it() -> None:
        _wait_for("pid")
        time.sleep(0.3)  # by now it waits for this rank; if not, its own work is interrupted
        os.kill(int(store.get("pid").decode()), signal.SIGINT)

    began = time.monotonic()
    with pytest.raises((RobustCheckpointError, KeyboardInterrupt)) as caught:
        channel.barrier("step", interrupt_it if channel.rank else say_who_it_is)
    seconds = time.monotonic() - began
    channel.barrier("next")
    return repr(caught.value.args[0] if caught.value.args else caught.value), seconds


def test_an_interrupt_while_waiting_ends_the_exchange_on_all_ranks_at_once() -> None:
    (first, _), (second, seconds) = values(run_ranks(2, _interrupted_while_waiting))
    assert first == "KeyboardInterrupt()"
    assert "rank 0: KeyboardInterrupt" in second
    assert seconds < 10


def _in_a_mesh(is_killed: bool) -> list[list[int] | None]:
    """Connections as torch 2.7 makes them, which knows none at first use. Whom the others name if rank 3 does not come,
    or is killed."""
    connections.make_device = lambda address: (dist.ProcessGroupGloo.create_device(hostname=address), False)
    if is_killed:
        Channel.for_group(timeout_seconds=40).barrier("connect")
    if dist.get_rank() == 3:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return []
    named = []
    for seconds in (40, 2) if is_killed else (2,):
        with pytest.raises(ExchangeTimeout) as caught:
            Channel.for_group(timeout_seconds=seconds).barrier("step")
        named.append(caught.value.missing_ranks)
    return named


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_rank_that_is_killed_or_never_comes_is_named_where_torch_connects_each_to_each(is_killed: bool) -> None:
    outcomes = run_ranks(4, _in_a_mesh, is_killed)
    assert values(outcomes[:3]) == [[[3], [3]] if is_killed else [[3]]] * 3
