"""Ranks that are threads of this process: the real channel, on a simulated network or on connections of gloo.

:meth:`SimulatedNetwork.link` gives a rank its ``Link``, with connections and a store that damage, delay and cut what
they are told to; everything above is the real thing. It never decides by itself what goes wrong: the faults are a list
that its maker gives it. :class:`GlooNetwork` has no faults.

    network = SimulatedNetwork(3, [Fault(FaultKind.CUT, sender=1, receiver=0, message=2)])
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
from robust_dcp.comm.connections import Ask, Broken, Connections, Moving, Whereabouts
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.store import Notes

__all__ = ["Fault", "FaultKind", "GlooNetwork", "SimulatedNetwork", "quick", "run_channels", "run_threads"]


class FaultKind(Enum):
    """What can happen to a message, or because of it."""

    DELAY = "delay"  # it takes `seconds`, and so do those behind it
    DAMAGE_FRAME = "damage frame"
    DAMAGE_PAYLOAD = "damage payload"
    CUT = "cut"  # the connection breaks, for both sides
    KILL_SENDER = "kill sender"
    KILL_RECEIVER = "kill receiver"
    FREEZE_SENDER = "freeze sender"  # for `seconds`
    FREEZE_RECEIVER = "freeze receiver"


@dataclass(frozen=True)
class Fault:
    """What happens to the ``message``-th frame (from 0) that ``sender`` sends to ``receiver``."""

    kind: FaultKind
    sender: int
    receiver: int
    message: int
    seconds: float = 0.0


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

    def __init__(self, network: SimulatedNetwork, place: str, ask: Ask, rank: int) -> None:
        here = Whereabouts(f"rank {rank} of a simulation", "", "")
        super().__init__(ask, rank, network.size, here, b"hi")
        self._network = network
        self._place = place
        network.join(place, rank, self)

    def _make_group(self, look: Callable[[], None]) -> None:
        """There is none."""

    def start(self, verb: str, peer: int, tag: int, data: Any) -> Moving:
        if verb == "send":
            content = data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)
            self._network.send(self._place, self._rank, peer, tag, content)
        return Moving(data, torch.empty(0), [] if verb == "send" else [(peer, tag)])

    def finish(self, moving: Moving, seconds: float | None = None, *_: Any, **__: Any) -> None:
        for peer, tag in moving.works:
            moving.data[:] = torch.frombuffer(self.receive(peer, tag, 0, seconds), dtype=torch.uint8)

    def receive(self, peer: int, tag: int, nbytes: int, seconds: float | None = None, *_: Any, **__: Any) -> bytearray:
        return bytearray(self._network.receive(self._place, self._rank, peer, tag, seconds))

    def drop(self) -> None:
        self.is_dropped = True
        self._network.leave(self._place, self._rank)


class SimulatedNetwork:
    """See the module.

    Args:
        size: how many ranks.
        faults: what goes wrong.
        store_host: the rank that takes the store along when it is killed; ``None`` if the store survives all.

    Attributes:
        happened: the faults that have struck.
        killed: the ranks that are gone.
    """

    def __init__(self, size: int, faults: Sequence[Fault] = (), store_host: int | None = None) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.happened: list[Fault] = []
        self.killed: set[int] = set()
        self._faults = {(fault.sender, fault.receiver, fault.message): fault for fault in faults}
        self._store = dist.HashStore()
        self._store_host = store_host
        self._is_closed = False
        self._n_sent: dict[tuple[int, int], int] = defaultdict(int)
        self._damages: set[tuple[str, int, int]] = set()
        self._changed = threading.Condition(self.lock)
        self._sent: dict[tuple[str, int, int, int], deque[tuple[float, bytes]]] = defaultdict(deque)
        self._broken: set[tuple[str, int, int]] = set()
        self._members: dict[str, dict[int, _SimulatedConnections]] = defaultdict(dict)
        self._thaws: dict[int, float] = {}

    def link(self, rank: int) -> Link:
        """The link of ``rank``."""
        return Link(
            rank=rank,
            ranks=tuple(range(self.size)),
            notes=Notes(_StoreOfRank(self, rank), "robust_dcp/simulation"),
            make_connections=lambda place, ask: _SimulatedConnections(self, place, ask, rank),
            store_host=self._store_host,
        )

    def join(self, place: str, rank: int, connections: _SimulatedConnections) -> None:
        """``rank`` may be connected to."""
        with self.lock:
            self._members[place][rank] = connections

    def leave(self, place: str, rank: int) -> None:
        """The connections of ``rank`` in a place are closed."""
        with self.lock:
            for peer in range(self.size):
                self._break(place, rank, peer)

    def _break(self, place: str, rank: int, peer: int) -> None:
        self._broken |= {(place, rank, peer), (place, peer, rank)}
        self._changed.notify_all()

    def send(self, place: str, sender: int, receiver: int, tag: int, data: bytes) -> None:
        """What ``sender`` sends arrives, as far as no fault strikes."""
        with self.lock:
            way = place, sender, receiver
            if way in self._broken or sender in self.killed:
                raise Broken("connection reset by peer")
            seconds = 0.0
            if len(data) == FRAME_NBYTES:
                fault = self._next_fault(sender, receiver)
                kind = None if fault is None else fault.kind
                self._damages.discard(way)
                if kind is FaultKind.DAMAGE_FRAME:
                    data = _damaged(data)
                if kind is FaultKind.DAMAGE_PAYLOAD:
                    self._damages.add(way)
                if fault is not None and kind is FaultKind.DELAY:
                    seconds = fault.seconds
                if fault is not None:
                    self._strike(place, fault)
            elif way in self._damages:
                self._damages.discard(way)
                data = _damaged(data)
            self._sent[place, sender, receiver, tag].append((time.monotonic() + seconds, data))
            self._changed.notify_all()

    def _next_fault(self, sender: int, receiver: int) -> Fault | None:
        number = self._n_sent[sender, receiver]
        self._n_sent[sender, receiver] += 1
        fault = self._faults.get((sender, receiver, number))
        if fault is not None:
            self.happened.append(fault)
        return fault

    def _strike(self, place: str, fault: Fault) -> None:
        if fault.kind is FaultKind.CUT:
            self._break(place, fault.sender, fault.receiver)
        elif fault.kind in (FaultKind.KILL_SENDER, FaultKind.KILL_RECEIVER):
            self.kill(fault.sender if fault.kind is FaultKind.KILL_SENDER else fault.receiver)
        elif fault.kind in (FaultKind.FREEZE_SENDER, FaultKind.FREEZE_RECEIVER):
            self.freeze(fault.sender if fault.kind is FaultKind.FREEZE_SENDER else fault.receiver, fault.seconds)

    def receive(self, place: str, receiver: int, sender: int, tag: int, seconds: float | None) -> bytes:
        """Wait for what ``sender`` sends."""
        until = None if seconds is None else time.monotonic() + seconds
        with self.lock:
            while True:
                pause = self._pause(sender, receiver)
                waiting = self._sent[place, sender, receiver, tag]
                is_over = (place, sender, receiver) in self._broken or self._is_closed or receiver in self.killed
                if waiting and not pause:
                    pause = waiting[0][0] - time.monotonic()
                    if pause <= 0:
                        return waiting.popleft()[1]
                elif is_over and not pause:
                    raise Broken("connection reset by peer")
                if until is not None and time.monotonic() > until:
                    raise Broken("timed out")
                self._changed.wait(min(pause or 1.0, 1.0))

    def _pause(self, *ranks: int) -> float:
        if self._is_closed:
            return 0.0
        return max(0.0, max(self._thaws.get(rank, 0.0) for rank in ranks) - time.monotonic())

    def reach_store(self, rank: int, nbytes: int) -> dist.Store:
        """The store, once ``rank`` reaches it.

        Raises:
            RuntimeError: the store is gone, or ``rank`` is.
        """
        with self.lock:
            while (pause := self._pause(rank)) > 0 and rank not in self.killed:
                self._changed.wait(pause)
            if rank in self.killed or self._store_host in self.killed or self._is_closed:
                raise RuntimeError("connection reset by peer")
        return self._store

    def kill(self, rank: int) -> None:
        """``rank`` is gone, and says nothing any more; its thread finds all its connections broken."""
        with self.lock:
            self.killed.add(rank)
            for place in self._members:
                for peer in range(self.size):
                    self._break(place, rank, peer)
            self._changed.notify_all()

    def freeze(self, rank: int, seconds: float) -> None:
        """Nothing comes to ``rank`` or from it until ``seconds`` have passed."""
        with self.lock:
            self._thaws[rank] = time.monotonic() + seconds

    def heal(self) -> None:
        """No fault strikes any more. What has struck already stays as it is."""
        with self.lock:
            self._faults = {}

    def close(self) -> None:
        """End all waits, for good."""
        with self.lock:
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

    killed: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.size = size
        self.store_nbytes = 0
        self._store = dist.HashStore()
        self._lock = threading.Lock()

    def link(self, rank: int) -> Link:
        """The link of ``rank``."""

        def make_connections(place: str, ask: Ask) -> Connections:
            here = Whereabouts("a thread", "127.0.0.1", "this host")
            return Connections(ask, rank, self.size, here, b"hi")

        notes = Notes(_StoreOfRank(self, rank), "robust_dcp/gloo")
        return Link(rank=rank, ranks=tuple(range(self.size)), notes=notes, make_connections=make_connections)

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
        AssertionError: a rank that was not killed has not ended within ``timeout_seconds``.
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
    for rank, thread in enumerate(threads):
        while thread.is_alive() and rank not in network.killed and time.monotonic() < end:
            thread.join(0.05)
    found = [results.get(rank) for rank in ranks]
    late = [rank for rank in ranks if rank not in results and rank not in network.killed]
    network.close()
    for each in links:
        each.close()
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
