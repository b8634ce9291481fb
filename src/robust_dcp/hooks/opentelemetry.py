"""Makes OpenTelemetry spans and metrics of saves and loads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from robust_dcp.events import Event

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["OpenTelemetryHook"]


class OpenTelemetryHook:
    """One span for each save and load of this rank, with one below it for each phase, and three metrics.

    The metrics are ``robust_dcp.duration`` (s), ``robust_dcp.size`` (By) and ``robust_dcp.failures``. Their attributes
    are ``robust_dcp.kind`` (``save`` or ``load``) and ``robust_dcp.rank``. Spans name the checkpoint as well.

    Args:
        tracer_provider, meter_provider: ``None`` for the global ones.

    Example::

        robust_dcp.on_event(OpenTelemetryHook())
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        from opentelemetry import metrics, trace

        self._tracer = trace.get_tracer("robust_dcp", tracer_provider=tracer_provider)
        meter = metrics.get_meter("robust_dcp", meter_provider=meter_provider)
        self._duration = meter.create_histogram("robust_dcp.duration", "s", "Duration of a save or load")
        self._size = meter.create_histogram("robust_dcp.size", "By", "Bytes that this rank wrote or read")
        self._failures = meter.create_counter("robust_dcp.failures", "1", "Saves and loads that failed")
        self._spans: dict[str, Span] = {}
        self._lock = threading.Lock()  # an async save has a thread of its own

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._take(event)

    def _take(self, event: Event) -> None:
        at = int(event.at_seconds * 1e9)
        phase = f"{event.operation}\0{event.phase}"
        if event.name == "started":
            self._spans[event.operation] = self._begin(event, f"robust_dcp.{event.kind}", at, None)
        elif event.name == "phase_started":
            self._end_failed_phases(event, at)  # a load that was begun again
            self._spans[phase] = self._begin(event, f"robust_dcp.{event.phase}", at, self._spans.get(event.operation))
        elif event.name == "phase_ended" and phase in self._spans:
            self._spans.pop(phase).end(at)
        elif event.name in ("ended", "failed"):
            self._end(event, at)

    def _begin(self, event: Event, name: str, at: int, parent: Span | None) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent) if parent is not None else Context()
        return self._tracer.start_span(
            name,
            context,
            attributes={**_attributes(event), "robust_dcp.checkpoint_id": event.checkpoint_id},
            start_time=at,
        )

    def _end(self, event: Event, at: int) -> None:
        from opentelemetry.trace import StatusCode

        self._end_failed_phases(event, at)
        attributes = _attributes(event)
        span_of_call = self._spans.pop(event.operation, None)
        if span_of_call is not None:
            if event.error is not None:
                span_of_call.record_exception(event.error, timestamp=at)
                span_of_call.set_status(StatusCode.ERROR, str(event.error))
            elif event.report is not None:
                span_of_call.set_attribute("robust_dcp.nbytes", event.report.nbytes)
            span_of_call.end(at)
        self._duration.record(event.seconds or 0.0, attributes)
        if event.report is not None:
            self._size.record(event.report.nbytes, attributes)
        if event.name == "failed":
            self._failures.add(1, attributes)

    def _end_failed_phases(self, event: Event, at: int) -> None:
        """End the spans of phases that have no end of their own, because they have failed."""
        from opentelemetry.trace import StatusCode

        for key in [key for key in self._spans if key.startswith(f"{event.operation}\0")]:
            span = self._spans.pop(key)
            span.set_status(StatusCode.ERROR)
            span.end(at)


def _attributes(event: Event) -> dict[str, Any]:
    return {"robust_dcp.kind": event.kind, "robust_dcp.rank": event.rank}
