"""What exchanges cost. Exchanges count it; reports and tests read it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["ExchangeStats", "PhaseStats"]

MAX_PHASES = 1000


@dataclass
class PhaseStats:
    """What exchanges have cost this rank.

    Attributes:
        exchanges: how many it joined.
        repeats: how many messages were asked for a second time.
        messages_sent: how many messages this rank sent, of any size.
        header_nbytes_sent: bytes sent in frames, up and down.
        payload_nbytes_sent: bytes of payloads sent to neighbours in the tree, including what it only passed on.
        payload_nbytes_received: bytes of payloads received from neighbours.
        seconds: time from joining an exchange, after its own work, to the end. Most of it is waiting for others.
    """

    exchanges: int = 0
    repeats: int = 0
    messages_sent: int = 0
    header_nbytes_sent: int = 0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    seconds: float = 0.0

    def sent(self, header_nbytes: int, payload_nbytes: int) -> None:
        """Count a message that this rank has sent."""
        self.messages_sent += 2 if payload_nbytes else 1
        self.header_nbytes_sent += header_nbytes
        self.payload_nbytes_sent += payload_nbytes

    def add(self, other: PhaseStats) -> None:
        own, others = vars(self), vars(other)
        for name in _COUNTED:
            own[name] += others[name]


_COUNTED = tuple(each.name for each in fields(PhaseStats))


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
