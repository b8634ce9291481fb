"""What the log and the progress bar make of the events of a save. ``test_monitoring`` has the recipes."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp import Event, hooks, on_event
from robust_dcp.hooks import ProgressBar, log_event
from robust_dcp.report import LoadReport, PhaseReport


def test_the_log_entry_of_a_call_has_its_numbers_as_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with on_event(log_event), caplog.at_level(logging.INFO, logger="robust_dcp.operations"):
        report = robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "step_7")
        (tmp_path / "file").write_text("no directory")
        with pytest.raises(robust_dcp.StorageError):
            robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "file")
    saved, failed = (record for record in caplog.records if record.name == "robust_dcp.operations")
    fields = vars(saved)["robust_dcp"]
    assert saved.levelno == logging.INFO and fields["checkpoint_id"] == str(tmp_path / "step_7")
    assert fields["nbytes"] == report.nbytes and fields["write_seconds"] == report.phases[1].seconds
    assert failed.levelno == logging.ERROR and "StorageError" in vars(failed)["robust_dcp"]["error"]


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
    from robust_dcp.hooks import watch_in_terminal
    watch_in_terminal()
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
    hooks.watch_in_terminal.__wrapped__()
    assert not heard
