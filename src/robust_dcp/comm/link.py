"""What a process has of one group: its connections, and the operations that use them.

The link numbers operations, passes each arriving message to its operation, and triggers the beats. It knows nothing of
what an operation does. All channels of a group share one link.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from robust_dcp.comm import patience, wire
from robust_dcp.comm.connection import Connection
from robust_dcp.comm.failures import EndMessage
from robust_dcp.comm.frames import Frame, Kind, operation_id
from robust_dcp.comm.meeting import StoreLost
from robust_dcp.comm.open_files import ensure_open_files
from robust_dcp.comm.pipe import GlooPipe, Payload, Pipe
from robust_dcp.comm.process_group import Address
from robust_dcp.comm.relay import RelayPipes
from robust_dcp.comm.stats import ExchangeStats
from robust_dcp.comm.survey import Surveyor
from robust_dcp.comm.tree import Tree

__all__ = ["Link", "MeetingPlace", "OperationKey", "RunningOperation"]


class OperationKey(NamedTuple):
    """Identifies an operation: a hash of its name, and how many operations of that name there were before."""

    operation: int
    occurrence: int

    def __str__(self) -> str:
        return f"{self.operation:016x}/{self.occurrence}"


class Message(NamedTuple):
    """What ``peer`` sent, and when it arrived (``time.monotonic()``)."""

    peer: int
    frame: Frame
    payload: Payload
    seconds: float

    @property
    def operation(self) -> OperationKey:
        return OperationKey(self.frame.operation, self.frame.occurrence)


class RunningOperation(Protocol):
    """What a link needs to know of an operation."""

    key: OperationKey
    what: str
    phase: str
    timeout_seconds: float

    @property
    def neighbours(self) -> Sequence[int]: ...

    def deliver(self, message: Message) -> None: ...

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None: ...

    def end(self, end_message: bytes) -> None: ...

    def beat(self) -> None: ...

    def whereabouts(self) -> str: ...

    def missing(self) -> dict[int, str]: ...


class MeetingPlace(Protocol):
    """How ranks reach each other. It is :class:`robust_dcp.comm.meeting.Meeting`; tests use their own."""

    closed: bool

    def connect(
        self,
        peer: int,
        generation: int,
        purpose: str = ...,
        *,
        met: Callable[[Address], None] = ...,
        waiting: Callable[[], None] = ...,
    ) -> Pipe: ...

    def await_announced(self, n_connections: int) -> None: ...

    def settle(self, operations: Sequence[str], end_message: bytes) -> bytes: ...

    def end_message_of(self, operation: str) -> bytes | None: ...


class Link:
    """The connections of one rank to other ranks of its group. Each is made when it is first needed.

    Args:
        rank: this process's rank in the group.
        ranks: the global rank of each rank of the group.
        meeting: how this rank finds the others; ``None`` in a group of one.
        store_host: the rank whose process hosts the store of the meeting; ``None`` if no rank of the group does.
    """

    def __init__(
        self, *, rank: int, ranks: tuple[int, ...], meeting: MeetingPlace | None, store_host: int | None = None
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.store_host = store_host
        self.stats = ExchangeStats()
        self.surveyor = Surveyor(self)
        self.relay_pipes = RelayPipes(self._connect_for_relay)
        self._meeting = meeting
        self._lock = threading.RLock()
        self._connections: dict[int, Connection] = {}
        self._trees: dict[int, Tree] = {}
        self._generations: dict[int, int] = defaultdict(int)
        self._operations: weakref.WeakValueDictionary[OperationKey, RunningOperation] = weakref.WeakValueDictionary()
        self._occurrences: dict[int, int] = defaultdict(int)
        self._early: dict[OperationKey, list[Message]] = defaultdict(list)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def tree(self, root: int) -> Tree:
        """The tree under ``root``, from this rank's place."""
        if root not in self._trees:
            self._trees[root] = Tree(self.rank, self.size, root)
        return self._trees[root]

    def begin(self, name: str, operation: RunningOperation) -> None:
        """Set the ``key`` of ``operation``, and hand it the messages that arrived for it earlier.

        Args:
            name: the name of the operation, the same on all ranks.
            operation: the link holds only a weak reference to it.
        """
        with self._lock:
            number = operation_id(name)
            operation.key = OperationKey(number, self._occurrences[number])
            self._occurrences[number] += 1
            self._operations[operation.key] = operation
            early = self._early.pop(operation.key, [])
        for message in early:
            self._dispatch(message)
        if self.size > 1:
            _CLOCK.add(self)

    def connect(self, peers: Sequence[int]) -> None:
        """Begin to connect to ``peers``, and tell the store where this process listens.

        After that, ``peers`` notice if this process ends, because nobody listens there any more.

        Raises:
            RobustCheckpointError: the process may not open that many files.
        """
        with self._lock:
            new = [peer for peer in peers if peer not in self._connections or self._connections[peer].is_over]
            ensure_open_files(len(new))
            for peer in new:
                self.connection(peer)
            n_connections = sum(self._generations.values())
        if new and self._meeting is not None:
            self._meeting.await_announced(n_connections)

    def connection(self, peer: int) -> Connection:
        """The connection to ``peer``. It is made now if there is none."""
        with self._lock:
            found = self._connections.get(peer)
            if found is None or found.is_over:
                self._connections[peer] = found = Connection(peer, self._connects(peer), self, previous=found)
            return found

    def _connects(self, peer: int) -> Callable[[Callable[[Address], None]], Pipe]:
        generation = self._generations[peer]
        self._generations[peer] += 1
        meeting = self._meeting
        if meeting is None:
            raise ValueError("a group of one has nobody to connect to")
        return lambda met: meeting.connect(peer, generation, met=met, waiting=self._look_for_ends)

    def _look_for_ends(self) -> None:
        """End the operations that another rank has ended. This is called while a rank does not come: some rank may know
        that it never will, and need not be a neighbour of this one."""
        for operation in self.operations():
            with contextlib.suppress(StoreLost):
                end_message = self.end_message_of(operation.key)
                if end_message is not None:
                    self.end_operations(end_message)

    def _connect_for_relay(self, peer: int, generation: int, waiting: Callable[[], None]) -> GlooPipe:
        if self._meeting is None:
            raise ValueError("a group of one has nobody to connect to")
        return cast(GlooPipe, self._meeting.connect(peer, generation, "relay", waiting=waiting))

    def end_message_of(self, operation: OperationKey) -> bytes | None:
        """The end message on which the ranks agreed for ``operation``: how it ended. ``None`` if there is none yet.

        Raises:
            StoreLost: the store in which ranks agree on it does not answer.
        """
        if self._meeting is None:
            return None
        return self._meeting.end_message_of(str(operation))

    def settle(self, operations: Sequence[OperationKey], end_message: bytes) -> bytes:
        """Record ``end_message`` as the end of ``operations``, unless the first of them has one. Return the one that
        counts.

        Raises:
            StoreLost: the store in which ranks agree on it does not answer.
        """
        if self._meeting is None:
            return end_message
        return self._meeting.settle([str(operation) for operation in operations], end_message)

    def has_met(self, peer: int) -> bool:
        """Whether this rank was ever connected to ``peer``."""
        return peer in self._connections and self._connections[peer].process != ""

    def peers(self) -> list[int]:
        """The ranks that this rank is connected to."""
        with self._lock:
            return [peer for peer, connection in self._connections.items() if connection.is_open]

    def send(self, peer: int, frame: Frame, payload: Payload = b"") -> None:
        """Send a message to ``peer``. This never waits."""
        self.connection(peer).send(frame, payload)

    def deliver(self, peer: int, frame: Frame, payload: Payload) -> None:
        if frame.kind in (Kind.ASK, Kind.ANSWER):
            self.surveyor.deliver(peer, frame, payload)
            return
        self._dispatch(Message(peer, frame, payload, time.monotonic()))

    def _dispatch(self, message: Message) -> None:
        with self._lock:
            operation = self._operations.get(message.operation)
            if operation is None and self._is_coming(message.operation):
                self._keep_early(message)
        if message.frame.kind == Kind.FAIL:
            self.connection(message.peer).is_excused = True
            self.end_operations(bytes(message.payload))
        elif operation is not None:
            operation.deliver(message)

    def _is_coming(self, key: OperationKey) -> bool:
        """Whether this rank has not begun the operation ``key`` yet."""
        return key.occurrence >= self._occurrences.get(key.operation, 0)

    def _keep_early(self, message: Message) -> None:
        waiting = self._early[message.operation]
        if message.frame.kind == Kind.BEAT and any(each.peer == message.peer for each in waiting):
            return
        waiting.append(message)

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None:
        for operation in self.operations():
            operation.lost(peer, detail, damaged=damaged)

    def operations(self) -> list[RunningOperation]:
        """The operations that this rank is in."""
        with self._lock:
            return list(self._operations.values())

    def end_operations(self, end_message: bytes) -> None:
        """End the operations that ``end_message`` (an :class:`EndMessage`) names, here and on all ranks that can be
        reached.

        An end message with several operations means that their ranks waited for each other. A rank that is not in one
        of these operations skips it, so that operations have the same numbers on all ranks afterwards.
        """
        keys = [OperationKey(*key) for key in wire.decode(end_message, EndMessage).operations]
        with self._lock:
            ending = [self._operations.pop(key) for key in keys if key in self._operations]
            skipped = [key for key in keys if len(keys) > 1 and self._is_coming(key)]
            for key in skipped:
                self._early.pop(key, None)
                self._occurrences[key.operation] = key.occurrence + 1
        if not ending and not skipped:
            return
        for operation in ending:
            operation.end(end_message)
        # Tell all connected ranks, not only neighbours in this tree: a rank that is still in the exchange before may
        # use another tree. Also tell the rank that sent the end message, so that it knows that it was heard.
        for peer in {*self.peers(), *(peer for operation in ending for peer in operation.neighbours)}:
            self.send(peer, Frame(Kind.FAIL, *keys[0]), end_message)

    def await_heard(self) -> None:
        """Wait briefly until other ranks have heard how an operation ended, because this process may exit next."""
        with self._lock:
            connections = list(self._connections.values())
        until = time.monotonic() + patience.HEARD_SECONDS
        while any(connection.is_telling_an_end for connection in connections) and time.monotonic() < until:
            time.sleep(0.001)

    def is_elsewhere(self, peer: int, patience_seconds: float) -> bool:
        """Whether ``peer`` has been for a while in an operation that this rank has not begun."""
        before = time.monotonic() - min(patience.ELSEWHERE_SECONDS, patience_seconds)
        with self._lock:
            return any(
                each.peer == peer and each.seconds < before
                for messages in self._early.values()
                if not any(each.frame.kind == Kind.FAIL for each in messages)
                for each in messages
            )

    def tick(self) -> None:
        """Let each operation send its beats, and probe the ranks that this one is still connecting to."""
        now = time.monotonic()
        with self._lock:
            connections = list(self._connections.values())
        silent = [connection for connection in connections if connection.claim_probe(now)]
        if silent:
            threading.Thread(target=_probe, args=(silent,), name="robust_dcp: probe", daemon=True).start()
        for operation in self.operations():
            operation.beat()

    def close(self) -> None:
        """Close all connections, after waiting a limited time for sent messages to arrive."""
        if self._meeting is not None:
            self._meeting.closed = True
        with self._lock:
            connections = [each for each in self._connections.values() if each.is_open]
        for connection in connections:
            connection.say_goodbye()
        until = time.monotonic() + patience.GOODBYE_SECONDS
        while time.monotonic() < until and any(connection.is_open for connection in connections):
            time.sleep(0.001)
        with self._lock:
            remaining, self._connections = self._connections, {}
        for connection in remaining.values():
            connection.close()
        self.relay_pipes.interrupt()


def _probe(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.probe()


class _Clock:
    """One thread that calls ``tick`` on all links of this process."""

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
            time.sleep(patience.TICK_SECONDS)
            with self._lock:
                links = list(self._links)
            for link in links:
                link.tick()
            del links


_CLOCK = _Clock()
