"""The recipes of docs/operations.md, with the real monitoring systems. `make test-hooks` installs these."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import robust_dcp
from robust_dcp import on_event
from tests.docs.pages import DOCS, blocks_of


def save_twice_and_fail(root: Path) -> None:
    """Calls that a monitoring system is shown: two saves, a load, and a save that fails."""
    for step in (10, 20):
        robust_dcp.save({"w": torch.full((9,), float(step))}, checkpoint_id=root / f"step_{step}")
    robust_dcp.load({"w": torch.zeros(9)}, checkpoint_id=root / "step_20")
    (root / "step_30").write_text("no directory")
    with pytest.raises(robust_dcp.StorageError):
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=root / "step_30")


@contextmanager
def recipe(title: str) -> Iterator[dict[str, Any]]:
    """Run a block of the page. What it listens with is taken away afterwards."""
    (block,) = [
        each
        for each in blocks_of(DOCS / "operations.md", "python")
        if each.region.lexemes["title"].strip() == f'title="{title}"'
    ]
    with ExitStack() as listening:
        at_hand = SimpleNamespace(on_event=lambda listener: listening.enter_context(on_event(listener)))
        namespace: dict[str, Any] = {"robust_dcp": at_hand}
        exec(compile(block.parsed, "docs/operations.md", "exec"), namespace)
        yield namespace


@pytest.mark.compat
def test_tensorboard_shows_each_save_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with recipe("TensorBoard") as names:
        save_twice_and_fail(tmp_path)
        names["writer"].close()
    found = EventAccumulator("runs/7b").Reload()
    assert [each.step for each in found.Scalars("robust_dcp/save/seconds")] == [10, 20, 30]
    assert [each.value for each in found.Scalars("robust_dcp/save/failures")] == [0, 0, 1]
    assert [each.value for each in found.Scalars("robust_dcp/load/nbytes")] == [36]


@pytest.mark.compat
def test_wandb_gets_each_save_with_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[dict[str, float]] = []
    with recipe("Weights & Biases") as names, names["run"] as run:
        log = run.log
        monkeypatch.setattr(run, "log", lambda values: (logged.append(values), log(values)))
        save_twice_and_fail(tmp_path)
        assert run.summary["robust_dcp/save/failures"] == 1
    assert [values["robust_dcp/step"] for values in logged] == [10, 20, 20, 30]
    assert any(path.suffix == ".wandb" and path.stat().st_size > 0 for path in tmp_path.rglob("*"))


@pytest.mark.compat
def test_mlflow_keeps_each_save_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with recipe("MLflow") as names:
        save_twice_and_fail(tmp_path)
        mlflow.end_run()
    history = mlflow.MlflowClient().get_metric_history(names["run_id"], "robust_dcp/save/failures")
    assert sorted((metric.step, metric.value) for metric in history) == [(10, 0), (20, 0), (30, 1)]


def test_opentelemetry_has_a_span_for_each_call_and_below_it_for_each_phase(tmp_path: Path) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exported = InMemorySpanExporter()
    with recipe("OpenTelemetry") as names:
        provider = TracerProvider()  # the global one can be set only once in a process
        provider.add_span_processor(SimpleSpanProcessor(exported))
        names["tracer"] = provider.get_tracer("robust_dcp")
        save_twice_and_fail(tmp_path)
    found = exported.get_finished_spans()
    calls = [span for span in found if span.parent is None]
    assert [span.name for span in calls] == ["save", "save", "load", "save"]
    below = [span.name for span in found if span.parent is not None and span.parent.span_id == calls[0].context.span_id]
    assert below == ["plan", "write", "commit"]
    assert all(span.start_time <= span.end_time for span in found)
    assert [span.status.status_code for span in calls][-1] == trace.StatusCode.ERROR
    assert os.path.basename(calls[-1].attributes["checkpoint_id"]) == "step_30" and names["spans"] == {}
