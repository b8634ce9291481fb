"""What exchanges cost. Exchanges count it; reports and tests read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Costs", "ExchangeStats", "PhaseStats"]

MAX_PHASES = 1000


@dataclass
class PhaseStats:
    """What exchanges have cost this rank.

    Attributes:
        exchanges: how many it joined.
        repeats: how many messages were asked for a second time.
        messages_sent: how many messages this rank sent, of any size.
        messages_received: how many messages this rank received.
        header_nbytes_sent: bytes sent in frames, up and down.
        payload_nbytes_sent: bytes of payloads sent to neighbours in the tree, including what it only passed on.
        payload_nbytes_received: bytes of payloads received from neighbours.
        payloads_received: how many payloads it received. A payload may take several messages.
        seconds: time from joining an exchange, after its own work, to the end. Most of it is waiting for others.
    """

    exchanges: int = 0
    repeats: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    header_nbytes_sent: int = 0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    payloads_received: int = 0
    seconds: float = 0.0

    def sent(self, header_nbytes: int, payload: bytes | bytearray | memoryview) -> None:
        """Count a message that this rank has sent."""
        self.messages_sent += 2 if payload else 1
        self.header_nbytes_sent += header_nbytes
        self.payload_nbytes_sent += len(payload)

    def received(self, payload: bytes | bytearray | memoryview) -> None:
        """Count a message that this rank has received."""
        self.messages_received += 2 if payload else 1
        self.payload_nbytes_received += len(payload)
        self.payloads_received += 1 if payload else 0

    def add(self, other: PhaseStats) -> None:
        self.exchanges += other.exchanges
        self.repeats += other.repeats
        self.messages_sent += other.messages_sent
        self.messages_received += other.messages_received
        self.header_nbytes_sent += other.header_nbytes_sent
        self.payload_nbytes_sent += other.payload_nbytes_sent
        self.payload_nbytes_received += other.payload_nbytes_received
        self.payloads_received += other.payloads_received
        self.seconds += other.seconds


@dataclass
class ExchangeStats(PhaseStats):
    """The sums over all exchanges. ``phases`` has the sums of each phase by name, in order of appearance."""

    phases: dict[str, PhaseStats] = field(default_factory=dict)

    def count(self, phase: str, cost: PhaseStats) -> None:
        """Add ``cost`` to ``phase`` and to the sums. If there are too many phases, the oldest one is forgotten."""
        self.add(cost)
        if len(self.phases) >= MAX_PHASES and phase not in self.phases:
            self.phases.pop(next(iter(self.phases)))
        self.phases.setdefault(phase, PhaseStats()).add(cost)


class Costs:
    """Counts what the exchanges of one operation cost, for its group and for whoever records them.

    Args:
        of_group: the sums over all operations of the group.
    """

    def __init__(self, of_group: ExchangeStats) -> None:
        self._of_group = of_group
        self._recordings: list[ExchangeStats] = []

    def count(self, phase: str, cost: PhaseStats) -> None:
        """Add what ``phase`` has cost this rank."""
        for stats in (self._of_group, *self._recordings):
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
