"""Ranks as threads of one process, with real channels over real gloo connections. They share a store in memory."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from robust_dcp.comm import Channel
from robust_dcp.comm.connections import Ask, Connections, Moving, Whereabouts
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.store import Notes


class CountingStore(dist.Store):
    """A store in memory that counts the bytes of all keys and values in calls and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._store = dist.HashStore()
        self._lock = threading.Lock()

    def _count(self, *parts: bytes | str) -> None:
        with self._lock:
            self.nbytes += sum(map(len, parts))

    def set(self, key: str, value: bytes | str) -> None:
        self._count(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        self._count(key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count(key, bytes(8))
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count(key, expected, desired)
        return bytes(self._store.compare_set(key, expected, desired))

    def check(self, keys: Iterable[str]) -> bool:
        keys = list(keys)
        self._count(*keys)
        return bool(self._store.check(keys))

    def wait(self, keys: Iterable[str], timeout: datetime.timedelta | None = None) -> None:
        keys = list(keys)
        self._count(*keys)
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


class Group(contextlib.AbstractContextManager["Group"]):
    """``size`` ranks. ``nbytes``: what each has sent to and received from each neighbour."""

    def __init__(self, size: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.size = size
        self.store = CountingStore()
        self.nbytes = [Counter[int]() for _ in range(size)]
        self._links = [self._link(rank) for rank in range(size)]
        self._channels = [Channel(Operation(link, "save", 120.0), 0) for link in self._links]

    def _link(self, rank: int) -> Link:
        notes = Notes(self.store, "robust_dcp/bench")

        def make_connections(place: str, ask: Ask) -> Connections:
            here = Whereabouts("bench", "127.0.0.1", "this host")
            return _CountingConnections(self.nbytes[rank], ask, rank, self.size, here, b"hi")

        return Link(rank=rank, ranks=tuple(range(self.size)), notes=notes, make_connections=make_connections)

    def run(self, function: Callable[[Channel], Any]) -> list[Any]:
        """Run ``function`` on each rank, and return the results. If a rank raises, its error is raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def be_rank(rank: int) -> None:
            try:
                results[rank] = function(self._channels[rank])
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

    def n_connections(self) -> list[int]:
        """How many connections each rank holds."""
        return [len(link._connections.peers) if link._connections else 0 for link in self._links]

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.close()


def n_sockets() -> int:
    """The number of TCP sockets of this process."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as each:
                    found += each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6)
    return found
