"""Listeners are told of each save and load, from its start to its one end, and cannot disturb it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp import Event, RobustCheckpointError, on_event
from tests.harness.ranks import in_ranks, values


def told(run: object) -> list[Event]:
    """The events of a call."""
    events: list[Event] = []
    with on_event(events.append):
        assert callable(run)
        run()
    return events


def names_of(events: list[Event]) -> list[str]:
    return [
        f"{event.name} {event.phase}" if event.phase else event.name for event in events if event.name != "progress"
    ]


def test_a_save_tells_its_start_its_phases_and_its_report(tmp_path: Path) -> None:
    events = told(lambda: robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path))
    phases = [f"{when} {phase}" for phase in ("plan", "write", "commit") for when in ("phase_started", "phase_ended")]
    assert names_of(events) == ["started", *phases, "ended"]
    last = events[-1]
    assert (last.kind, last.checkpoint_id, last.rank, last.world_size) == ("save", str(tmp_path), 0, 1)
    assert last.report.items == 1 and last.seconds >= sum(phase.seconds for phase in last.report.phases)
    assert not any(event.is_async for event in events)


def test_a_load_tells_its_start_its_phases_and_its_report(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path)
    events = told(lambda: robust_dcp.load({"w": torch.zeros(9)}, checkpoint_id=tmp_path))
    phases = [f"{when} {phase}" for phase in ("plan", "read", "apply") for when in ("phase_started", "phase_ended")]
    assert names_of(events) == ["started", *phases, "ended"]
    assert events[-1].kind == "load" and events[-1].report.nbytes == 36


def test_an_async_save_tells_its_end_once_it_is_over(tmp_path: Path) -> None:
    events = told(lambda: robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path).result())
    assert names_of(events)[0] == "started" and names_of(events)[-1] == "ended"
    assert all(event.is_async for event in events if event.name != "progress")
    assert "phase_ended stage" in names_of(events)


@pytest.mark.parametrize("run", [robust_dcp.save, lambda *a, **k: robust_dcp.async_save(*a, **k).result()])
def test_a_failed_save_tells_its_error_and_no_other_end(run: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")

    def save() -> None:
        assert callable(run)
        with pytest.raises(RobustCheckpointError):
            run({"w": torch.ones(9)}, checkpoint_id=tmp_path / "file")

    events = told(save)
    ends = [event for event in events if event.name in ("ended", "failed")]
    assert [end.name for end in ends] == ["failed"] and isinstance(ends[0].error, RobustCheckpointError)


def test_progress_reaches_all_bytes(tmp_path: Path) -> None:
    events = told(lambda: robust_dcp.save({"w": torch.ones(1 << 20)}, checkpoint_id=tmp_path))
    progress = [event for event in events if event.name == "progress" and event.total_nbytes]
    assert progress and progress[-1].done_nbytes == progress[-1].total_nbytes >= 4 << 20


def failed_on_both(path: str) -> list[tuple[str, int]]:
    events: list[Event] = []
    state_dict = {"w": torch.ones(9), "rank": torch.ones(2 + torch.distributed.get_rank())}
    with on_event(events.append), pytest.raises(RobustCheckpointError):
        robust_dcp.save(state_dict, checkpoint_id=path)
    return [(event.name, event.rank) for event in events if event.name in ("started", "ended", "failed")]


def test_all_ranks_tell_of_a_failure_that_one_of_them_finds(tmp_path: Path) -> None:
    found = values(in_ranks(2, failed_on_both, str(tmp_path)))
    assert found == [[("started", rank), ("failed", rank)] for rank in (0, 1)]


def test_a_listener_that_raises_costs_one_log_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(event: Event) -> None:
        raise KeyError("no such run")

    heard: list[Event] = []
    with on_event(refuse), on_event(heard.append), caplog.at_level(logging.ERROR, logger="robust_dcp.events"):
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path)
    assert heard[-1].name == "ended"
    assert len(caplog.records) == 1 and "no such run" in caplog.text and "refuse" in caplog.text


def test_a_listener_that_was_stopped_hears_nothing(tmp_path: Path) -> None:
    heard: list[Event] = []
    on_event(heard.append).stop()
    robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path)
    assert not heard


def test_a_listener_that_saves_on_the_thread_of_an_async_save_is_told_instead_of_waiting_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_again(event: robust_dcp.Event) -> None:
        if event.name == "ended" and "again" not in event.checkpoint_id:
            robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path / f"{event.checkpoint_id} again")

    with robust_dcp.on_event(save_again):
        robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path / "one")
        robust_dcp.async_save({"weight": torch.ones(4)}, checkpoint_id=tmp_path / "two").result(60)  # type: ignore[union-attr]
        robust_dcp.finish_async_saves()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one again", "two"]
    assert "do that in a thread of your own" in caplog.text
