"""Drains: what was saved to a local directory is copied to durable storage beside training."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import CheckpointManager, CopyOptions, RobustWriter, StorageError, copy_checkpoint
from tests.drain.checkpoints import files_of, loaded, state_dict
from tests.faults.disk import Call, FaultDisk, Gate, kill
from tests.harness.damage import data_files
from tests.harness.ranks import errors, run_ranks, values
from tests.harness.verdicts import lines_of_the_log

RECORD = ".robust_dcp.drain.json"


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A place that nothing can be copied to until ``taken`` is removed."""
    (tmp_path / "taken").write_text("no directory")
    return tmp_path / "taken/durable"


def save_and_drain(path: Path, target: Path | str, value: float = 1.0) -> None:
    robust_dcp.save(state_dict(value), storage_writer=RobustWriter(path, drain_to=target))


def steps(manager: CheckpointManager) -> list[int]:
    return [each.step for each in manager.checkpoints()]


def _save_and_drain(path: str, target: str) -> list[float]:
    rank = dist.get_rank()
    robust_dcp.save(state_dict(2.0, rank), storage_writer=RobustWriter(path, drain_to=target))
    writer = RobustWriter(f"{path}_async", drain_to=f"{target}_async")
    robust_dcp.async_save(state_dict(3.0, rank), storage_writer=writer)
    robust_dcp.finish_async_saves()
    return [loaded(target, rank), loaded(f"{target}_async", rank), loaded(path, rank)]


def test_each_save_of_all_ranks_arrives_beside_training(tmp_path: Path) -> None:
    path, target = tmp_path / "local", f"file://{tmp_path}/durable"
    assert values(run_ranks(3, _save_and_drain, str(path), target)) == [[2.0, 3.0, 2.0]] * 3
    assert files_of(path) == files_of(tmp_path / "durable") | {RECORD}
    record = json.loads((path / RECORD).read_text())
    assert (record["target"], record["is_complete"]) == (target, True)


def _fail_until_told(path: str, target: str) -> None:
    rank = dist.get_rank()
    robust_dcp.save(state_dict(1.0, rank), storage_writer=RobustWriter(path, drain_to=target))
    for number in range(1000):  # the drain fails at some time after the save, and the save after that says so
        robust_dcp.save(state_dict(2.0, rank), checkpoint_id=f"{path}_{number}")


def _save_below_a_file(root: str) -> None:
    CheckpointManager(root, drain_to=f"{root}.far").save(1, state_dict(1.0), timeout_seconds=20)


def test_a_root_that_cannot_be_listed_is_an_error_of_the_save_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("no directory")
    for error in errors(run_ranks(2, _save_below_a_file, str(tmp_path / "root"))):
        assert error.type_name == "StorageError" and "a file of that name is there" in error.message


def test_a_drain_that_failed_is_told_by_the_next_save_on_all_ranks_and_can_be_ended_by_hand(
    taken: Path, tmp_path: Path
) -> None:
    for error in errors(run_ranks(2, _fail_until_told, str(tmp_path / "local"), str(taken))):
        assert error.type_name == "StorageError" and "taken" in error.message
    assert loaded(tmp_path / "local") == 1.0
    (tmp_path / "taken").unlink()
    copy_checkpoint(tmp_path / "local", taken)
    assert loaded(taken) == 1.0


class WhenTheDrainFails:
    """A ``Stateful`` that lets the drain fail while the next save asks it for its state."""

    def __init__(self) -> None:
        self.goes_on, self.lines = threading.Event(), lines_of_the_log()

    def state_dict(self) -> dict[str, int]:
        self.goes_on.set()
        while not any("drain failed" in line for line in self.lines):
            time.sleep(0.01)
        time.sleep(0.1)  # the error is kept right after the line
        return {"step": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_drain_that_fails_while_a_save_plans_is_told_by_the_save_after_that(taken: Path, tmp_path: Path) -> None:
    failing = WhenTheDrainFails()
    with FaultDisk(taken.parent.parent, on={"list:*taken/durable": lambda call: failing.goes_on.wait(300)}):
        save_and_drain(tmp_path / "1", taken)
        robust_dcp.save({"w": torch.ones(2), "loader": failing}, checkpoint_id=tmp_path / "2")
    with pytest.raises(StorageError, match="taken"):
        robust_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "3")
    robust_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "3")


