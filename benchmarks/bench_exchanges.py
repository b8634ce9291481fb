"""Measures what exchanges between many ranks cost: sockets, bytes, store traffic and CPU time.

The ranks are threads of one process, and share a store in memory. The channels, the tree and gloo are real.

    python -m benchmarks.bench_exchanges --ranks 2 8 64 128 1024 --json exchanges.json

A repeated save means its exchanges only: an agreement, a gather in which no rank has anything to send, and a barrier.
For comparison, ``--mesh 64`` adds a full mesh of gloo that all-gathers the same number of headers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.connections import Connections, Moving, Whereabouts
from robust_dcp.comm.endings import Notes
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation

__all__ = ["CountingStore", "Group", "Row", "measure", "n_sockets"]

_N_SAVES = 5
_HEADER_NBYTES = 160


class Note(msgspec.Struct, frozen=True):
    """The message of a rank in a gather. It is usually empty."""

    text: str


@dataclass(frozen=True)
class Row:
    """The costs in a group of ``ranks`` ranks. Each figure is for one rank.

    Attributes:
        how: ``tree``, or ``mesh`` for the comparison.
        sockets_mean, sockets_max: connections to other ranks. Each process has one more socket, which listens.
        connect_seconds: the time until all ranks are connected and have done the first save.
        store_nbytes: the bytes of keys and values, sent and received, until all ranks are connected.
        store_calls: the number of calls of the store until then.
        first_cpu_ms: the CPU time of connecting and of the first save.
        save_cpu_ms: the CPU time of a repeated save.
        save_seconds: the time of a repeated save of all ranks on this machine's cores.
        save_nbytes_mean, save_nbytes_max: bytes sent and received in a repeated save.
        save_nbytes_a_neighbour: the most bytes between a rank and one neighbour.
    """

    how: str
    ranks: int
    sockets_mean: float
    sockets_max: int
    connect_seconds: float
    store_nbytes: float
    store_calls: float
    first_cpu_ms: float
    save_cpu_ms: float
    save_seconds: float
    save_nbytes_mean: float
    save_nbytes_max: int
    save_nbytes_a_neighbour: float


class CountingStore(dist.Store):
    """A store in memory that counts the bytes of all keys and values in calls and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.calls: Counter[str] = Counter()
        self._store = dist.HashStore()
        self._lock = threading.Lock()

    def _count(self, what: str, *parts: bytes | str) -> None:
        with self._lock:
            self.calls[what] += 1
            self.nbytes += sum(map(len, parts))

    def set(self, key: str, value: bytes | str) -> None:
        self._count("set", key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        self._count("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count("add", key, bytes(8))
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set", key, expected, desired)
        return bytes(self._store.compare_set(key, expected, desired))

    def check(self, keys: Iterable[str]) -> bool:
        keys = list(keys)
        self._count("check", *keys)
        return bool(self._store.check(keys))

    def wait(self, keys: Iterable[str], timeout: datetime.timedelta | None = None) -> None:
        keys = list(keys)
        self._count("wait", *keys)
        self._store.wait(keys, datetime.timedelta(seconds=60) if timeout is None else timeout)

    def clone(self) -> CountingStore:
        return self


class _CountingConnections(Connections):
    """Connections that count the bytes between their rank and each neighbour."""

    def __init__(self, nbytes: Counter[int], *args: Any) -> None:
        super().__init__(*args)
        self._nbytes = nbytes

    def send(self, peer: int, tag: int, data: Any) -> Moving:
        self._nbytes[peer] += len(data)
        return super().send(peer, tag, data)

    def receive(self, peer: int, tag: int, nbytes: int, *args: Any, **more: Any) -> bytearray:
        self._nbytes[peer] += nbytes
        return super().receive(peer, tag, nbytes, *args, **more)


class Group:
    """``size`` ranks as threads of this process, with real channels over real gloo connections.

    Attributes:
        store: the store that all ranks share.
        channels: the channel of each rank.
    """

    def __init__(self, size: int, timeout_seconds: float = 120.0) -> None:
        self.size = size
        self.store = CountingStore()
        self._nbytes = [Counter[int]() for _ in range(size)]
        self._links = [self._link(rank) for rank in range(size)]
        self.channels = [Channel(Operation(link, "save", timeout_seconds), 0) for link in self._links]

    def _link(self, rank: int) -> Link:
        notes = Notes(self.store, "robust_dcp/bench")

        def make_connections(place: str) -> Connections:
            store, nbytes = notes.under(place), self._nbytes[rank]
            here = Whereabouts("bench", "127.0.0.1", "this host")
            return _CountingConnections(nbytes, store, rank, self.size, here, b"hi")

        return Link(rank=rank, ranks=tuple(range(self.size)), notes=notes, make_connections=make_connections)

    def run(self, function: Callable[[Channel], Any]) -> list[Any]:
        """Run ``function`` on each rank, and return the results.

        Raises:
            BaseException: a rank raised it. The first is raised.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def be_rank(rank: int) -> None:
            try:
                results[rank] = function(self.channels[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def take_nbytes(self) -> list[Counter[int]]:
        """The bytes that each rank has sent to and received from each neighbour since the last call."""
        found = []
        for nbytes in self._nbytes:
            found.append(Counter(nbytes))
            nbytes.clear()
        return found

    def n_connections(self) -> list[int]:
        """How many connections each rank holds."""
        return [len(link._connections.peers) if link._connections else 0 for link in self._links]

    def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            link.close()


def save(channel: Channel) -> None:
    """The exchanges of a save with a known plan."""
    channel.agree("save: plan", lambda: Offer(bytes(16), bytes(16), 1, 1))
    channel.gather("save: write", lambda: None, Note)
    channel.barrier("save: commit")


def n_sockets() -> int:
    """The number of TCP sockets of this process."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as each:
                    found += each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6)
    return found


def measure(size: int) -> Row:
    """Measure a tree of ``size`` ranks in this process."""
    before = n_sockets()
    began, cpu = time.perf_counter(), time.process_time()
    group = Group(size)
    group.run(save)
    connect_seconds, first_cpu = time.perf_counter() - began, time.process_time() - cpu
    store_nbytes, store_calls = group.store.nbytes, group.store.calls.total()
    group.run(save)
    group.take_nbytes()
    began, cpu = time.perf_counter(), time.process_time()

    def save_often(channel: Channel) -> None:
        for _ in range(_N_SAVES):
            save(channel)

    group.run(save_often)
    save_seconds, save_cpu = (time.perf_counter() - began) / _N_SAVES, (time.process_time() - cpu) / _N_SAVES
    connections = group.n_connections()
    # Each rank has a socket that listens, and both ends of each connection are sockets of this process.
    n_found = n_sockets() - before
    assert n_found == sum(connections) + size, (
        f"{n_found} sockets, {sum(connections)} ends of connections, {size} ranks"
    )
    nbytes = group.take_nbytes()
    row = Row(
        how="tree",
        ranks=size,
        sockets_mean=sum(connections) / size,
        sockets_max=max(connections),
        connect_seconds=connect_seconds,
        store_nbytes=store_nbytes / size,
        store_calls=store_calls / size,
        first_cpu_ms=1e3 * first_cpu / size,
        save_cpu_ms=1e3 * save_cpu / size,
        save_seconds=save_seconds,
        save_nbytes_mean=sum(each.total() for each in nbytes) / size / _N_SAVES,
        save_nbytes_max=max(each.total() for each in nbytes) // _N_SAVES,
        save_nbytes_a_neighbour=max(max(each.values()) for each in nbytes) / _N_SAVES,
    )
    assert group.store.nbytes == store_nbytes, "ranks that are connected asked the store"
    group.close()
    return row


def measure_mesh(size: int) -> Row:
    """Measure a full mesh of gloo. All ranks all-gather headers, once for each of the three exchanges of a save."""
    before, store = n_sockets(), CountingStore()
    groups: list[Any] = [None] * size

    def on_all(function: Callable[[int], None]) -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        threads = [threading.Thread(target=function, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began, time.process_time() - cpu

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = datetime.timedelta(seconds=100)
        options._threads = 1
        groups[rank] = dist.ProcessGroupGloo(store, rank, size, options)

    def gather(rank: int) -> None:
        own = torch.zeros(_HEADER_NBYTES, dtype=torch.uint8)
        for _ in range(3):
            groups[rank].allgather([[torch.empty_like(own) for _ in range(size)]], [own]).wait()

    connect_seconds, first_cpu = on_all(make)
    store_nbytes, store_calls = store.nbytes, store.calls.total()
    sockets = n_sockets() - before
    on_all(gather)
    save_seconds, save_cpu = on_all(gather)
    nbytes = 2 * 3 * _HEADER_NBYTES * (size - 1)  # in a ring each header passes each rank once
    return Row(
        "mesh",
        size,
        sockets / size,
        sockets // size,
        connect_seconds,
        store_nbytes / size,
        store_calls / size,
        1e3 * first_cpu / size,
        1e3 * save_cpu / size,
        save_seconds,
        nbytes,
        nbytes,
        nbytes / 2,
    )


def _measured(function: Callable[[int], Row], size: int) -> Row:
    """Call ``function`` in a new process. It ends without closing thousands of connections one by one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_end, args=(function, size, sender))
    process.start()
    sender.close()
    row: Row = receiver.recv()
    process.join()
    return row


def _measure_and_end(function: Callable[[int], Row], size: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    # Python wakes each thread that waits for the GIL 200 times a second. With the threads of 1024 ranks that would be
    # most of what is measured.
    sys.setswitchinterval(1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if function is measure_mesh else soft  # the package raises the limit itself
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    sender.send(function(size))
    sender.close()
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark with these command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 128, 1024])
    parser.add_argument("--mesh", type=int, nargs="*", default=[])
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rows = [_measured(measure, size) for size in options.ranks]
    rows += [_measured(measure_mesh, size) for size in options.mesh]
    _show(rows, options.json)


def _show(rows: Sequence[Row], path: str | None) -> None:
    names = list(asdict(rows[0]))
    for name in names:
        values = [getattr(row, name) for row in rows]
        texts = [f"{each:.2f}" if isinstance(each, float) else str(each) for each in values]
        print(f"{name:26}" + "".join(f"{text:>12}" for text in texts))
    if path is not None:
        with open(path, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
