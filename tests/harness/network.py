"""Ranks that are threads of this process: the real channel, on a simulated network or on connections of gloo.

:meth:`SimulatedNetwork.link` gives a rank its ``Link``, with connections that damage what they are told to;
everything above is the real thing. :class:`GlooNetwork` has no faults. All other faults are tried in virtual time: see
:mod:`tests.harness.simulation`.

    network = SimulatedNetwork(3, [Fault(FaultKind.DAMAGE_FRAME, sender=1, receiver=0, message=2)])
    results = run_channels(network, lambda channel: channel.barrier("plan"))
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from robust_dcp.comm import Channel, patience
from robust_dcp.comm.connections import Broken, Connections, Moving, Whereabouts
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.comm.link import Link
from robust_dcp.comm.loop import run_link
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.store import Notes

__all__ = ["Fault", "FaultKind", "GlooNetwork", "SimulatedNetwork", "quick", "run_channels", "run_threads"]


class FaultKind(Enum):
    """What can happen to a message."""

    DAMAGE_FRAME = "damage frame"
    DAMAGE_PAYLOAD = "damage payload"


@dataclass(frozen=True)
class Fault:
    """What happens to the ``message``-th frame (from 0) that ``sender`` sends to ``receiver``."""

    kind: FaultKind
    sender: int
    receiver: int
    message: int


class _StoreOfRank(dist.Store):
    """The store that all ranks share, as one rank reaches it."""

    def __init__(self, network: SimulatedNetwork | GlooNetwork, rank: int) -> None:
        super().__init__()
        self._network, self._rank = network, rank

    def _reached(self, *parts: Any) -> Any:
        return self._network.reach_store(self._rank, sum(map(len, parts)))

    def set(self, key: str, value: Any) -> None:
        self._reached(key, value).set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._reached(key).get(key))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._reached(*keys).check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        self._reached(*keys).wait(list(keys), timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._reached(key, bytes(8)).add(key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._reached(key, expected, desired).compare_set(key, expected, desired))

    def clone(self) -> _StoreOfRank:
        return self


class _SimulatedConnections(Connections):
    """The connections of one rank in one place, without gloo."""

    def __init__(self, network: SimulatedNetwork, place: str, rank: int) -> None:
        super().__init__(rank, network.size, Whereabouts(f"rank {rank} of a simulation", "", ""), b"hi")
        self.is_lazy = True
        self._network = network
        self._place = place

    def make_group(self, store: Any) -> None:
        """There is none."""

    def start(self, verb: str, peer: int, tag: int, data: Any) -> Moving:
        if verb == "send":
            content = data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)
            self._network.send(self._place, self.rank, peer, tag, content)
        return Moving(data, torch.empty(0), [] if verb == "send" else [(peer, tag)])

    def finish(self, moving: Moving, seconds: float | None = None, *_: Any, **__: Any) -> None:
        for peer, tag in moving.works:
            data = self._network.receive(self._place, self.rank, peer, tag, seconds)
            moving.data[:] = (
                torch.frombuffer(data, dtype=torch.uint8) if isinstance(moving.data, torch.Tensor) else data
            )

    def drop(self) -> None:
        self.is_dropped = True
        self._network.leave(self._place, self.rank)


class SimulatedNetwork:
    """See the module.

    Args:
        size: how many ranks.
        faults: what goes wrong.
    """

    def __init__(self, size: int, faults: Sequence[Fault] = ()) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._faults = {(fault.sender, fault.receiver, fault.message): fault for fault in faults}
        self._store = dist.HashStore()
        self._is_closed = False
        self._n_sent: dict[tuple[int, int], int] = defaultdict(int)
        self._damages: set[tuple[str, int, int]] = set()
        self._sent: dict[tuple[str, int, int, int], deque[bytes]] = defaultdict(deque)
        self._broken: set[tuple[str, int, int]] = set()

    def link(self, rank: int) -> Link:
        """The link of ``rank``."""

        def make_connections() -> Connections:
            return _SimulatedConnections(self, link._place(link.generation), rank)

        notes = Notes(_StoreOfRank(self, rank), "robust_dcp/simulation")
        link = run_link(rank, tuple(range(self.size)), notes, make_connections)
        return link

    def leave(self, place: str, rank: int) -> None:
        """The connections of ``rank`` in a place are closed."""
        with self._changed:
            for peer in range(self.size):
                self._broken |= {(place, rank, peer), (place, peer, rank)}
            self._changed.notify_all()

    def send(self, place: str, sender: int, receiver: int, tag: int, data: bytes) -> None:
        """What ``sender`` sends arrives, as far as no fault strikes."""
        with self._changed:
            way = place, sender, receiver
            if way in self._broken:
                raise Broken("connection reset by peer")
            if len(data) == FRAME_NBYTES:
                number = self._n_sent[sender, receiver]
                self._n_sent[sender, receiver] += 1
                fault = self._faults.get((sender, receiver, number))
                self._damages.discard(way)
                if fault is not None and fault.kind is FaultKind.DAMAGE_FRAME:
                    data = _damaged(data)
                if fault is not None and fault.kind is FaultKind.DAMAGE_PAYLOAD:
                    self._damages.add(way)
            elif way in self._damages:
                self._damages.discard(way)
                data = _damaged(data)
            self._sent[place, sender, receiver, tag].append(data)
            self._changed.notify_all()

    def receive(self, place: str, receiver: int, sender: int, tag: int, seconds: float | None) -> bytes:
        """Wait for what ``sender`` sends."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                waiting = self._sent[place, sender, receiver, tag]
                if waiting:
                    return waiting.popleft()
                if (place, sender, receiver) in self._broken or self._is_closed:
                    raise Broken("connection reset by peer")
                if until is not None and time.monotonic() > until:
                    raise Broken("timed out")
                self._changed.wait(1.0)

    def reach_store(self, rank: int, nbytes: int) -> dist.Store:
        """The store.

        Raises:
            RuntimeError: it is gone.
        """
        if self._is_closed:
            raise RuntimeError("connection reset by peer")
        return self._store

    def heal(self) -> None:
        """No fault strikes any more. What has struck already stays as it is."""
        with self._changed:
            self._faults = {}

    def close(self) -> None:
        """End all waits, for good."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


class GlooNetwork:
    """Real connections between ``size`` ranks, and a store in memory.

    Attributes:
        store_nbytes: the keys and values that were sent to the store.
    """

    def __init__(self, size: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.size = size
        self.store_nbytes = 0
        self._store = dist.HashStore()
        self._lock = threading.Lock()

    def link(self, rank: int) -> Link:
        """The link of ``rank``."""

        def make_connections() -> Connections:
            connections = Connections(rank, self.size, Whereabouts("a thread", "127.0.0.1", "this host"), b"hi")
            connections.listen()
            return connections

        notes = Notes(_StoreOfRank(self, rank), "robust_dcp/gloo")
        return run_link(rank, tuple(range(self.size)), notes, make_connections)

    def reach_store(self, rank: int, nbytes: int) -> dist.Store:
        """The store."""
        with self._lock:
            self.store_nbytes += nbytes
        return self._store

    def close(self) -> None:
        """Each link closes its own connections."""


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Beats every 50 ms, and other times in proportion: within the block, for all links of the process.

    But the store may take long, since a frozen rank does not reach it, while its clock goes on.
    """
    seconds_of = {"BEAT": 0.05, "TICK": 0.01, "GONE": 0.005, "STORE_ANSWER": 20.0}
    # Who is alive has to come back and to answer, also where 72 ranks share a core.
    seconds_of |= {"RECONNECT": 6.0, "ROLL_CALL": 3.0, "VERDICT": 8.0}
    with contextlib.ExitStack() as stack:
        for name, seconds in seconds_of.items():
            stack.enter_context(mock.patch.object(patience, f"{name}_SECONDS", seconds))
        yield


