"""What the log and the progress bar make of the events of a save, and what real monitoring systems do.

docs/operations.md has the recipes for these. `make test-hooks` installs them.
"""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import Channel, Event, events, hooks, on_event
from robust_dcp.comm import Offer
from robust_dcp.events import Slowest
from robust_dcp.hooks import ProgressBar, log_event
from robust_dcp.report import LoadReport, PhaseReport
from tests.docs.pages import DOCS, blocks_of
from tests.harness.ranks import run_ranks, values


def test_the_log_entry_of_a_call_has_its_numbers_as_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with on_event(log_event), caplog.at_level(logging.INFO, logger="robust_dcp.operations"):
        report = robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "step_7")
        (tmp_path / "file").write_text("no directory")
        with pytest.raises(robust_dcp.StorageError):
            robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "file")
    begun, saved, _, failed = (record for record in caplog.records if record.name == "robust_dcp.operations")
    assert begun.getMessage() == f"save {tmp_path}/step_7 begins on 1 rank"
    fields = vars(saved)["robust_dcp"]
    assert saved.levelno == logging.INFO and fields["checkpoint_id"] == str(tmp_path / "step_7")
    assert fields["nbytes"] == report.nbytes and fields["write_seconds"] == report.phases[1].seconds
    assert failed.levelno == logging.ERROR and "StorageError" in vars(failed)["robust_dcp"]["error"]


def test_saves_and_loads_say_at_info_that_they_begin_and_end_and_are_silent_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has to register anything for that."""
    for level, n_lines in ((logging.WARNING, 0), (logging.INFO, 6)):
        caplog.clear()
        with caplog.at_level(level, logger="robust_dcp"):
            robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "step_1")
            robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "step_2").result()
            robust_dcp.load({"w": torch.zeros(9)}, checkpoint_id=tmp_path / "step_2")
        lines = [record.getMessage() for record in caplog.records if record.name == "robust_dcp.operations"]
        assert len(lines) == n_lines
    assert re.fullmatch(rf"load {tmp_path}/step_2 took 0\.\d+ s; this rank moved \d+ B", lines[-1])
    events.LISTENERS.remove(log_event)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_long_call_logs_how_far_it_is_every_thirty_seconds(
    is_async: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(hooks.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.INFO, logger="robust_dcp.operations"):
        for told in ("1", "0"):
            monkeypatch.setenv("ROBUST_DCP_PROGRESS", told)
            log_event(Event("phase_started", "save x", 0, 2, phase="write", is_async=is_async))
            for gibibytes in range(1, 9):
                clock[0] += 10
                slowest = Slowest(5, gibibytes << 30, 8 << 30, 10.0 * gibibytes)
                log_event(Event("progress", "save x", 0, 2, done_nbytes=1, total_nbytes=2, slowest=slowest))
                log_event(Event("progress", "save x", 1, 2, done_nbytes=1, total_nbytes=2))
    said = "save x: write; the slowest of the ranks that are not done is rank 5: 37 % of 8.0 GiB, 102.4 MiB/s, "
    said += "about 50 s left"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == said and len(lines) == 2


def hear_of_the_slowest() -> bool:
    """Rank 1 stands still after a tenth of its work until rank 0 has heard of that, or for a minute."""
    channel, heard = Channel.for_group(None, operation="save x"), threading.Event()

    def listen(event: Event) -> None:
        if event.slowest is not None and event.slowest[:3] == (1, 10, 100):
            heard.set()

    def work() -> Offer:
        until = time.monotonic() + 60
        while channel.rank == 0 and not heard.is_set() and time.monotonic() < until:
            channel.check_stop(90, 100)
            time.sleep(0.05)
        if channel.rank == 0:
            store.set("heard", b"1")
        else:
            channel.check_stop(10, 100)
            store.wait(["heard"], timedelta(seconds=120))
        return Offer()

    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    with on_event(listen):
        channel.agree("write", work)
    return heard.is_set()


def test_rank_0_hears_while_it_works_how_far_the_slowest_rank_is() -> None:
    assert values(run_ranks(2, hear_of_the_slowest)) == [True, False]


@pytest.mark.parametrize(
    ("path", "step"), [("runs/7b/step_1000", 1000), ("iter_0000020/", 20), ("epoch=3-step=40.ckpt", 40), ("last", None)]
)
def test_the_step_is_the_last_number_in_the_name(path: str, step: int | None) -> None:
    assert Event("ended", f"save {path}", 0, 1).step == step


def test_only_the_end_of_a_call_has_metrics_and_a_phase_that_a_load_went_through_twice_counts_twice() -> None:
    assert Event("phase_ended", "save x", 0, 1, seconds=1.0).metrics == {}
    failed = Event("failed", "load x", 0, 1, seconds=1.0, error=ValueError()).metrics
    assert failed == {"robust_dcp/load/seconds": 1.0, "robust_dcp/load/failures": 1.0}
    phases = [PhaseReport(name, seconds, 0, 0, 0, 0) for name, seconds in (("plan", 1.0), ("plan", 0.5), ("read", 2.0))]
    report = LoadReport("x", rank=0, world_size=1, items=0, nbytes=0, phases=tuple(phases))
    found = Event("ended", "load x", 0, 1, seconds=4.0, report=report).metrics
    assert found["robust_dcp/load/plan_seconds"] == 1.5 and found["robust_dcp/load/read_seconds"] == 2.0


def test_the_bar_shows_the_phase_and_its_bytes_on_rank_0_and_not_those_of_an_async_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn(rank: int, is_async: bool) -> str:
        """What a bar that appears at once prints into a terminal."""
        monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
        bar = ProgressBar(after_seconds=0.0)
        bar(Event("started", "save x", rank, 2, is_async=is_async))
        bar(Event("phase_started", "save x", rank, 2, phase="write"))
        bar(Event("progress", "save x", rank, 2, done_nbytes=1 << 30, total_nbytes=2 << 30))
        bar(Event("ended", "save x", rank, 2))
        return screen.getvalue()

    assert "write" in drawn(0, is_async=False) and "1024.0/2048.0 MiB" in drawn(0, is_async=False)
    assert drawn(0, is_async=True) == drawn(1, is_async=False) == ""


PROGRAM = """
    import sys
    from robust_dcp import events
    from robust_dcp.hooks import watch
    watch()
    sys.exit(10 + len(events.LISTENERS))
