"""What has arrived for one operation and was not used yet: messages, and failures that ranks announced.

A neighbour may be an exchange ahead, so all of it is kept by the number of its exchange. It belongs to one operation,
which calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from robust_dcp.comm.failures import Problem
from robust_dcp.comm.frames import Kind
from robust_dcp.comm.link import Message

__all__ = ["Inbox"]


class Inbox:
    """What has arrived for one operation.

    Attributes:
        exchange: the number of the current or next exchange.
    """

    def __init__(self) -> None:
        self.exchange = 0
        self._messages: dict[tuple[int, Kind, int], Message] = {}
        self._failures: dict[int, str] = {}

    def put(self, message: Message) -> None:
        """Keep a message until its exchange takes it."""
        self._messages[message.frame.exchange, message.frame.kind, message.peer] = message

    def absent(self, peers: Sequence[int], kind: Kind) -> tuple[int, ...]:
        """Those of ``peers`` whose message of this exchange has not come."""
        return tuple(peer for peer in peers if (self.exchange, kind, peer) not in self._messages)

    def take(self, peers: Sequence[int], kind: Kind) -> list[Message]:
        """Take the messages of ``peers`` out. All of them must have come."""
        return [self._messages.pop((self.exchange, kind, peer)) for peer in peers]

    def refuse_other_phases(self, peers: Sequence[int], kind: Kind, phase: int) -> None:
        """Raise if the message of one of ``peers`` is of another exchange than this rank's, with the same number.

        Raises:
            Problem: the ranks are in different operations.
        """
        for peer in peers:
            message = self._messages.get((self.exchange, kind, peer))
            if message is not None and message.frame.phase != phase:
                raise Problem("in different operations", is_elsewhere=True)

    def note_failure(self, exchange: int, text: str) -> bool:
        """Keep ``text`` as the failure of ``exchange``. Return whether that is news for this rank."""
        if exchange in self._failures or exchange < self.exchange:
            return False
        self._failures[exchange] = text
        return True

    def failure(self) -> str | None:
        """The failure that was announced for this exchange; ``None`` if there is none."""
        return self._failures.get(self.exchange)

    def end_exchange(self) -> None:
        """Go on to the next exchange."""
        self.exchange += 1
        self._failures.pop(self.exchange - 1, None)
