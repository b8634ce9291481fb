"""What exchanges cost. Exchanges count it; reports and tests read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ExchangeStats:
    """What exchanges have cost this rank.

    Attributes:
        exchanges: how many it joined.
        messages_sent: how many messages this rank sent, of any size.
        header_nbytes_sent: bytes sent in frames, up and down.
        payload_nbytes_sent: bytes of payloads sent to neighbours in the tree, including what it only passed on, and of
            what was relayed.
    """

    exchanges: int = 0
    messages_sent: int = 0
    header_nbytes_sent: int = 0
    payload_nbytes_sent: int = 0

    def add(self, other: ExchangeStats) -> None:
        """Add what ``other`` has counted."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
