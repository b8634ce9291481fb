"""Listeners that come with the package: one logs saves and loads, one draws a progress bar in a terminal.

The bar is there by itself, because ``save`` and ``load`` call :func:`watch_in_terminal`. It shows the bytes of rank 0.
It shows nothing if standard error is no terminal, if the save is async, or with ``ROBUST_DCP_PROGRESS=0``.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from functools import cache
from typing import Any, Final

from robust_dcp.environment import value_of
from robust_dcp.events import Event, on_event

__all__ = ["LoggingHook", "ProgressBar", "ProgressLine", "fields_of", "watch_in_terminal"]

_AFTER_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 0.1
_WIDTH: Final = 30


class LoggingHook:
    """One log record at the end of each save and load: INFO if it went well, ERROR if it failed.

    The record's attribute ``robust_dcp`` is a dict: the operation, the rank and the numbers. A formatter for JSON, such
    as that of ``python-json-logger``, prints it as it is.

    Args:
        logger: where to; ``None`` for the logger ``robust_dcp.operations``.
        all_ranks: whether ranks other than 0 log, too.
        phases: whether each phase is logged as well, at DEBUG.

    Example::

        robust_dcp.on_event(LoggingHook())
    """

    def __init__(self, logger: logging.Logger | None = None, *, all_ranks: bool = False, phases: bool = False) -> None:
        self._logger: Final = logger or logging.getLogger("robust_dcp.operations")
        self._all_ranks = all_ranks
        self._phases = phases

    def __call__(self, event: Event) -> None:
        if event.rank != 0 and not self._all_ranks:
            return
        extra = {"robust_dcp": fields_of(event)}
        if event.name == "ended":
            self._logger.info("%s took %.3f s", event.operation, event.seconds or 0.0, extra=extra)
        elif event.name == "failed":
            self._logger.error("%s failed: %s", event.operation, event.error, extra=extra)
        elif event.name == "phase_ended" and self._phases:
            self._logger.debug("%s: %s took %.3f s", event.operation, event.phase, event.seconds or 0.0, extra=extra)


def fields_of(event: Event) -> dict[str, Any]:
    """The event as plain values, those that are not ``None``."""
    names = [
        "kind",
        "checkpoint_id",
        "phase",
        "rank",
        "world_size",
        "is_async",
        "seconds",
        "done_nbytes",
        "total_nbytes",
    ]
    error = None if event.error is None else f"{type(event.error).__name__}: {event.error}"
    plain = {"event": event.name, **{name: getattr(event, name) for name in names}, "error": error}
    metrics = {name.rpartition("/")[2]: value for name, value in event.metrics.items()}
    return {name: value for name, value in plain.items() if value is not None} | metrics


@cache
def watch_in_terminal() -> None:
    """Show bars from now on, if this process may draw in its terminal. That is decided once."""
    if sys.stderr is not None and sys.stderr.isatty() and value_of("ROBUST_DCP_PROGRESS") is not False:
        on_event(ProgressBar())


class ProgressBar:
    """Draws a bar for each phase from two seconds after the beginning of a call until its end."""

    def __init__(self, after_seconds: float = _AFTER_SECONDS) -> None:
        self._after_seconds = after_seconds
        self._lock = threading.Lock()
        self._shown_from: dict[str, float] = {}
        self._lines: dict[str, ProgressLine] = {}

    def __call__(self, event: Event) -> None:
        if event.rank != 0 or event.is_async:
            return
        with self._lock:
            if event.name == "started":
                self._shown_from[event.operation] = time.monotonic() + self._after_seconds
            elif event.name == "progress":
                line, now = self._lines.get(event.operation), time.monotonic()
                if line is not None and event.total_nbytes and now >= self._shown_from.get(event.operation, now):
                    line.show(event.done_nbytes or 0, event.total_nbytes)
            elif event.name != "phase_ended":
                line = self._lines.pop(event.operation, None)
                if line is not None:
                    line.clear()
                if event.phase is not None:
                    self._lines[event.operation] = ProgressLine(event.phase)
                else:
                    self._shown_from.pop(event.operation, None)


class ProgressLine:
    """One line of the terminal on standard error, drawn over and over, and removed at the end.

    Args:
        what: its first word.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = 0.0
        self._drawn = 0.0

    def show(self, done_nbytes: int, total_nbytes: int) -> None:
        """Draw it again, unless that has just been done."""
        now = time.monotonic()
        self._started = self._started or now
        if not total_nbytes or (now - self._drawn < _EVERY_SECONDS and done_nbytes < total_nbytes):
            return
        self._drawn = now
        filled = min(_WIDTH, _WIDTH * done_nbytes // total_nbytes)
        rate = done_nbytes / max(now - self._started, 1e-9)
        left = f", {(total_nbytes - done_nbytes) / rate:.0f} s left" if 0 < done_nbytes < total_nbytes else ""
        self._write(
            f"{self._what} [{'#' * filled}{' ' * (_WIDTH - filled)}] {done_nbytes / (1 << 20):.1f}"
            f"/{total_nbytes / (1 << 20):.1f} MiB, {rate / (1 << 20):.1f} MiB/s{left}"
        )

    def clear(self) -> None:
        """Remove it."""
        if self._drawn:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
