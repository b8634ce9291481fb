"""Every save leaves a report beside the checkpoint, which names slow ranks, and costs no exchange and no save."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, StorageError, WriteOptions
from robust_dcp.report_file import REPORT_NAME, SavedReport, decode_report
from robust_dcp.report_page import read_reports
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.ranks import in_ranks, values

Saves = dict[str, Any]


def state_dict(rank: int = 0) -> Saves:
    return {
        "model": {"wide": torch.ones(1000, 100), f"of_{rank}": torch.full((50_000,), float(rank))},
        "optimizer": {"step": 3},
    }


def report_in(directory: str | Path) -> SavedReport:
    return decode_report(Path(directory, REPORT_NAME).read_bytes())


def save_in_every_way(path: str) -> None:
    rank = torch.distributed.get_rank()
    robust_dcp.save(state_dict(rank), checkpoint_id=f"{path}/save")
    robust_dcp.save(state_dict(rank), checkpoint_id=f"{path}/again")
    robust_dcp.async_save(state_dict(rank), checkpoint_id=f"{path}/async").result()
    robust_dcp.async_save(state_dict(rank), checkpoint_id=f"{path}/process", executor="process").result()
    dcp.save(state_dict(rank), storage_writer=RobustWriter(f"{path}/planner"), planner=RobustPlanner())
    dcp.save(state_dict(rank), storage_writer=RobustWriter(f"{path}/stock planner"))
    robust_dcp.install()
    dcp.save(state_dict(rank), checkpoint_id=f"{path}/switch")
    robust_dcp.uninstall()
    robust_dcp.save(state_dict(rank), storage_writer=RobustWriter(f"{path}/off", report=False))


def test_every_way_of_saving_leaves_a_report_of_all_ranks(tmp_path: Path) -> None:
    values(in_ranks(2, save_in_every_way, str(tmp_path)))
    found = {each.name: each.report for each in read_reports(tmp_path).found}
    assert set(found) == {"save", "again", "async", "process", "planner", "stock planner", "switch"}
    for name, report in found.items():
        ranks = report.ranks
        assert (report.world_size, ranks.rank, report.nodes) == (2, (0, 1), (socket.gethostname(),)), name
        assert all(seconds > 0 for seconds in (*ranks.write_seconds, *ranks.plan_seconds, report.seconds)), name
        # Two tensors of one rank each, one that both have, and what frames them.
        assert report.total_nbytes == sum(ranks.nbytes) and 800_000 < sum(ranks.nbytes) < 900_000, name
        assert ranks.write_nbytes_per_second == pytest.approx(
            [size / taken for size, taken in zip(ranks.nbytes, ranks.write_seconds, strict=True)], rel=1e-3
        )
        assert all(how[0].startswith(("direct", "buffered")) for how in report.ways), name
        assert report.modules is not None and report.modules.name[:2] == ("", "model"), name
        assert report.modules.nbytes[0] == pytest.approx(report.total_nbytes, rel=0.01), name
        assert [phase.name for phase in report.phases if phase.name != "stage"] == ["plan", "write", "commit"], name
    assert [found[name].is_async for name in ("save", "async", "process")] == [False, True, True]
    assert all(seconds > 0 for seconds in found["async"].ranks.stage_seconds)
    outcomes = {name: found[name].plan.outcome for name in ("save", "again", "stock planner")}
    assert outcomes == {"save": "built", "again": "reused", "stock planner": "foreign"}
    assert (tmp_path / "off" / ".metadata").exists() and not (tmp_path / "off" / REPORT_NAME).exists()


def test_changed_keys_are_in_the_report(tmp_path: Path) -> None:
    robust_dcp.save({"a": torch.ones(3), "gone": torch.ones(2)}, checkpoint_id=tmp_path / "1", kind="changed keys")
    robust_dcp.save({"a": torch.ones(4), "new": torch.ones(2)}, checkpoint_id=tmp_path / "2", kind="changed keys")
    plan = report_in(tmp_path / "2").plan
    assert plan.changes is not None and plan.outcome == "rebuilt"
    assert (plan.changes.added, plan.changes.removed) == (("new",), ("gone",))
    assert plan.changes.changed["a"] == "float32[3] at 'a' -> float32[4] at 'a'"


class NoReportDisk(PosixDisk):
    """A disk on which files of this name cannot be made."""

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if REPORT_NAME in path:
            raise StorageError(f"open {path}: no space left", path=path, operation="create")
        return super().open_new(path, direct=direct)


def test_a_report_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    robust_dcp.save(state_dict(), checkpoint_id=tmp_path)
    robust_dcp.save(state_dict(), storage_writer=RobustWriter(tmp_path, disk=NoReportDisk()))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "has no report of its save" in told[0] and "no space left" in told[0]
    loaded = state_dict(rank=0)
    robust_dcp.load(loaded, checkpoint_id=tmp_path)
    # That of the checkpoint that was replaced is gone too.
    assert REPORT_NAME not in os.listdir(tmp_path)


def test_reports_of_saves_and_loads_are_json(tmp_path: Path) -> None:
    robust_dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "1", kind="json")
    saved = robust_dcp.save({"b": torch.ones(3)}, checkpoint_id=tmp_path / "2", kind="json")
    told = json.loads(saved.to_json())
    assert (told["version"], told["kind"], told["checkpoint"]) == (1, "save", str(tmp_path / "2"))
    for name in ("rank", "world_size", "seconds", "items", "nbytes", "blocked_seconds", "total_nbytes", "digest"):
        assert told[name] == getattr(saved, name), name
    assert told["plan"]["outcome"] == saved.plan and told["plan"]["changes"]["removed"] == ["a"]
    assert told["plan"]["changes"]["added"] == ["b"]
    assert [phase["name"] for phase in told["phases"]] == [phase.name for phase in saved.phases]
    loaded = robust_dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "1")
    told = json.loads(loaded.to_json())
    assert (told["kind"], told["seconds"], told["nbytes"]) == ("load", loaded.seconds, loaded.nbytes)
    assert told["missing_keys"] == [] and "\n" not in loaded.to_json()


def test_the_report_can_be_switched_off_with_the_other_options(tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path, options=WriteOptions(report=False))
    robust_dcp.save(state_dict(), storage_writer=writer)
    assert REPORT_NAME not in os.listdir(tmp_path)
