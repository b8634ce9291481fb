"""What a process has of one group: its connections, and the operations that run over them.

Owns the numbering of operations, the dispatch of what arrives to the operation that it is for, and the clock of the
beats. It knows nothing of what an operation does. Channels of one group share one link.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from robust_dcp.comm.connection import Connection
from robust_dcp.comm.frames import Frame, Kind, operation_id
from robust_dcp.comm.open_files import ensure_open_files
from robust_dcp.comm.pipe import GlooPipe, Payload, Pipe
from robust_dcp.comm.relay import RelayPipes
from robust_dcp.comm.stats import ExchangeStats
from robust_dcp.comm.survey import Surveyor

__all__ = ["SKIP", "Link", "MeetingPlace", "OperationKey", "RunningOperation"]

SKIP = 1
"""Flag of a frame that ends an operation: ranks that are not in it will not be."""

_GOODBYE_SECONDS = 1.0
"""How long other ranks have to answer when this one leaves."""

_ELSEWHERE_SECONDS = 3.0
"""How long a rank may be in another operation before that is taken for a mistake: its threads may have started two."""


class OperationKey(NamedTuple):
    """An operation: a hash of its name, and how many of that name there were before."""

    operation: int
    occurrence: int


class RunningOperation(Protocol):
    """What a link knows of an operation."""

    key: OperationKey

    def deliver(self, peer: int, frame: Frame, payload: Payload) -> None: ...

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None: ...

    def beat(self) -> None: ...

    def whereabouts(self) -> str: ...

    def missing(self) -> dict[int, str]: ...


class MeetingPlace(Protocol):
    """How ranks reach each other: :class:`robust_dcp.comm.meeting.Meeting`, but in tests."""

    closed: bool

    def connect(self, peer: int, generation: int, purpose: str = ...) -> Pipe: ...

    def await_announced(self, n_connections: int) -> None: ...

    def settle(self, operation: str, account: bytes) -> bytes: ...

    def account_of(self, operation: str) -> bytes | None: ...


class _Early(NamedTuple):
    """A message for an operation that this rank is not in yet."""

    peer: int
    frame: Frame
    payload: Payload
    seconds: float


class Link:
    """The connections of one rank to others of its group, made when they are first needed.

    Args:
        rank: of this process in the group.
        ranks: the global rank of each rank of the group.
        meeting: where it meets the others; ``None`` in a group of one.
    """

    def __init__(self, *, rank: int, ranks: tuple[int, ...], meeting: MeetingPlace | None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.stats = ExchangeStats()
        self.surveyor = Surveyor(self)
        self.relay_pipes = RelayPipes(self._connect_for_relay)
        self._meeting = meeting
        self._lock = threading.RLock()
        self._connections: dict[int, Connection] = {}
        self._generations: dict[int, int] = defaultdict(int)
        self._operations: weakref.WeakValueDictionary[OperationKey, RunningOperation] = weakref.WeakValueDictionary()
        self._occurrences: dict[int, int] = defaultdict(int)
        self._early: dict[OperationKey, list[_Early]] = defaultdict(list)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def begin(self, name: str, operation: RunningOperation, peers: Sequence[int]) -> None:
        """Number ``operation``, and hand it what has come for it already. Its ``key`` is set here.

        Args:
            name: the same on all ranks.
            operation: kept as long as somebody else keeps it.
            peers: the ranks that it will talk to.

        Raises:
            RobustCheckpointError: the process may not open as many files.
        """
        with self._lock:
            ensure_open_files(sum(peer not in self._connections for peer in peers))
            number = operation_id(name)
            operation.key = OperationKey(number, self._occurrences[number])
            self._occurrences[number] += 1
            self._operations[operation.key] = operation
            early = self._early.pop(operation.key, [])
            n_connections = sum(self._generations.values())
        if self._meeting is not None:
            self._meeting.await_announced(n_connections)
        for each in early:
            operation.deliver(each.peer, each.frame, each.payload)
        if peers:
            _CLOCK.add(self)

    def connection(self, peer: int) -> Connection:
        """The connection to ``peer``, made now if there is none."""
        with self._lock:
            found = self._connections.get(peer)
            if found is None or found.is_over:
                self._connections[peer] = found = Connection(peer, self._connects(peer), self, previous=found)
            return found

    def _connects(self, peer: int) -> Callable[[], Pipe]:
        generation = self._generations[peer]
        self._generations[peer] += 1
        meeting = self._meeting
        if meeting is None:
            raise ValueError("a group of one has nobody to connect to")
        return lambda: meeting.connect(peer, generation)

    def _connect_for_relay(self, peer: int, generation: int) -> GlooPipe:
        if self._meeting is None:
            raise ValueError("a group of one has nobody to connect to")
        return cast(GlooPipe, self._meeting.connect(peer, generation, "relay"))

    def account_of(self, operation: OperationKey) -> bytes | None:
        """What the ranks have made the account of how ``operation`` ended; ``None`` if there is none yet.

        Raises:
            StoreLost: the ranks have no place to agree on it.
        """
        if self._meeting is None:
            return None
        return self._meeting.account_of(f"{operation.operation:016x}/{operation.occurrence}")

    def settle(self, operation: OperationKey, account: bytes) -> bytes:
        """Make ``account`` the one of how ``operation`` ended, unless there is one; return the one that counts.

        Raises:
            StoreLost: the ranks have no place to agree on it.
        """
        if self._meeting is None:
            return account
        return self._meeting.settle(f"{operation.operation:016x}/{operation.occurrence}", account)

    def peers(self) -> list[int]:
        """The ranks that this one is connected to."""
        with self._lock:
            return [peer for peer, connection in self._connections.items() if connection.is_open]

    def send(self, peer: int, frame: Frame, payload: Payload = b"") -> None:
        """Send a message to ``peer``; never waits."""
        self.connection(peer).send(frame, payload)

    def deliver(self, peer: int, frame: Frame, payload: Payload) -> None:
        if frame.kind in (Kind.ASK, Kind.ANSWER):
            self.surveyor.deliver(peer, frame, payload)
            return
        key = OperationKey(frame.operation, frame.occurrence)
        with self._lock:
            operation = self._operations.get(key)
            if operation is None:
                if frame.occurrence < self._occurrences.get(frame.operation, 0):
                    return  # it is over here
                if frame.kind != Kind.FAIL or not frame.flags & SKIP:
                    self._keep_early(key, _Early(peer, frame, payload, time.monotonic()))
                    return
                self._skip(key)
        if operation is not None:
            operation.deliver(peer, frame, payload)
            return
        for other in self.peers():
            if other != peer:
                self.send(other, frame, payload)

    def _skip(self, key: OperationKey) -> None:
        """Never be in the operation ``key``: all ranks have been told that it is over."""
        self._early.pop(key, None)
        self._occurrences[key.operation] = max(self._occurrences[key.operation], key.occurrence + 1)

    def _keep_early(self, key: OperationKey, message: _Early) -> None:
        waiting = self._early[key]
        if message.frame.kind == Kind.BEAT and any(each.peer == message.peer for each in waiting):
            return
        waiting.append(message)

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None:
        for operation in self.operations():
            operation.lost(peer, detail, damaged=damaged)

    def operations(self) -> list[RunningOperation]:
        """Those that this rank is in."""
        with self._lock:
            return list(self._operations.values())

    def end(self, operation: RunningOperation) -> None:
        """Take ``operation`` off the list: what still comes for it is of no use to anybody."""
        with self._lock:
            self._operations.pop(operation.key, None)

    def is_elsewhere(self, peer: int, patience_seconds: float) -> bool:
        """Whether ``peer`` has been for a while in an operation that this rank is not in."""
        before = time.monotonic() - min(_ELSEWHERE_SECONDS, patience_seconds)
        with self._lock:
            return any(
                each.peer == peer and each.seconds < before
                for messages in self._early.values()
                if not any(each.frame.kind == Kind.FAIL for each in messages)
                for each in messages
            )

    def fail_elsewhere(self, account: bytes) -> None:
        """End the operations that other ranks are in and this rank is not, for all ranks.

        Those that were not in one of them skip it, so that all go on with the same numbers.
        """
        with self._lock:
            keys = [key for key, early in self._early.items() if not any(e.frame.kind == Kind.FAIL for e in early)]
            for key in keys:
                self._skip(key)
        for key in keys:
            for peer in self.peers():
                self.send(peer, Frame(Kind.FAIL, key.operation, key.occurrence, flags=SKIP), account)

    def close(self) -> None:
        """Close all connections, once what was sent over them has arrived, or has had time to."""
        if self._meeting is not None:
            self._meeting.closed = True
        with self._lock:
            connections = [each for each in self._connections.values() if each.is_open]
        for connection in connections:
            connection.say_goodbye()
        until = time.monotonic() + _GOODBYE_SECONDS
        while time.monotonic() < until and any(connection.is_open for connection in connections):
            time.sleep(0.001)
        with self._lock:
            remaining, self._connections = self._connections, {}
        for connection in remaining.values():
            connection.close()
        self.relay_pipes.interrupt()


class _Clock:
    """Lets the operations of all links of this process beat, from one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, link: Link) -> None:
        with self._lock:
            self._links.add(link)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="robust_dcp: beats", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            with self._lock:
                links = list(self._links)
            for link in links:
                for operation in link.operations():
                    operation.beat()
            del links


TICK_SECONDS = 0.1
_CLOCK = _Clock()
