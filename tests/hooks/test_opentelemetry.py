"""Spans and metrics of saves and loads, as the SDK of OpenTelemetry hands them on."""

from __future__ import annotations

import os
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from robust_dcp import Event, on_event
from robust_dcp.hooks.opentelemetry import OpenTelemetryHook
from tests.hooks.saves import save_twice_and_fail


def test_opentelemetry_has_a_span_for_each_call_and_below_it_for_each_phase(tmp_path: Path) -> None:
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    with on_event(OpenTelemetryHook(tracing, MeterProvider([reader]))):
        save_twice_and_fail(tmp_path)
    found = spans.get_finished_spans()
    calls = [span for span in found if span.parent is None]
    assert [span.name for span in calls] == ["robust_dcp.save"] * 2 + ["robust_dcp.load", "robust_dcp.save"]
    below = [span.name for span in found if span.parent is not None and span.parent.span_id == calls[0].context.span_id]
    assert below == ["robust_dcp.plan", "robust_dcp.write", "robust_dcp.commit"]
    assert all(span.start_time <= span.end_time for span in found)
    assert [span.status.status_code for span in calls][-1] == StatusCode.ERROR
    assert os.path.basename(calls[-1].attributes["robust_dcp.checkpoint_id"]) == "step_30"
    data = reader.get_metrics_data()
    names = {metric.name for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics}
    assert names == {"robust_dcp.duration", "robust_dcp.size", "robust_dcp.failures"}


def test_opentelemetry_ends_the_phases_of_a_load_that_was_begun_again() -> None:
    spans = InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    hook = OpenTelemetryHook(tracing)
    hook(Event("started", "load x", 0, 1))
    for name in ("phase_started", "phase_started", "phase_ended"):  # the first try fails, and has no end
        hook(Event(name, "load x", 0, 1, phase="read"))  # type: ignore[arg-type]
    hook(Event("ended", "load x", 0, 1, seconds=1.0))
    found = [(span.name, span.status.status_code) for span in spans.get_finished_spans()]
    assert found == [
        ("robust_dcp.read", StatusCode.ERROR),
        ("robust_dcp.read", StatusCode.UNSET),
        ("robust_dcp.load", StatusCode.UNSET),
    ]