def test_a_save_while_the_one_before_it_is_copied_is_what_arrives(tmp_path: Path) -> None:
    local, durable = tmp_path / "local", tmp_path / "durable"
    save_and_drain(local, durable, 1.0)
    robust_dcp.finish_async_saves()
    gate = Gate()
    with FaultDisk(durable, on={"create:__*#1": gate}):
        save_and_drain(local, durable, 2.0)
        assert gate.is_there.wait(300)
        for value in (3.0, 4.0):
            save_and_drain(local, durable, value)
        assert loaded(durable) == 1.0
        gate.opened.set()
        robust_dcp.finish_async_saves()
    assert loaded(durable) == 4.0
    assert files_of(durable) == files_of(local) - {RECORD}


def _drain_with_a_call_that_hangs(path: str, target: str) -> bool:
    """On rank 1, the first call that makes a file at the target does not return before the drain is over."""
    rank, is_over, hung = dist.get_rank(), threading.Event(), []

    def hang(call: Call) -> None:
        hung.append(call)
        is_over.wait()

    with FaultDisk(target, on={"create:*#1": hang} if rank == 1 else {}):
        writer = RobustWriter(path, drain_to=target, drain_options=CopyOptions(call_timeout_seconds=3))
        robust_dcp.save(state_dict(1.0, rank), storage_writer=writer, timeout_seconds=1)
        robust_dcp.finish_async_saves()
        assert loaded(target, rank) == 1.0
        is_over.set()
    return len(hung) == 1


def test_a_call_that_hangs_is_repeated_although_the_rank_is_silent_meanwhile(tmp_path: Path) -> None:
    found = values(run_ranks(2, _drain_with_a_call_that_hangs, str(tmp_path / "local"), str(tmp_path / "durable")))
    assert found == [False, True]


def _save_and_be_killed_before_the_copy_is_named(tmp: str) -> None:
    with FaultDisk(f"{tmp}/durable", on={"create:latest*": kill}):
        CheckpointManager(f"{tmp}/run", drain_to=f"{tmp}/durable").save(1, state_dict(1.0))
        robust_dcp.finish_async_saves()


