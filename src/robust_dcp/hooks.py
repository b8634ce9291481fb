"""Listeners that come with the package: one logs saves and loads, one draws a progress bar in a terminal.

Both are there by themselves, because ``save`` and ``load`` call :func:`watch`. The bar shows the bytes of rank 0. It
shows nothing if standard error is no terminal, if the save is async, or with ``ROBUST_DCP_PROGRESS=0``. The log has a
line at the beginning and one at the end where its logger is enabled for INFO, and one every 30 seconds where there is
no bar: it names the slowest rank, which the beats of the ranks tell rank 0 anyway.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Final

from robust_dcp.environment import value_of
from robust_dcp.events import LISTENERS, Event, on_event
from robust_dcp.report import sizes_in_words

logger = logging.getLogger("robust_dcp.operations")

_AFTER_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 0.1
_WIDTH: Final = 30
_LOGGED_EVERY_SECONDS: Final = 30.0


@dataclass
class _Pace:
    """The phase that an operation is in, and when its progress was logged last."""

    phase: str
    is_async: bool
    logged: float


_PACES: Final[dict[str, _Pace]] = {}


def log_event(event: Event) -> None:
    """Log saves and loads on rank 0 to ``robust_dcp.operations``: the beginning, each 30 seconds how far the slowest
    rank is, and the end: INFO if it went well, ERROR if it failed.

    ``save`` and ``load`` do so by themselves where that logger is enabled for INFO when they are called. At the end the
    record's attribute ``robust_dcp`` is a dict: the operation, the rank and the numbers. A formatter for JSON, such
    as that of ``python-json-logger``, prints it as it is.

    Example::

        robust_dcp.on_event(robust_dcp.hooks.log_event)
    """
    now = time.monotonic()
    if event.rank != 0:
        return
    if event.name == "started":
        logger.info("%s begins on %d rank%s", event.operation, event.world_size, "" if event.world_size == 1 else "s")
    elif event.name == "phase_started":
        _PACES[event.operation] = _Pace(event.phase or "", event.is_async, now)
    elif event.name == "progress":
        _log_progress(event, now)
    if event.name not in ("ended", "failed"):
        return
    _PACES.pop(event.operation, None)
    names = ("kind", "checkpoint_id", "rank", "world_size", "is_async", "seconds")
    fields = {"event": event.name, **{name: getattr(event, name) for name in names}}
    fields |= {name.rpartition("/")[2]: value for name, value in event.metrics.items()}
    if event.error is None:
        nbytes = 0 if event.report is None else event.report.nbytes
        words = (event.operation, event.seconds or 0.0, sizes_in_words(nbytes))
        logger.info("%s took %.3f s; this rank moved %s", *words, extra={"robust_dcp": fields})
    else:
        fields["error"] = f"{type(event.error).__name__}: {event.error}"
        logger.error("%s failed: %s", event.operation, event.error, extra={"robust_dcp": fields})


def _log_progress(event: Event, now: float) -> None:
    pace, slowest = _PACES.get(event.operation), event.slowest
    if pace is None or now - pace.logged < _LOGGED_EVERY_SECONDS or slowest is None or not slowest.done_nbytes:
        return
    if value_of("ROBUST_DCP_PROGRESS") is False or (_has_bar() and not pace.is_async):
        return
    pace.logged = now
    rate = slowest.done_nbytes / max(slowest.seconds, 1e-3)
    logger.info(
        "%s: %s; the slowest of the ranks that are not done is rank %d: %d %% of %s, %s/s, about %.0f s left",
        event.operation,
        pace.phase,
        slowest.rank,
        100 * slowest.done_nbytes // slowest.total_nbytes,
        sizes_in_words(slowest.total_nbytes),
        sizes_in_words(rate),
        (slowest.total_nbytes - slowest.done_nbytes) / rate,
    )


def watch() -> None:
    """Show bars from now on if this process may draw in its terminal, which is decided once. Log from now on if
    somebody reads that."""
    _has_bar()
    if log_event not in LISTENERS and logger.isEnabledFor(logging.INFO):
        on_event(log_event)


@cache
def _has_bar() -> bool:
    has_bar = sys.stderr is not None and sys.stderr.isatty() and value_of("ROBUST_DCP_PROGRESS") is not False
    if has_bar:
        on_event(ProgressBar())
    return has_bar


class ProgressBar:
    """Draws a bar for each phase from two seconds after the beginning of a call until its end."""

    def __init__(self, after_seconds: float = _AFTER_SECONDS) -> None:
        self._after_seconds = after_seconds
        self._lines: dict[str, ProgressLine] = {}

    def __call__(self, event: Event) -> None:
        if event.name == "started" and event.rank == 0 and not event.is_async:
            self._lines[event.operation] = ProgressLine("", self._after_seconds)
        line = self._lines.get(event.operation)
        if line is None:
            return
        if event.name == "phase_started":
            line.begin(event.phase or "")
        elif event.name == "progress":
            line.show(event.done_nbytes or 0, event.total_nbytes or 0)
        elif event.name in ("ended", "failed"):
            line.clear()
            del self._lines[event.operation]


class ProgressLine:
    """One line of the terminal on standard error, drawn over and over, and removed at the end.

    Args:
        what: its first word.
        after_seconds: it is not drawn before.
    """

    def __init__(self, what: str, after_seconds: float = 0.0) -> None:
        self._drawn_from = time.monotonic() + after_seconds
        self._drawn = 0.0
        self.begin(what)

    def begin(self, what: str) -> None:
        """Count from nothing again, with another first word."""
        self.clear()
        self._what, self._started = what, 0.0

    def show(self, done_nbytes: int, total_nbytes: int) -> None:
        """Draw it again, unless that has just been done."""
        now = time.monotonic()
        self._started = self._started or now
        is_due = now - self._drawn >= _EVERY_SECONDS or done_nbytes >= total_nbytes
        if not total_nbytes or now < self._drawn_from or not is_due:
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
            self._drawn = 0.0

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
