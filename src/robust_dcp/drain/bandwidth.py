"""A limit for the bytes that all threads of a copy send in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Bandwidth"]


class Bandwidth:
    """Lets threads take turns so that together they stay below a rate.

    Args:
        bytes_per_second: the rate; ``None`` for no limit.
        check_stop: called while a thread waits. What it raises ends the wait.
    """

    def __init__(self, bytes_per_second: float | None, check_stop: Callable[[], None] = lambda: None) -> None:
        self._rate = bytes_per_second
        self._check_stop = check_stop
        self._lock = threading.Lock()
        self._free_at_seconds = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be sent."""
        if self._rate is None:
            return
        with self._lock:
            starts_at = max(time.monotonic(), self._free_at_seconds)
            self._free_at_seconds = starts_at + nbytes / self._rate
        while (left := starts_at - time.monotonic()) > 0:
            self._check_stop()
            threading.Event().wait(min(left, 0.5))