class TestAManager:
    @pytest.mark.parametrize("name", ["plain", os.fsdecode(b"\xff")], ids=ascii)
    def test_keeps_what_has_not_arrived_and_goes_on_with_it(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL, "robust_dcp")  # xdist cannot send such a path in a log
        tmp_path /= name
        tmp_path.mkdir()
        durable = tmp_path / "durable"
        durable.write_text("no directory yet")
        manager = CheckpointManager(tmp_path / "local", keep_last=1, drain_to=durable)
        for step in (1, 2):
            manager.save(step, state_dict(float(step)))
            with pytest.raises(StorageError, match="durable"):
                robust_dcp.finish_async_saves()
        manager.prune()
        assert steps(manager) == [1, 2]
        durable.unlink()
        robust_dcp.save(state_dict(3.0), checkpoint_id=manager.path_of(3))  # as if killed before it was noted
        manager = CheckpointManager(
            tmp_path / "local", keep_last=1, drain_to=f"file://{durable}" if name == "plain" else durable
        )
        manager.save(4, state_dict(4.0))
        robust_dcp.finish_async_saves()
        assert [loaded(durable / f"step_{step}") for step in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
        manager.prune()
        assert steps(manager) == [4]

    def test_an_older_copy_that_arrives_late_stays_where_the_latest_is_damaged(self, tmp_path: Path) -> None:
        durable = tmp_path / "durable"
        durable.mkdir()
        (durable / "step_1").write_text("no directory yet")
        manager = CheckpointManager(tmp_path / "local", drain_to=durable, drain_keep_last=1)
        manager.save(1, state_dict(1.0))
        with pytest.raises(StorageError):
            robust_dcp.finish_async_saves()
        manager.save(2, state_dict(2.0))
        robust_dcp.finish_async_saves()
        assert not (durable / "step_1").is_dir() and loaded(durable / "step_2") == 2.0
        metadata = durable / "step_2" / ".metadata"
        metadata.write_bytes(bytes(200) + metadata.read_bytes()[200:])
        (durable / "step_1").unlink()
        (durable / "step_3").write_text("no directory yet")
        manager.save(3, state_dict(3.0))
        with pytest.raises(StorageError):
            robust_dcp.finish_async_saves()
        assert loaded(durable / "step_1") == 1.0

    def test_a_step_that_is_saved_again_replaces_its_own_copy_and_no_other(self, tmp_path: Path) -> None:
        local, place = tmp_path / "root", tmp_path / "durable/step_1"
        for value, durable in ((1.0, place.parent), (2.0, place.parent.as_uri())):
            CheckpointManager(local, drain_to=durable).save(1, state_dict(value))
            robust_dcp.finish_async_saves()
            assert loaded(place) == value
        names = {each.name for each in (local / "step_1").iterdir()}
        assert {each.name for each in place.iterdir()} == names - {".robust_dcp.drain.json"}
        shutil.rmtree(local)  # now nobody knows whose the copy is
        CheckpointManager(local, drain_to=tmp_path / "durable").save(1, state_dict(3.0))
        with pytest.raises(StorageError, match="not known to be an earlier save of this one"):
            robust_dcp.finish_async_saves()
        assert loaded(place) == 2.0

    @pytest.mark.parametrize("call", ["rename:.metadata", "unlink:__*", "create:__*"])
    def test_a_replacement_that_is_cut_off_leaves_the_old_or_the_new_copy_and_goes_on(
        self, call: str, tmp_path: Path
    ) -> None:
        local, place = tmp_path / "root", tmp_path / "durable/step_1"
        manager = CheckpointManager(local, drain_to=tmp_path / "durable")
        manager.save(1, state_dict(1.0))
        robust_dcp.finish_async_saves()
        with FaultDisk(place, on={call: OSError(errno.EACCES, "")}):
            manager.save(1, state_dict(2.0))
            with contextlib.suppress(StorageError):
                robust_dcp.finish_async_saves()
        is_new = call.startswith("unlink")
        assert loaded(place) == (2.0 if is_new else 1.0)
        for step in (2, 3):  # the first one goes on with the copy
            manager.save(step, state_dict(float(step)))
            robust_dcp.finish_async_saves()
        assert loaded(place) == 2.0
        if not is_new:  # an error there costs space only
            assert len(data_files(place)) == len(data_files(local / "step_1"))

    def test_names_a_copy_as_the_latest_although_its_job_was_killed_before_it_could(self, tmp_path: Path) -> None:
        durable = tmp_path / "durable"
        outcomes = run_ranks(1, _save_and_be_killed_before_the_copy_is_named, str(tmp_path))
        assert [each.exitcode for each in outcomes] == [-9] and not (durable / "latest").exists()
        assert loaded(durable / "step_1") == 1.0
        (durable / "latest").write_text("step_0\n")
        manager = CheckpointManager(tmp_path / "run", drain_to=durable)
        with FaultDisk(durable, on={"create:step_2/__*": OSError(errno.EACCES, "")}):  # of what is saved now
            manager.save(2, state_dict(2.0))
            with pytest.raises(StorageError):
                robust_dcp.finish_async_saves()
        assert (durable / "latest").read_text().split()[-1] == "step_1"

    @pytest.mark.parametrize("target", ["./taken/durable/", "file://{path}/taken/durable"])
    def test_awaits_no_copy_that_somebody_else_has_ended(
        self, target: str, taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        save_and_drain(Path("local/step_1"), "taken/durable")
        with pytest.raises(StorageError, match="taken"):
            robust_dcp.finish_async_saves()
        os.remove("taken")
        manager = CheckpointManager("local", keep_last=1)
        copy_checkpoint("local/step_1", "elsewhere")
        manager.save(2, state_dict(2.0))
        assert steps(manager) == [1, 2]
        copy_checkpoint("local/step_1", target.format(path=tmp_path))
        manager.prune()
        assert steps(manager) == [2]


def test_no_copy_begins_before_the_note_of_its_step_is_there(tmp_path: Path) -> None:
    durable, began_at = tmp_path / "durable", []

    def wait(call: Call) -> None:
        time.sleep(0.3)  # a copy could have begun long ago
        began_at.append(durable.exists())

    manager = CheckpointManager(tmp_path / "run", drain_to=durable)
    for loss in (0.5, 0.25):
        with FaultDisk(tmp_path, on={"rename:run/step_1/.robust_dcp.step.json#1": wait} if loss == 0.5 else {}):
            manager.save(1, state_dict(loss), metrics={"loss": loss})
            robust_dcp.finish_async_saves()
        (copied,) = CheckpointManager(durable).checkpoints()
        assert (copied.metrics, loaded(copied.path)) == ({"loss": loss}, loss)
    assert began_at == [False]
