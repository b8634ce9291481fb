"""What exchanges cost: counted by the exchange, read by reports and tests."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["ExchangeStats", "PhaseStats"]


@dataclass
class PhaseStats:
    """What this rank spent on the exchanges of one phase.

    Attributes:
        exchanges: how many it joined.
        repeats: rounds and payloads that were asked for once more.
        messages_sent: by this rank, of any size.
        messages_received: by this rank.
        header_nbytes: what it contributed to headers, confirmations and verdicts (64 bytes each).
        payload_nbytes_sent: what it announced and others took from it, once for each that did; a broadcast once.
        payload_nbytes_received: what it took from others.
        seconds: from joining, when its own work was done, to the end: most of it is waiting for others.
    """

    exchanges: int = 0
    repeats: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    header_nbytes: int = 0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    seconds: float = 0.0

    def add(self, other: PhaseStats) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class ExchangeStats:
    """:class:`PhaseStats` by the name of the phase, in the order in which they first came."""

    phases: dict[str, PhaseStats] = field(default_factory=dict)

    @property
    def total(self) -> PhaseStats:
        total = PhaseStats()
        for phase in self.phases.values():
            total.add(phase)
        return total

    def add(self, phase: str, cost: PhaseStats) -> None:
        self.phases.setdefault(phase, PhaseStats()).add(cost)
