"""A point in time by which something has to be done. It is monotonic: setting the system clock does not move it."""

from __future__ import annotations

import datetime
import time

__all__ = ["Deadline"]


class Deadline:
    """The time ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.seconds_left == 0.0

    def as_timeout(self) -> datetime.timedelta:
        """The time left as torch takes it. torch counts milliseconds and reads 0 as "for ever", so this is at least
        1."""
        return datetime.timedelta(milliseconds=max(1, round(self.seconds_left * 1000)))
