"""Waiting for something to become true, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return once ``condition`` holds.

    Raises:
        AssertionError: it does not within ``seconds``.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"it did not become true within {seconds:g} seconds")
        time.sleep(0.005)
