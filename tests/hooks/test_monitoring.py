"""Saves and loads as monitoring systems see them. `make test-hooks` installs these systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp import Event, on_event

pytestmark = pytest.mark.compat


def save_twice_and_fail(root: Path) -> None:
    for step in (10, 20):
        robust_dcp.save({"w": torch.full((9,), float(step))}, checkpoint_id=root / f"step_{step}")
    robust_dcp.load({"w": torch.zeros(9)}, checkpoint_id=root / "step_20")
    (root / "step_30").write_text("no directory")
    with pytest.raises(robust_dcp.StorageError):
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=root / "step_30")


def test_tensorboard_shows_each_save_at_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from robust_dcp.hooks.tensorboard import TensorBoardHook

    with SummaryWriter(str(tmp_path / "events")) as writer, on_event(TensorBoardHook(writer)):
        save_twice_and_fail(tmp_path)
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [each.step for each in found.Scalars("robust_dcp/save/seconds")] == [10, 20, 30]
    assert [each.value for each in found.Scalars("robust_dcp/save/failures")] == [0, 0, 1]
    assert [each.value for each in found.Scalars("robust_dcp/load/nbytes")] == [36]


def test_wandb_gets_each_save_with_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    from robust_dcp.hooks.wandb import WandbHook

    logged: list[dict[str, float]] = []
    with wandb.init(dir=tmp_path, project="robust_dcp") as run:
        log = run.log
        monkeypatch.setattr(run, "log", lambda values: (logged.append(values), log(values)))
        with on_event(WandbHook(run)):
            save_twice_and_fail(tmp_path)
        assert run.summary["robust_dcp/save/failures"] == 1
    assert [values["robust_dcp/step"] for values in logged] == [10, 20, 20, 30]
    assert any(path.suffix == ".wandb" and path.stat().st_size > 0 for path in tmp_path.rglob("*"))


def test_mlflow_keeps_each_save_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    from robust_dcp.hooks.mlflow import MlflowHook

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as run, on_event(MlflowHook(run.info.run_id)):
        save_twice_and_fail(tmp_path)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "robust_dcp/save/failures")
    assert sorted((metric.step, metric.value) for metric in history) == [(10, 0), (20, 0), (30, 1)]


def test_opentelemetry_has_a_span_for_each_call_and_below_it_for_each_phase(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from robust_dcp.hooks.opentelemetry import OpenTelemetryHook

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
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from robust_dcp.hooks.opentelemetry import OpenTelemetryHook

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
