"""Logs saves and loads through ``logging``, with their numbers as fields of the record."""

from __future__ import annotations

import logging
from typing import Any, Final

from robust_dcp.events import Event

__all__ = ["LoggingHook", "fields_of"]


class LoggingHook:
    """One record at the end of each save and load: INFO if it went well, ERROR if it failed.

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
    plain = {
        "event": event.name,
        "kind": event.kind,
        "checkpoint_id": event.checkpoint_id,
        "phase": event.phase,
        "rank": event.rank,
        "world_size": event.world_size,
        "is_async": event.is_async,
        "seconds": event.seconds,
        "done_nbytes": event.done_nbytes,
        "total_nbytes": event.total_nbytes,
        "error": None if event.error is None else f"{type(event.error).__name__}: {event.error}",
    }
    found = {name: value for name, value in plain.items() if value is not None}
    return found | {name.rpartition("/")[2]: value for name, value in event.metrics.items()}
