"""The process that hosts the store of the process group dies or is frozen."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import time

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel
from robust_dcp.errors import ExchangeError
from tests.comm.messages import Note
from tests.harness.ranks import RankError, errors, run_ranks, values


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _start_with_a_store_of_rank_0() -> int:
    """A process group as ``init_process_group`` makes it without ``torchrun``: rank 0 hosts the store."""
    rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["STORE_PORT"])
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=datetime.timedelta(seconds=40))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    return rank


def _host_dies_before_the_first_save() -> None:
    rank = _start_with_a_store_of_rank_0()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        Channel.for_group(operation="save 1", timeout_seconds=3).barrier("plan")
    finally:
        print(f"after {time.monotonic() - began:.1f} seconds")


def test_a_store_that_died_before_the_first_save_ends_in_an_error_of_our_own_in_bounded_time() -> None:
    outcomes = run_ranks(4, _host_dies_before_the_first_save, init=False, env={"STORE_PORT": _free_port()})
    for error, outcome in zip(errors(outcomes, [1, 2, 3]), outcomes[1:], strict=True):
        assert error.is_a(ExchangeError)
        assert "the store of the process group does not answer" in error.message
        assert float(outcome.output.partition("after ")[2].split()[0]) < 12


def _host_dies_in_a_save() -> None:
    rank = _start_with_a_store_of_rank_0()
    channel = Channel.for_group(operation="save 1", timeout_seconds=30)
    channel.barrier("plan")

    def write() -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    channel.barrier("write", write)


def test_all_name_the_host_of_the_store_that_died_in_a_save() -> None:
    outcomes = run_ranks(5, _host_dies_in_a_save, init=False, env={"STORE_PORT": _free_port()})
    for error in errors(outcomes, [1, 2, 3, 4]):
        assert error.fields["missing_ranks"] == [0]


def _host_leaves_after_an_error() -> None:
    rank = _start_with_a_store_of_rank_0()
    channel = Channel.for_group(operation="save 1", timeout_seconds=30)
    channel.barrier("plan")

    def write() -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        channel.barrier("write", write)
    except ExchangeError as error:
        if rank == 0:
            print(f"rank 0 raised {error.ranks}", flush=True)
        raise


def test_after_an_error_the_others_name_the_rank_at_fault_though_the_host_of_the_store_has_left() -> None:
    outcomes = run_ranks(
        5,
        _host_leaves_after_an_error,
        init=False,
        env={"STORE_PORT": _free_port()},
        failed_ranks_stay_seconds=0,
    )
    assert "rank 0 raised [2]" in outcomes[0].output
    found: list[RankError] = errors(outcomes, [1, 3, 4])
    assert [error.fields["missing_ranks"] for error in found] == [[2]] * 3


def _frozen(frozen: int) -> tuple[list[int] | None, float, str]:
    rank = _start_with_a_store_of_rank_0()
    channel = Channel.for_group(operation="save 1", timeout_seconds=3)
    channel.barrier("plan")

    def write() -> None:
        if rank == frozen:
            subprocess.Popen(["sh", "-c", f"sleep 13; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    began = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        channel.barrier("write", write)
    seconds = time.monotonic() - began
    # Only once it goes on can the next operation succeed.
    following = Channel.for_group(operation="save 2", timeout_seconds=40)
    assert len(following.all_gather("plan", lambda: Note(rank), Note)) == following.size
    return caught.value.ranks, seconds, str(caught.value)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_is_named_soon_after_the_timeout_and_comes_back_to_the_next_operation(frozen: int) -> None:
    outcomes = values(run_ranks(4, _frozen, frozen, init=False, env={"STORE_PORT": _free_port()}))
    for rank, (ranks, seconds, message) in enumerate(outcomes):
        assert ranks == [frozen]
        if rank == frozen:
            assert "came after the others had given up on it" in message
        else:
            assert seconds < 10