"""


@pytest.mark.parametrize(("asked", "listeners"), [("1", 1), ("0", 0)])
def test_a_process_in_a_terminal_shows_bars_unless_told_not_to(asked: str, listeners: int) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["ROBUST_DCP_PROGRESS"] = asked
        os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(PROGRAM)])
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 10 + listeners


def test_without_a_terminal_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    heard: list[object] = []
    monkeypatch.setattr(hooks, "on_event", heard.append)
    hooks._has_bar.cache_clear()
    hooks.watch()
    assert not heard


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


def test_prometheus_finds_a_file_with_the_last_step_and_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = time.time()
    with recipe("Prometheus"):
        save_twice_and_fail(tmp_path)
    found = {line.split()[0]: float(line.split()[1]) for line in Path("robust_dcp.prom").read_text().splitlines()}
    assert found["robust_dcp_last_committed_step"] == 20 and found["robust_dcp_failures_total"] == 1
    assert before <= found["robust_dcp_last_committed_timestamp_seconds"] <= time.time()
    assert found["robust_dcp_save_bytes"] >= 36 and 0 < found["robust_dcp_save_seconds"] < 600


@pytest.mark.compat
def test_weights_and_biases_logs_each_save_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with recipe("Weights & Biases") as names:
        save_twice_and_fail(tmp_path)
        summary = dict(names["run"].summary)
        names["run"].finish()
    assert summary["robust_dcp/save/failures"] == 1 and summary["robust_dcp/step"] == 30
    assert summary["robust_dcp/load/nbytes"] == 36 and list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.compat
def test_mlflow_logs_each_save_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run, recipe("MLflow"):
        save_twice_and_fail(tmp_path)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "robust_dcp/save/failures")
    assert [(each.step, each.value) for each in history] == [(10, 0.0), (20, 0.0), (30, 1.0)]


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
