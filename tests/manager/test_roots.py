"""A manager finds other things below its root than its own checkpoints, and is asked for what makes no sense."""

from __future__ import annotations

import argparse
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CheckpointManager, RobustWriter
from robust_dcp.drain.record import DrainRecord, digest_at, write_drain_record
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import REMOVING_PREFIX
from tests.cli.commands import Shell
from tests.harness.damage import data_files


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def save_steps(manager: CheckpointManager, *steps: int) -> list[int]:
    for step in steps:
        manager.save(step, state(step))
    return [each.step for each in manager.checkpoints()]


def loaded(path: Path) -> float:
    found = state(0)
    robust_dcp.load(found, checkpoint_id=path)
    return float(found["weight"][0])


@pytest.mark.parametrize("link", ["step_1", f"{REMOVING_PREFIX}step_1"])
def test_what_a_symbolic_link_leads_to_is_never_removed(link: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept for good"
    robust_dcp.save(state(1), checkpoint_id=kept)
    root = tmp_path / "root"
    root.mkdir()
    (root / link).symlink_to(kept)
    assert save_steps(CheckpointManager(root, keep_last=1), 2, 3)[-1] == 3
    assert loaded(kept) == 1
    assert not (root / "step_2").exists()


def test_a_crashed_save_behind_a_link_is_somebody_elses(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.utime(elsewhere, (0, 0))
    root = tmp_path / "root"
    root.mkdir()
    (root / "step_1").symlink_to(elsewhere)
    CheckpointManager(root, keep_last=1).prune()
    assert elsewhere.exists() and (root / "step_1").is_symlink()


def test_what_only_has_the_name_of_a_checkpoint_does_not_keep_others_from_being_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "worker0").write_text("a log")
    (tmp_path / "step_1").symlink_to("step_1")
    (tmp_path / "step_2").symlink_to("nowhere")
    assert save_steps(CheckpointManager(tmp_path, keep_last=1), 11, 12, 13) == [13]
    assert (tmp_path / "worker0").read_text() == "a log"
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


class _StuckDisk(Disk):
    """Cannot rename or look into ``step_1``."""

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(source) == "step_1":
            raise robust_dcp.StorageError("rename: no", path=source, errno=5, operation="rename")
        super().rename(source, target)


def test_one_that_cannot_be_removed_does_not_keep_others_from_being_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(CheckpointManager(tmp_path), 1, 2, 3)
    manager = CheckpointManager(tmp_path, keep_last=1, disk=_StuckDisk())
    assert manager.prune() == [str(tmp_path / "step_2")]
    assert "step_1 is not removed: rename: no" in caplog.text


def test_files_on_other_mounts_are_removed_with_their_checkpoint(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    manager = CheckpointManager(tmp_path / "root", keep_last=1)
    for step in (1, 2):
        manager.save(step, state(step), storage_writer=RobustWriter(manager.path_of(step), stripe_paths=[mount]))
    assert [each.name.partition("-")[0] for each in mount.iterdir()] == ["step_2"]
    assert loaded(tmp_path / "root" / "step_2") == 2


def test_where_nothing_was_saved_nothing_is_removed(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "not yet", keep_last=1).prune() == []


def _metadata_that_asks_for_another_class(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b"_MEM_FORMAT_ENCODING") == 1
    path.write_bytes(data.replace(b"_MEM_FORMAT_ENCODING", b"_MEM_DORMAT_ENCODING"))  # one bit


class _Bomb:
    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.mark.parametrize(
    "damage", [_metadata_that_asks_for_another_class, lambda path: path.write_bytes(pickle.dumps(_Bomb()))]
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_if_the_latest_asks_for_code_an_older_one_is_loaded(damage: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=tmp_path / f"step_{step}", no_dist=True)
    damage(tmp_path / "step_2" / ".metadata")
    found = state(0)
    latest = CheckpointManager(tmp_path).load_latest(found)
    assert latest is not None and latest.checkpoint.step == 1 and found["step"] == 1
    assert [os.path.basename(each.path) for each in latest.skipped] == ["step_2"]


@pytest.mark.parametrize("name", ["checkpoint", "step_{step}_of_run", "run/step_{step}", "{epoch}", "step_{step:s}"])
def test_a_name_from_which_nobody_can_tell_the_step_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use a name that ends in the step"):
        CheckpointManager(tmp_path, name=name)


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, 10**18])
def test_a_step_that_is_no_number_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a step is a whole number|could not be found again"):
        CheckpointManager(tmp_path).save(step, state(1))
    assert not list(tmp_path.iterdir())


def test_a_step_may_be_a_number_of_another_library(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(torch.tensor(7), state(7))  # type: ignore[arg-type]
    assert [each.step for each in CheckpointManager(tmp_path).checkpoints()] == [7]


@pytest.mark.parametrize("metrics", [{"loss": None}, {"loss": "low"}, {"lo\udcffss": 1.0}, {3: 1.0}])
def test_a_metric_that_cannot_be_noted_is_refused_before_anything_is_written(metrics: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a number with a name"):
        CheckpointManager(tmp_path).save(1, state(1), metrics=metrics)
    assert not list(tmp_path.iterdir())


def test_a_config_of_which_no_digest_can_be_made_is_refused_at_once(tmp_path: Path) -> None:
    holds_itself: dict[str, Any] = {}
    holds_itself["self"] = holds_itself
    for config in (holds_itself, {"path": "\udcff"}):
        with pytest.raises(ValueError, match="config has no digest"):
            CheckpointManager(tmp_path, config=config)
    manager = CheckpointManager(tmp_path, config={1: argparse.Namespace(dtype=torch.float32), "a": {2, 3}})
    manager.save(1, state(1))
    assert manager.checkpoints()[0].provenance["config_digest"]


@pytest.mark.parametrize("keep", [[3], "last"])
def test_what_is_no_policy_is_refused_at_once(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no method kept"):
        CheckpointManager(tmp_path, keep=keep)
    with pytest.raises(ValueError, match=r"a whole number, got 1\.5"):
        CheckpointManager(tmp_path, keep_last=1.5)  # type: ignore[arg-type]


def test_the_command_keeps_a_checkpoint_whose_copy_has_not_arrived(tmp_path: Path, shell: Shell) -> None:
    save_steps(CheckpointManager(tmp_path), 1, 2, 3)
    path = str(tmp_path / "step_1")
    write_drain_record(Disk(), path, DrainRecord("s3://bucket/step_1", digest_at(Disk(), path)))
    ended = shell("prune", tmp_path, "--keep-last", 1, "--yes")
    assert ended.code == 0 and ended.rows[0][3] == "keep, its copy has not arrived"
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_1", "step_3"]


@pytest.mark.parametrize("target", ["step_2", "{root}/step_2", "../{name}/step_2", "./step_2/", "other"])
def test_latest_may_be_a_link_to_a_checkpoint_and_stays_one(target: str, tmp_path: Path, shell: Shell) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    save_steps(CheckpointManager(tmp_path), 1, 2, 3)
    (tmp_path / "other").symlink_to("step_2")  # a link to a link
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(target.format(root=tmp_path, name=tmp_path.name))
    assert manager.latest().step == 2  # type: ignore[union-attr]
    found = state(0)
    assert manager.load_latest(found).checkpoint.step == found["step"] == 2  # type: ignore[union-attr]
    assert [row[4] for row in shell("ls", tmp_path).rows] == ["committed", "committed, latest", "committed"]
    assert [row["name"] for row in shell("report", tmp_path, "--json").json["reports"]] == [
        "step_1",
        "step_2",
        "step_3",
    ]

    assert save_steps(manager, 4) == [4]
    assert (tmp_path / "latest").is_symlink() and loaded(tmp_path / "latest") == 4
    assert not list(tmp_path.glob("*.tmp"))


def test_a_latest_that_leads_nowhere_is_moved_as_well(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step_1")
    manager = CheckpointManager(tmp_path)
    assert manager.latest() is None
    save_steps(manager, 2)
    assert os.readlink(tmp_path / "latest") == "step_2"


def test_a_link_that_was_to_become_latest_when_its_job_was_killed_is_swept(tmp_path: Path) -> None:
    left = tmp_path / "latest.0123456789abcdef.tmp"
    left.symlink_to("step_1")
    save_steps(CheckpointManager(tmp_path, keep_last=1), 2)
    assert left.is_symlink()  # the job may still run
    os.utime(left, (0, 0), follow_symlinks=False)
    save_steps(CheckpointManager(tmp_path, keep_last=1), 3)
    assert not left.is_symlink()


def test_a_link_to_a_checkpoint_is_in_the_report_and_a_checkpoint_is_there_once(tmp_path: Path, shell: Shell) -> None:
    robust_dcp.save(state(1), checkpoint_id=tmp_path / "elsewhere/run/step_1")
    robust_dcp.save(state(2), checkpoint_id=tmp_path / "root/step_2")
    (tmp_path / "root/step_1").symlink_to("../elsewhere/run/step_1")
    (tmp_path / "root/best").symlink_to("step_2")
    (tmp_path / "root/all").symlink_to("../elsewhere")  # what a link leads to is a checkpoint, or it is not looked at
    (tmp_path / "root/loop").symlink_to(".")
    (tmp_path / "root/nowhere").symlink_to("gone")
    found = shell("report", tmp_path / "root", "--json").json
    assert [row["name"] for row in found["reports"]] == ["step_1", "step_2"]
    assert found["skipped"] == []


class TestAfterAStepBack:
    """A job saves steps 50, 100 and 150, goes back to 100, and saves 101 and so on."""

    def test_the_last_ones_that_were_saved_stay(self, tmp_path: Path) -> None:
        save_steps(CheckpointManager(tmp_path), 50, 100, 150)
        manager = CheckpointManager(tmp_path, keep_last=2)
        # What the job saves now is kept as if 150 were not there, and 150 stays until the job has come past it.
        kept = [[100, 101, 150], [101, 102, 150], [102, 103, 150], [103, 150], [150, 151]]
        assert [save_steps(manager, step) for step in (101, 102, 103, 150, 151)] == kept

    def test_the_command_keeps_the_same(self, tmp_path: Path, shell: Shell) -> None:
        save_steps(CheckpointManager(tmp_path), 50, 100, 150, 101)
        assert shell("prune", tmp_path, "--keep-last", 2, "--yes").code == 0
        assert [each.step for each in CheckpointManager(tmp_path).checkpoints()] == [100, 101, 150]

    def test_if_the_latest_is_damaged_the_one_before_it_is_loaded_and_not_what_was_left_behind(
        self, tmp_path: Path
    ) -> None:
        manager = CheckpointManager(tmp_path)
        save_steps(manager, 50, 100, 150, 101)
        damaged = ["step_101", "step_100", "step_50"]
        for n_damaged, expected in ((1, 100), (2, 50), (3, 150)):
            for path in data_files(tmp_path / damaged[n_damaged - 1]):
                path.unlink()
            found = manager.load_latest(state(0))
            assert found is not None and found.checkpoint.step == expected

    def test_a_checkpoint_that_was_committed_after_the_latest_was_not_left_behind(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path)
        save_steps(manager, 50, 100, 150)
        (tmp_path / "latest").write_text("step_100")  # as if the job had been killed right after the commit of 150
        for path in data_files(tmp_path / "step_100"):
            path.unlink()
        found = manager.load_latest(state(0))
        assert found is not None and found.checkpoint.step == 150
