"""Ranks find each other by whatever store they have, and a wait ends in time: when the host of the store is frozen, by
an interrupt, or because a rank dies or does not come where torch makes a mesh."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp.comm import Channel, connections
from robust_dcp.comm.store import Notes, StoreSilent
from robust_dcp.errors import ExchangeError, ExchangeTimeout, RobustCheckpointError
from tests.comm.messages import Note
from tests.harness.faults import stand_still
from tests.harness.ranks import run_ranks, values, with_store_of_rank_0


class OfPython(dist.Store):
    """A store with the methods that torchelastic's ``EtcdStore`` has, and no others."""

    def __init__(self, below: dist.Store) -> None:
        super().__init__()
        self._below = below

    def set(self, key: str, value: Any) -> None:
        self._below.set(key, value)

    def get(self, key: str) -> bytes:
        return self._below.get(key)

    def add(self, key: str, num: int) -> int:
        return self._below.add(key, num)

    def wait(self, keys: Iterable[str], timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        self._below.wait(list(keys), timeout)

    def check(self, keys: Iterable[str]) -> bool:
        return self._below.check(list(keys))


def _slow_store() -> int:
    """The port of a ``TCPStore`` that has 2.2 seconds of work with each connection, as torch's has with a slow DNS."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def serve() -> None:
        while True:
            asking, _ = server.accept()
            time.sleep(2.2)
            answering = socket.create_connection((store.host, store.port))
            for pair in ((asking, answering), (answering, asking)):
                threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def save_and_load(path: str, port: int, kind: str, is_killed: bool = False) -> float:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = dist.FileStore(os.path.join(path, "store"), size)
    if port:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)
    if kind == "written in Python":
        store = OfPython(store)  # this name keeps it: C++ alone does not keep the Python part
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)  # gloo itself connects to killed ranks
    robust_dcp.save({f"own{rank}": torch.full((3,), rank + 1.0)}, checkpoint_id=f"{path}/1", timeout_seconds=60)
    loaded = {f"own{1 - rank}": torch.zeros(3)}
    if is_killed and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # and rank 0 leaves in the store how its load ended
    robust_dcp.load(loaded, checkpoint_id=f"{path}/1", timeout_seconds=60)
    return float(loaded[f"own{1 - rank}"][0])


@pytest.mark.parametrize("kind", ["in a file, of killed ranks", "written in Python", "slow"])
def test_ranks_save_and_load_with_a_store_of_another_kind(kind: str, tmp_path: Path) -> None:
    port = _slow_store() if kind == "slow" else 0
    if "killed" in kind:
        run_ranks(2, save_and_load, str(tmp_path), port, kind, True, init=False)
    found = run_ranks(2, save_and_load, str(tmp_path), port, kind, init=False)
    assert values(found) == [2.0, 1.0]


def test_a_question_that_is_never_answered_does_not_hold_up_the_next_one() -> None:
    notes = Notes(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "a group")
    with pytest.raises(StoreSilent):
        notes.ask("", lambda _: time.sleep(20), 2.0)
    assert notes.ask("", lambda store: store.add("n", 1), 18.0) == 1, "it waits for the first"


def test_who_leaves_a_group_takes_nobody_along_and_who_comes_after_meets_elsewhere() -> None:
    store = dist.HashStore()
    stays, leaves, comes = (Notes(store, "a group") for _ in range(3))
    for each in (stays, leaves):
        each.ask("0", lambda store: None, 9.0)
    leaves.ask("", leaves.leave, 9.0)
    assert not stays.ask("0", stays.is_pointless, 9.0)
    comes.ask("0", lambda store: None, 9.0)
    assert [stays.ask("0", stays.is_pointless, 9.0) for _ in range(2)] == [True] * 2, (
        "each of its threads has to see it"
    )


def _frozen(path: str, frozen: int, trains: bool) -> tuple[list[int] | None, float, str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Channel.for_group(operation="connect", timeout_seconds=50).barrier("connect")
    channel = Channel.for_group(operation="save 1", timeout_seconds=3)

    def write() -> None:
        if rank == frozen:
            stand_still(f"{path}/all named it")

    began = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        channel.barrier("write", write)
    seconds = time.monotonic() - began
    if rank != frozen:
        os.mkdir(f"{path}/{rank}")
        with contextlib.suppress(OSError):
            if len(os.listdir(path)) == channel.size - 1:
                os.mkdir(f"{path}/all named it")
    if trains:
        dist.barrier()
    # Only once it goes on can the next operation succeed.
    following = Channel.for_group(operation="save 2", timeout_seconds=40)
    assert len(following.all_gather("plan", lambda: Note(rank), Note)) == following.size
    return caught.value.ranks, seconds, str(caught.value)


@pytest.mark.parametrize(("frozen", "trains"), [(0, False), (0, True), (1, False)])
def test_a_frozen_rank_is_named_while_it_is_frozen_and_comes_back_to_the_next_operation(
    frozen: int, trains: bool, tmp_path: Path
) -> None:
    outcomes = values(run_ranks(4, _frozen, str(tmp_path), frozen, trains, init=False, env=with_store_of_rank_0()))
    for rank, (ranks, seconds, message) in enumerate(outcomes):
        assert ranks == [frozen] and seconds < 60, "then it goes on in any case"
        assert ("came after the others had given up on it" in message) == (rank == frozen)


def _interrupted_while_waiting() -> tuple[str, float]:
    channel = Channel.for_group(timeout_seconds=200)
    channel.barrier("connect")
    store = dist.distributed_c10d._get_default_store()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_it() -> None:
        pid = int(store.get("pid"))  # which it says in its own work
        time.sleep(0.3)  # by now it waits for this rank; if not, its own work is interrupted
        os.kill(pid, signal.SIGINT)

    began = time.monotonic()
    with pytest.raises((RobustCheckpointError, KeyboardInterrupt)) as caught:
        channel.barrier("step", interrupt_it if channel.rank else lambda: store.set("pid", str(os.getpid())))
    seconds = time.monotonic() - began
    channel.barrier("next")
    return repr(caught.value.args[0] if caught.value.args else caught.value), seconds


def test_an_interrupt_while_waiting_ends_the_exchange_on_all_ranks_at_once() -> None:
    (first, _), (second, seconds) = values(run_ranks(2, _interrupted_while_waiting))
    assert first == "KeyboardInterrupt()"
    assert "rank 0: KeyboardInterrupt" in second
    assert seconds < 100


def _in_a_mesh(is_killed: bool) -> list[list[int] | None]:
    """Connections as torch 2.7 makes them, which knows none at first use. Whom the others name if rank 3 does not come,
    or is killed."""
    connections.connects_at_first_use = lambda: False
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
