"""A point in time by which something has to be over. Monotonic, so that a changed clock changes nothing."""

from __future__ import annotations

import datetime
import time

__all__ = ["Deadline"]


class Deadline:
    """``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until then; not below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.seconds_left == 0.0

    def as_timeout(self) -> datetime.timedelta:
        """What torch takes as a timeout. It has milliseconds, and none of them means "for ever": at least one."""
        return datetime.timedelta(milliseconds=max(1, round(self.seconds_left * 1000)))
