"""A manager and ``robust-dcp ls`` while a disk refuses, or while other programs change what they look at."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import robust_dcp
from robust_dcp import CheckpointManager, KeepBest, RobustWriter, StorageError
from robust_dcp.cli.ls import state_of
from robust_dcp.manager.series import RECORD_NAME
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.paths import REMOVING_PREFIX, SAVING_PREFIX
from tests.harness.damage import data_files
from tests.harness.faults import kill_in
from tests.harness.ranks import run_ranks


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def save_steps(manager: CheckpointManager, *steps: int) -> list[int]:
    for step in steps:
        manager.save(step, state(step))
    return [each.step for each in manager.checkpoints()]


def refuse(path: str) -> None:
    error = OSError(errno.EACCES, "Permission denied")
    raise storage_error("use", path, error) from error


class _Acts(Disk):
    """Does something right before a call for a path: what another program does meanwhile, or what the disk refuses."""

    def __init__(self, call: str, end: str, act: Callable[[str], object]) -> None:
        super().__init__()
        self.call, self.end, self.act = call, end, act
        self.n_acted = 0

    def _at(self, call: str, path: str) -> None:
        if call == self.call and path.endswith(self.end):
            self.n_acted += 1
            self.act(path)

    def exists(self, path: str) -> bool:
        self._at("exists", path)
        return super().exists(path)

    def list_directory(self, path: str) -> list[str]:
        self._at("list", path)
        return super().list_directory(path)

    def modified_seconds(self, path: str) -> float:
        self._at("modified", path)
        return super().modified_seconds(path)

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        self._at("open", path)
        return super().open_read(path, direct=direct)

    def rename(self, source: str, target: str) -> None:
        self._at("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._at("unlink", path)
        super().unlink(path)


def _save_and_be_killed(root: str) -> None:
    with kill_in("commit", rank=0):
        CheckpointManager(root).save(1, state(1))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    run_ranks(1, _save_and_be_killed, str(root))
    assert not (root / "step_1/.metadata").exists() and data_files(root / "step_1")
    return root / "step_1"


@pytest.fixture
def crashed(killed: Path, tmp_path: Path) -> Path:
    """What a save has left that was killed before its commit, in the directory ``step_1``."""
    return Path(shutil.copytree(killed, tmp_path / "step_1"))


def journal_of(path: Path) -> Path:
    (journal,) = path.glob(f"{SAVING_PREFIX}*")
    return journal


class TestRemovals:
    @pytest.mark.parametrize("call", ["exists", "modified"])
    def test_a_directory_that_may_not_be_looked_into_may_be_the_latest_and_is_not_touched(
        self, call: str, tmp_path: Path
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 2, 3)
        manager = CheckpointManager(tmp_path, keep_last=1, disk=_Acts(call, "step_1/.metadata", refuse))
        with pytest.raises(StorageError, match="Permission denied"):
            manager.checkpoints()
        assert manager.prune() == [str(tmp_path / "step_2")]
        assert [each.step for each in CheckpointManager(tmp_path).checkpoints()] == [1, 3]

    def test_half_a_removal_that_cannot_be_ended_is_told_and_ended_later(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 2, 3)
        doomed = tmp_path / f"{REMOVING_PREFIX}step_1"
        (tmp_path / "step_1").rename(doomed)
        manager = CheckpointManager(tmp_path, keep_last=1, disk=_Acts("list", doomed.name, refuse))
        assert manager.prune() == [str(tmp_path / "step_2")]
        assert f"{doomed.name} is not removed" in caplog.text and doomed.exists()
        CheckpointManager(tmp_path, keep_last=1).prune()
        assert not doomed.exists()

    @pytest.mark.parametrize(("error", "is_told"), [(PermissionError(13, "no"), True), (FileNotFoundError(), False)])
    def test_files_that_cannot_be_removed_are_told_and_those_that_somebody_has_removed_are_not(
        self, error: OSError, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 2)

        def fail(path: str) -> None:
            raise error

        with monkeypatch.context() as changed:
            changed.setattr(shutil, "rmtree", fail)
            CheckpointManager(tmp_path, keep_last=1).prune()
        assert ("step_1 is not removed: " in caplog.text) is is_told
        assert not (tmp_path / "step_1").exists()  # no half checkpoint has its name
        CheckpointManager(tmp_path, keep_last=1).prune()
        assert sorted(os.listdir(tmp_path)) == ["latest", "step_2"]

    def test_what_another_manager_removes_at_the_same_moment_is_no_error(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1)
        left = tmp_path / "latest.0123456789abcdef.tmp"
        left.touch()
        os.utime(left, (0, 0))
        disk = _Acts("unlink", left.name, os.unlink)
        CheckpointManager(tmp_path, keep_last=1, disk=disk).prune()
        assert disk.n_acted == 1 and caplog.text == ""


class TestCrashedSaves:
    def test_what_cannot_be_removed_now_is_still_known_later(
        self, crashed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = _Acts("unlink", ".distcp", refuse)
        assert CheckpointManager(crashed.parent, keep_last=1, disk=disk).prune() == []
        assert "not removed, which costs space and nothing else" in caplog.text
        assert data_files(crashed) and journal_of(crashed).exists()
        assert CheckpointManager(crashed.parent, keep_last=1).prune() == [str(crashed)]

    def test_a_journal_that_cannot_be_removed_is_told_and_fails_nothing(
        self, crashed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = _Acts("unlink", journal_of(crashed).name, refuse)
        assert save_steps(CheckpointManager(crashed.parent, keep_last=1, disk=disk), 2) == [2]
        assert f"what a crashed save has left in {crashed} is not removed: " in caplog.text


class TestLatest:
    def test_a_link_to_what_is_no_checkpoint_does_not_count(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path)
        save_steps(manager, 1, 2)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("elsewhere")
        latest = manager.latest()
        assert latest is not None and latest.step == 2

    def test_a_link_that_cannot_be_moved_is_told_and_leaves_nothing_behind(self, tmp_path: Path) -> None:
        save_steps(CheckpointManager(tmp_path), 1)
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("step_1")
        manager = CheckpointManager(tmp_path, disk=_Acts("rename", "/latest", refuse))
        with pytest.raises(StorageError, match=r"is committed, but .*latest"):
            manager.save(2, state(2))
        assert os.readlink(tmp_path / "latest") == "step_1"
        assert sorted(os.listdir(tmp_path)) == ["latest", "step_1", "step_2"]

    def test_a_step_that_another_manager_removes_as_soon_as_it_is_committed_fails_no_save(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 5)
        disk = _Acts("rename", f"step_1/{RECORD_NAME}", lambda path: shutil.rmtree(os.path.dirname(path)))
        CheckpointManager(tmp_path, disk=disk).save(1, state(1))
        assert "step_1 was removed as soon as it was committed: another manager does not keep it" in caplog.text
        assert [each.step for each in CheckpointManager(tmp_path).checkpoints()] == [5]
        assert (tmp_path / "latest").read_text() == "step_5"


@pytest.mark.parametrize("best", ["lowest", "", None])
def test_a_best_that_is_neither_end_is_refused_at_once(best: Any) -> None:
    with pytest.raises(ValueError, match="best is 'smallest' or 'largest', not"):
        KeepBest("loss", best=best)


def test_outside_of_git_a_checkpoint_says_nothing_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    save_steps(CheckpointManager(tmp_path / "run"), 1)
    assert CheckpointManager(tmp_path / "run").checkpoints()[0].provenance.get("git") is None


@pytest.mark.parametrize("number", range(4))  # who gave way was a matter of chance
def test_a_manager_that_sweeps_gives_way_to_a_save_that_begins(number: int, tmp_path: Path) -> None:
    """It looks into the directory of the step because of what a crashed save has left there."""
    step = tmp_path / "step_1"
    step.mkdir()
    (step / f"{SAVING_PREFIX}{'0' * 16}").touch()
    has_claimed, has_begun = threading.Event(), threading.Event()

    def sweep(path: str) -> None:
        if len(list(step.glob(f"{SAVING_PREFIX}*"))) > 1:
            has_claimed.set()
            has_begun.wait(20)

    def begin(path: str) -> None:
        if len(list(step.glob(f"{SAVING_PREFIX}*"))) > 2:
            threading.Timer(0.05, has_begun.set).start()

    with ThreadPoolExecutor(1) as thread:
        sweeping = thread.submit(CheckpointManager(tmp_path, disk=_Acts("list", "step_1", sweep)).prune)
        assert has_claimed.wait(20)
        writer = RobustWriter(step, disk=_Acts("list", "step_1", begin))
        CheckpointManager(tmp_path).save(1, state(1), storage_writer=writer)
        assert sweeping.result() == []


class TestWhatLsSees:
    """Each of these happens between the moment when a directory is listed and the look at what is in it."""

    def look(self, path: Path, disk: Disk) -> str:
        return state_of(disk, str(path), path.parent.stat().st_mtime)

    def test_a_directory_that_is_gone(self, tmp_path: Path) -> None:
        assert self.look(tmp_path / "step_1", Disk()) == "gone"

    def test_a_save_that_ends(self, crashed: Path) -> None:
        journal = journal_of(crashed)
        assert self.look(crashed, Disk()) == "crashed save"
        (crashed / ".metadata").touch()
        assert self.look(crashed, _Acts("open", journal.name, os.unlink)) == "committed"

    def test_a_file_that_is_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "step_1"
        path.mkdir()
        (path / "__0_0.distcp").touch()
        disk = _Acts("modified", "__0_0.distcp", os.unlink)
        assert self.look(path, disk) == "not committed"
        assert disk.n_acted == 1


def test_a_failed_async_save_removes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    save_steps(manager, 1)
    caplog.set_level(logging.ERROR)
    writer = RobustWriter(tmp_path / "step_2", disk=_Acts("rename", "step_2/.metadata", refuse))
    with pytest.raises(StorageError, match="Permission denied"):
        manager.async_save(2, state(2), storage_writer=writer).result()  # type: ignore[union-attr]
    robust_dcp.finish_async_saves()
    assert [each.step for each in manager.checkpoints()] == [1]
