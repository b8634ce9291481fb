"""What exchanges cost: counted by the exchange, read by reports and tests."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ExchangeStats", "PhaseStats"]

MAX_PHASES = 1000


@dataclass
class PhaseStats:
    """What this rank spent on exchanges.

    Attributes:
        exchanges: how many it joined.
        repeats: messages that were asked for once more.
        messages_sent: by this rank, of any size.
        messages_received: by this rank.
        header_nbytes_sent: in frames, up and down.
        payload_nbytes_sent: what it sent to its neighbours in the tree, also of what came from others.
        payload_nbytes_received: what came from its neighbours.
        payloads_received: how many payloads these were, whatever number of messages each took.
        seconds: from joining, when its own work was done, to the end: most of it is waiting for others.
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
    """The sums over all exchanges, and in ``phases`` those of each phase by its name, in order of appearance."""

    phases: dict[str, PhaseStats] = field(default_factory=dict)

    def count(self, phase: str, cost: PhaseStats) -> None:
        """Add ``cost`` to ``phase`` and to the sums. Of very many phases the oldest are forgotten."""
        self.add(cost)
        if len(self.phases) >= MAX_PHASES and phase not in self.phases:
            self.phases.pop(next(iter(self.phases)))
        self.phases.setdefault(phase, PhaseStats()).add(cost)
