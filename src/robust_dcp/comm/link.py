"""The connection of this process to one group for one purpose: its transport, and where in the sequence it stands.

It owns generation, sequence, tags and the transport, which it makes when first needed and again after a failure. It
never looks into a message. Channels of one group and purpose share one link; the exchange drives it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.nodes import NodeMap
from robust_dcp.comm.roll_call import RollCall, State
from robust_dcp.comm.stats import ExchangeStats, PhaseStats
from robust_dcp.comm.transport import Transport
from robust_dcp.errors import RobustCheckpointError

__all__ = ["Connection", "Link", "OpenTransport"]


class Connection(NamedTuple):
    """What a generation works with. ``nodes``: who shares a node, the same map on all ranks."""

    transport: Transport
    nodes: NodeMap


OpenTransport = Callable[[int, Deadline], Connection]
"""Makes the connection of a generation among all ranks; raises ``TransportFailure``."""

MAX_RECORDED_PHASES = 1000


class Link:
    """State that all ranks of the group change in the same way.

    Attributes:
        rank: of this process in the group.
        ranks: the global rank of each rank of the group.
        roll_call: who is where.
        open_transport: see :data:`OpenTransport`.
        generation: how many transports have failed. One that failed is never used again by anybody, so whatever was
            still under way in it is gone, and all ranks start afresh.
        sequence: of the exchange that is under way, or else of the next; starts at 0 in each generation.
    """

    def __init__(
        self, *, rank: int, ranks: tuple[int, ...], roll_call: RollCall, open_transport: OpenTransport
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.roll_call = roll_call
        self.open_transport = open_transport
        self.generation = 0
        self.sequence = 0
        self.stats = ExchangeStats()
        self._recordings: list[ExchangeStats] = []
        self._tag = 0
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._holder: int | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @contextmanager
    def held(self, operation: str) -> Iterator[None]:
        """One exchange at a time. Threads that share a link wait for each other, but their order is their own affair.

        Raises:
            RobustCheckpointError: this thread is in an exchange already.
        """
        if self._holder == threading.get_ident():
            raise RobustCheckpointError(
                f"{operation} was called within the work of another exchange of the same channel: "
                "finish that one first, or use a channel of another purpose"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def transport(self, deadline: Deadline) -> Transport:
        """The transport of this generation, made now if there is none yet.

        Raises:
            TransportFailure: not all ranks came to make it.
        """
        return self._connected(deadline).transport

    def nodes(self, deadline: Deadline) -> NodeMap:
        """Who shares a node with whom in this generation, the same map on all ranks.

        Raises:
            TransportFailure: not all ranks came to say so.
        """
        return self._connected(deadline).nodes

    def _connected(self, deadline: Deadline) -> Connection:
        if self._connection is None:
            self._connection = self.open_transport(self.generation, deadline)
        return self._connection

    def messages(self) -> tuple[int, int]:
        """How many messages this rank has sent and received in this generation."""
        if self._connection is None:
            return 0, 0
        transport = self._connection.transport
        return transport.messages_sent, transport.messages_received

    def next_tag(self) -> int:
        """A tag that no other call of this generation has; the same on all ranks, as they make the same calls."""
        self._tag += 1
        return self._tag & 0x7FFFFFFF

    def note(self, state: State, operation: str) -> None:
        self.roll_call.note(state, self.generation, self.sequence, operation)

    def finish_exchange(self, operation: str) -> None:
        """The exchange is over on this rank, and in step with the others, whether it succeeded or not."""
        self.note(State.FINISHED, operation)
        self.sequence += 1

    def close_transport(self) -> None:
        """Break all connections of this generation, so that nobody goes on waiting for this rank."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()

    def next_generation(self) -> None:
        """Leave a generation that has failed. Each rank does so once for each: when it has learnt how it ended."""
        self.close_transport()
        self.generation += 1
        self.sequence = 0
        self._tag = 0

    def record(self, phase: str, cost: PhaseStats) -> None:
        if len(self.stats.phases) >= MAX_RECORDED_PHASES and phase not in self.stats.phases:
            self.stats.phases.pop(next(iter(self.stats.phases)))
        for stats in (self.stats, *self._recordings):
            stats.count(phase, cost)

    @contextmanager
    def recording(self) -> Iterator[ExchangeStats]:
        """Count the exchanges that end within the block."""
        stats = ExchangeStats()
        self._recordings.append(stats)
        try:
            yield stats
        finally:
            self._recordings = [other for other in self._recordings if other is not stats]
