"""A progress bar for saves and loads that take long, in a terminal.

It is there by itself, because ``save`` and ``load`` call :func:`watch_in_terminal`. It shows the bytes of rank 0. It
shows nothing if standard error is no terminal, if the save is async, or with ``ROBUST_DCP_PROGRESS=0``.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Final

from robust_dcp.environment import value_of
from robust_dcp.events import Event, on_event

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ProgressBar", "watch_in_terminal"]

_AFTER_SECONDS: Final = 2.0


@cache
def watch_in_terminal() -> None:
    """Show bars from now on, if this process may draw in its terminal. That is decided once."""
    if sys.stderr is not None and sys.stderr.isatty() and value_of("ROBUST_DCP_PROGRESS") is not False:
        on_event(ProgressBar())


class ProgressBar:
    """Draws a bar from two seconds after the beginning of a call until its end."""

    def __init__(self, after_seconds: float = _AFTER_SECONDS) -> None:
        self._after_seconds = after_seconds
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        self._phase: dict[str, str] = {}
        self._drawn: dict[str, Progress] = {}

    def __call__(self, event: Event) -> None:
        if event.rank != 0 or event.is_async:
            return
        with self._lock:
            if event.name == "started":
                self._started[event.operation] = time.monotonic()
            elif event.name == "phase_started" and event.phase is not None:
                self._phase[event.operation] = event.phase
                self._clear(event.operation)
            elif event.name == "progress":
                self._draw(event)
            elif event.name in ("ended", "failed"):
                self._clear(event.operation)
                self._started.pop(event.operation, None)
                self._phase.pop(event.operation, None)

    def _draw(self, event: Event) -> None:
        started = self._started.get(event.operation)
        if started is None or not event.total_nbytes or time.monotonic() - started < self._after_seconds:
            return
        progress = self._drawn.get(event.operation)
        if progress is None:
            progress = self._drawn[event.operation] = _progress()
            progress.start()
            progress.add_task(self._phase.get(event.operation, event.kind), total=event.total_nbytes)
        progress.update(progress.task_ids[0], completed=event.done_nbytes or 0, total=event.total_nbytes)

    def _clear(self, operation: str) -> None:
        progress = self._drawn.pop(operation, None)
        if progress is not None:
            progress.stop()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
