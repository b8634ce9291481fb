"""The log lines of the root about ranks that all others wait for, and when the next one is due."""

from __future__ import annotations

import logging
from collections.abc import Callable

from robust_dcp.comm import patience
from robust_dcp.comm.beats import Beat

__all__ = ["Stragglers"]

logger = logging.getLogger(__name__)


class Stragglers:
    """What the root of one operation logs of ranks that the others wait for.

    Attributes:
        lines: all lines so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._next_seconds = patience.LOG_SECONDS

    def begin_exchange(self) -> None:
        """Nobody has waited yet."""
        self._next_seconds = patience.LOG_SECONDS

    def note_wait(self, what: str, seconds: float, slowest: Callable[[], Beat]) -> None:
        """Log that all have waited for ``seconds``, if a line is due. Each takes twice as long as the one before.

        Args:
            what: the exchange.
            slowest: says which rank they wait for.
        """
        if seconds >= self._next_seconds:
            self._next_seconds *= 2
            self.lines.append(f"{what}: after {seconds:.0f} seconds, {slowest()}")
            logger.warning("%s", self.lines[-1])
