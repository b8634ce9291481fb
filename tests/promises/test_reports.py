"""Every save and load tells what it did: to listeners, in its report, and beside the checkpoint. It costs no save."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import (
    Event,
    RobustCheckpointError,
    RobustPlanner,
    RobustWriter,
    StorageError,
    WriteOptions,
    on_event,
)
from tests.faults.disk import FaultDisk
from tests.harness.ranks import run_ranks, values

REPORT_NAME = ".robust_dcp.report.json"


def told(run: Any) -> list[Event]:
    """The events of a call."""
    events: list[Event] = []
    with on_event(events.append):
        run()
    return events


def names_of(events: list[Event]) -> list[str]:
    return [f"{event.name} {event.phase or ''}".strip() for event in events if event.name != "progress"]


def both(*phases: str) -> list[str]:
    return [f"{when} {phase}" for phase in phases for when in ("phase_started", "phase_ended")]


def test_saves_and_loads_tell_their_start_their_phases_and_their_report(tmp_path: Path) -> None:
    path, state = tmp_path / "c", {"w": torch.ones(1 << 20)}
    events = told(lambda: robust_dcp.save(state, checkpoint_id=path))
    assert names_of(events) == ["started", *both("plan", "write", "commit"), "ended"]
    last = events[-1]
    assert (last.kind, last.checkpoint_id, last.rank, last.world_size) == ("save", str(path), 0, 1)
    assert last.report.items == 1 and last.seconds >= sum(phase.seconds for phase in last.report.phases)
    assert not any(event.is_async for event in events)
    progress = [event for event in events if event.name == "progress" and event.total_nbytes]
    assert progress and progress[-1].done_nbytes == progress[-1].total_nbytes >= 4 << 20
    events = told(lambda: robust_dcp.load(state, checkpoint_id=path))
    assert names_of(events) == ["started", *both("plan", "read", "apply"), "ended"]
    assert events[-1].kind == "load" and events[-1].report.nbytes == 4 << 20
    events = told(lambda: robust_dcp.async_save(state, checkpoint_id=path).result())
    assert names_of(events)[0] == "started" and names_of(events)[-1] == "ended"
    assert all(event.is_async for event in events if event.name != "progress")
    assert "phase_ended stage" in names_of(events)


def fail_on_both(path: str) -> list[str]:
    """Only one rank finds what is wrong, or both do; ours, and async."""
    state_dicts = [{"w": torch.ones(9), "rank": torch.ones(2 + dist.get_rank())}, {"w": torch.ones(9)}]
    found = []
    for state_dict in state_dicts:
        for call in (robust_dcp.save, robust_dcp.async_save):

            def save(call: Any = call, state_dict: Any = state_dict) -> None:
                with pytest.raises(RobustCheckpointError):
                    getattr(call(state_dict, checkpoint_id=f"{path}/file"), "result", lambda: None)()

            events = [event for event in told(save) if event.name in ("started", "ended", "failed")]
            assert all(event.rank == dist.get_rank() for event in events)
            assert isinstance(events[-1].error, RobustCheckpointError)
            found.append(" ".join(event.name for event in events))
    return found


def test_all_ranks_tell_of_a_failed_save_and_of_no_other_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    assert values(run_ranks(2, fail_on_both, str(tmp_path))) == [["started failed"] * 4] * 2


def test_listeners_cannot_disturb_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(event: Event) -> None:
        raise KeyError("no such run")

    def save_again(event: Event) -> None:
        if event.name == "ended" and "again" not in event.checkpoint_id:
            robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{event.checkpoint_id} again")

    heard: list[Event] = []
    stopped: list[Event] = []
    on_event(stopped.append).stop()
    with on_event(refuse), on_event(heard.append), caplog.at_level(logging.ERROR, logger="robust_dcp.events"):
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "zero")
    assert heard[-1].name == "ended" and not stopped
    assert len(caplog.records) == 1 and "no such run" in caplog.text and "refuse" in caplog.text
    with on_event(save_again):  # on the thread of an async save it would wait for itself
        robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "one")
        robust_dcp.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "two").result()  # type: ignore[union-attr]
        robust_dcp.finish_async_saves()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one again", "two", "zero"]
    assert "do that in a thread of your own" in caplog.text


def state_of(rank: int = 0) -> dict[str, Any]:
    return {
        "model": {"wide": torch.ones(1000, 100), f"of_{rank}": torch.full((50_000,), float(rank))},
        "optimizer": {"step": 3},
    }


def save_in_every_way(path: str) -> None:
    state = state_of(dist.get_rank())
    robust_dcp.save(state, checkpoint_id=f"{path}/save")
    robust_dcp.save(state, checkpoint_id=f"{path}/again")
    for name in ("save", "again"):
        robust_dcp.load(state, checkpoint_id=f"{path}/{name}")
    robust_dcp.async_save(state, checkpoint_id=f"{path}/async").result()
    robust_dcp.async_save(state, checkpoint_id=f"{path}/process", executor="process").result()
    dcp.save(state, storage_writer=RobustWriter(f"{path}/planner"), planner=RobustPlanner())
    dcp.save(state, storage_writer=RobustWriter(f"{path}/stock planner"))
    robust_dcp.install()
    dcp.load(state, checkpoint_id=f"{path}/async")
    dcp.save(state, checkpoint_id=f"{path}/switch")
    robust_dcp.uninstall()
    robust_dcp.save(state, storage_writer=RobustWriter(f"{path}/off", report=False))
    robust_dcp.save(state, storage_writer=RobustWriter(f"{path}/off too", options=WriteOptions(report=False)))


def test_every_way_of_saving_leaves_a_report_of_all_ranks(tmp_path: Path) -> None:
    values(run_ranks(2, save_in_every_way, str(tmp_path)))
    found = {path.parent.name: json.loads(path.read_bytes()) for path in tmp_path.glob(f"*/{REPORT_NAME}")}
    assert set(found) == {"save", "again", "async", "process", "planner", "switch"}  # none by a planner of others
    for name, report in found.items():
        ranks = report["ranks"]
        assert (report["world_size"], ranks["rank"], report["nodes"]) == (2, [0, 1], [socket.gethostname()]), name
        assert all(seconds > 0 for seconds in (*ranks["write_seconds"], report["seconds"])), name
        # Two tensors of one rank each, one that both have, and what frames them.
        assert report["total_nbytes"] == sum(ranks["nbytes"]) and 800_000 < sum(ranks["nbytes"]) < 900_000, name
        assert [phase["name"] for phase in report["phases"] if phase["name"] != "stage"] == ["plan", "write", "commit"]
        loaded = {"async": ["save", "again"], "switch": ["async"]}  # what has come since the report before
        assert [os.path.basename(load["checkpoint"]) for load in report["loads"]] == loaded.get(name, [])
        for load in report["loads"]:
            assert [phase["name"] for phase in load["phases"]] == ["plan", "read", "apply"]
            assert load["seconds"] > 0 and load["nbytes"] == 600_000
            assert load["loaded_at_seconds"] < report["saved_at_seconds"]
    outcomes = {name: found[name]["plan"]["outcome"] for name in ("save", "again")}
    assert outcomes == {"save": "built", "again": "reused"}


def test_a_report_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    robust_dcp.save(state_of(), checkpoint_id=tmp_path)
    robust_dcp.load(state_of(), checkpoint_id=tmp_path)
    with FaultDisk(tmp_path, on={f"create:{REPORT_NAME}*": OSError(errno.ENOSPC, "")}):
        robust_dcp.save(state_of(), checkpoint_id=tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "has no report of its save" in line
    robust_dcp.load(state_of(), checkpoint_id=tmp_path)
    assert REPORT_NAME not in os.listdir(tmp_path)  # that of the checkpoint that was replaced is gone too
    # What no report has told of by then, because it was lost, the next one tells.
    full = {"write:*.distcp*": OSError(errno.ENOSPC, "")}
    with FaultDisk(tmp_path / "durable", on=full), pytest.raises(StorageError, match="ENOSPC"):
        robust_dcp.save(state_of(), checkpoint_id=f"file://{tmp_path}/durable/1")
    robust_dcp.save(state_of(), checkpoint_id=f"file://{tmp_path}/durable/2")
    loads = json.loads((tmp_path / "durable" / "2" / REPORT_NAME).read_bytes())["loads"]
    assert [load["checkpoint"] for load in loads] == [str(tmp_path)] * 2


def test_a_load_is_told_in_one_report_whatever_fails_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "staging"))
    root = f"memory://{tmp_path.name}"

    def save(number: int, **options: Any) -> None:
        robust_dcp.save(state_of(), checkpoint_id=f"{root}/{number}", **options)

    save(1)
    robust_dcp.load(state_of(), checkpoint_id=f"{root}/1")
    with pytest.raises(StorageError, match="there is another checkpoint"):
        save(1)  # its report does not arrive
    with pytest.raises(RobustCheckpointError, match="on_commit has failed"):
        save(2, on_commit=lambda: {}["a mistake"])  # this one has
    save(3)
    filesystem, path = fsspec.url_to_fs(root)
    loads = [json.loads(filesystem.cat_file(f"{path}/{number}/{REPORT_NAME}"))["loads"] for number in (2, 3)]
    assert list(map(len, loads)) == [1, 0]


def test_a_report_that_was_sent_to_another_process_has_all_but_the_metadata(tmp_path: Path) -> None:
    report = robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    sent = pickle.loads(pickle.dumps(report))
    assert set(report.metadata.state_dict_metadata) == {"w"}
    assert sent.nbytes == report.nbytes and str(sent) == str(report)
    with pytest.raises(ValueError, match="made without access to the checkpoint's metadata"):
        _ = sent.metadata


def test_reports_of_saves_and_loads_are_json_and_name_the_changed_keys(tmp_path: Path) -> None:
    robust_dcp.save({"a": torch.ones(3), "gone": torch.ones(2)}, checkpoint_id=tmp_path / "1", kind="json")
    saved = robust_dcp.save({"a": torch.ones(4), "new": torch.ones(2)}, checkpoint_id=tmp_path / "2", kind="json")
    for told in (json.loads(saved.to_json()), json.loads((tmp_path / "2" / REPORT_NAME).read_bytes())):
        assert told["plan"]["outcome"] == saved.plan == "rebuilt"
        changes = told["plan"]["changes"]
        assert (changes["added"], changes["removed"], list(changes["changed"])) == (["new"], ["gone"], ["a"])
        assert "float32[3]" in changes["changed"]["a"] and "float32[4]" in changes["changed"]["a"]
    told = json.loads(saved.to_json())
    assert (told["version"], told["kind"], told["checkpoint"]) == (1, "save", str(tmp_path / "2"))
    for name in ("rank", "world_size", "seconds", "items", "nbytes", "blocked_seconds", "total_nbytes"):
        assert told[name] == getattr(saved, name), name
    loaded = robust_dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "1")
    told = json.loads(loaded.to_json())
    assert (told["kind"], told["seconds"], told["nbytes"]) == ("load", loaded.seconds, loaded.nbytes)
    assert told["missing_keys"] == [] and "\n" not in loaded.to_json()