def run_threads(
    network: SimulatedNetwork | GlooNetwork, function: Callable[[Link], Any], *, timeout_seconds: float = 30.0
) -> list[Any]:
    """What ``function(link)`` returned on each rank, in rank order, or the exception that it raised.

    Raises:
        AssertionError: a rank has not ended within ``timeout_seconds``.
    """
    ranks = tuple(range(network.size))
    links = [network.link(rank) for rank in ranks]
    results: dict[int, Any] = {}

    def be_rank(rank: int) -> None:
        try:
            results[rank] = function(links[rank])
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_seconds
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            thread.join(0.05)
    found = [results.get(rank) for rank in ranks]
    late = [rank for rank in ranks if rank not in results]
    network.close()
    for each in links:
        each.loop.close()
    for thread in threads:
        thread.join(timeout_seconds)
    if late:
        raise AssertionError(f"ranks {late} had not ended after {timeout_seconds:g} seconds; the others: {results}")
    return found


def run_channels(
    network: SimulatedNetwork | GlooNetwork, function: Callable[[Channel], Any], *, timeout_seconds: float = 30.0
) -> list[Any]:
    """As :func:`run_threads`, with a channel for each rank, whose exchanges have this timeout."""

    def be_rank(link: Link) -> Any:
        return function(Channel(Operation(link, "save", timeout_seconds), 0))

    return run_threads(network, be_rank, timeout_seconds=max(30.0, timeout_seconds))
