"""A manager saves steps, keeps those that are wanted, goes on from the newest one that is whole, and touches nothing
else. Disks refuse meanwhile, and other programs change what it looks at."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import (
    CheckpointManager,
    KeepBest,
    KeepEvery,
    KeepLast,
    RobustCheckpointError,
    StorageError,
)
from robust_dcp.manager.series import LATEST_NAME, RECORD_NAME
from robust_dcp.storage.files.paths import REMOVING_PREFIX, SAVING_PREFIX
from robust_dcp.storage.files.what_is_there import TRACKER_NAME
from tests.faults.disk import Fault, FaultDisk, Gate
from tests.harness.damage import cut_short, data_files
from tests.harness.faults import kill_in
from tests.harness.ranks import errors, run_ranks, values
from tests.storage.forged import Call


def state(step: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"shared": torch.full((100,), float(step)), f"own {rank}": torch.full((100,), step + rank / 10)}


def save_steps(manager: CheckpointManager, *steps: int) -> list[int]:
    for step in steps:
        manager.save(step, state(step))
    return [each.step for each in manager.checkpoints()]


def loaded(path: Path) -> float:
    found = state(-1)
    robust_dcp.load(found, checkpoint_id=path)
    return float(found["shared"][0])


REFUSED = OSError(errno.EACCES, "")


class KeepFirst:
    def kept(self, checkpoints: Any) -> Any:
        return checkpoints[:1]


class BrokenPolicy:
    def kept(self, checkpoints: Any) -> Any:
        raise KeyError("a mistake in the policy")


POLICIES: list[tuple[dict[str, Any], list[int], bool]] = [
    ({}, [10, 20, 30, 40, 50], False),
    ({"keep_last": 2}, [40, 50], True),
    ({"keep_last": 1, "keep_every": 20}, [20, 40, 50], False),
    ({"keep_best": "loss"}, [30, 50], True),  # of 20 and 30, which are equally good, the newer one
    ({"keep": [KeepBest("loss", number=2, best="largest"), KeepLast(1)]}, [40, 50], False),
    ({"keep": [KeepFirst()]}, [10, 50], False),
    ({"keep": [BrokenPolicy()]}, [10, 20, 30, 40, 50], False),
]
"""Options, what is kept of the steps 10 to 50, and whether they are saved beside training."""


def save_by_each_policy(root: str) -> list[list[int]]:
    kept = []
    for number, (options, _, is_async) in enumerate(POLICIES):
        manager = CheckpointManager(f"{root}/{number}", **options)
        for step in (10, 20, 30, 40, 50):
            (manager.async_save if is_async else manager.save)(step, state(step), metrics={"loss": abs(step - 25.0)})
        robust_dcp.finish_async_saves()
        dist.barrier()
        kept.append([each.step for each in manager.checkpoints()])
    return kept


def test_what_a_policy_keeps_stays_and_so_does_the_newest(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_by_each_policy, str(tmp_path))) == [[kept for _, kept, _ in POLICIES]] * 2


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda root: KeepLast(0), ValueError, "must be at least 1, and a whole number"),
        (lambda root: KeepEvery(0), ValueError, "must be at least 1, and a whole number"),
        (lambda root: KeepBest("loss", number=0), ValueError, "must be at least 1, and a whole number"),
        (lambda root: KeepBest("loss", best="lowest"), ValueError, "best is 'smallest' or 'largest'"),  # type: ignore[arg-type]
        (lambda root: CheckpointManager(root, keep_last=1.5), ValueError, "must be at least 1"),  # type: ignore[arg-type]
        (lambda root: CheckpointManager(root, keep=[3]), TypeError, "has no method kept"),  # type: ignore[list-item]
        *(
            (
                lambda root, step=step: CheckpointManager(root).save(step, state(1)),
                ValueError,
                "a step is a whole|again",
            )
            for step in (-1, 1.5, "3", None, 10**18)
        ),
        *(
            (lambda root, it=it: CheckpointManager(root).save(1, state(1), metrics=it), ValueError, "must be a number")
            for it in ({"loss": None}, {"loss": "low"}, {"lo\udcffss": 1.0}, {3: 1.0})
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    call: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_step_may_be_a_number_of_another_library(tmp_path: Path) -> None:
    assert save_steps(CheckpointManager(tmp_path), torch.tensor(7)) == [7]  # type: ignore[arg-type]


class TestRecords:
    def test_a_metric_that_is_no_number_is_never_the_best_and_costs_no_other(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, keep_best="loss")
        for step, metrics in enumerate([{"loss": 2.0}, {"loss": float("nan"), "accuracy": 0.5}]):
            manager.save(step, state(step), metrics=metrics)
        assert [each.metrics for each in manager.checkpoints()] == [{"loss": 2.0}, {"accuracy": 0.5}]
        manager.save(2, state(2))
        assert [each.step for each in manager.checkpoints()] == [0, 2]

    @pytest.mark.parametrize("content", [b"{", b'{"step": "x"}', b'{"metrics": {"\xff": 1}}', b" " * (2 << 20)])
    def test_one_that_cannot_be_understood_is_no_reason_to_lose_a_checkpoint(
        self, content: bytes, tmp_path: Path
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 10)
        (tmp_path / "step_10" / RECORD_NAME).write_bytes(content)
        (checkpoint,) = CheckpointManager(tmp_path).checkpoints()
        assert checkpoint.step == 10 and checkpoint.metrics == {}


def load_what_is_there(root: str) -> tuple[int, float, list[str]]:
    found = state(-1)
    latest = CheckpointManager(root).load_latest(found)
    assert latest is not None
    return latest.checkpoint.step, found["shared"][0].item(), [each.reason for each in latest.skipped]


def save_on_all_ranks(root: str, *steps: int) -> list[int]:
    return save_steps(CheckpointManager(root), *steps)


class TestLoads:
    def test_if_the_latest_is_damaged_the_newest_whole_one_is_loaded_and_the_others_are_named(
        self, tmp_path: Path
    ) -> None:
        values(run_ranks(2, save_on_all_ranks, str(tmp_path), 10, 20, 30))
        cut_short(data_files(tmp_path / "step_30")[1], 3000)
        (tmp_path / "step_20" / ".metadata").write_bytes(b"nonsense")
        (tmp_path / "step_20" / ".robust_dcp.index").unlink()
        for step, value, reasons in values(run_ranks(2, load_what_is_there, str(tmp_path))):
            assert (step, value) == (10, 10.0)
            assert "__" in reasons[0] and ".metadata" in reasons[1]
        for path in data_files(tmp_path / "step_10"):
            path.unlink()
        for error in errors(run_ranks(2, load_what_is_there, str(tmp_path))):
            assert error.type_name == "CorruptCheckpoint" and "none of the 3 checkpoints" in error.message
            assert all(f"step_{step}" in error.message for step in (10, 20, 30))

    def test_a_checkpoint_that_does_not_fit_is_no_damaged_one(self, tmp_path: Path) -> None:
        save_steps(CheckpointManager(tmp_path), 10, 20)
        with pytest.raises(RobustCheckpointError, match="another key"):
            CheckpointManager(tmp_path).load_latest({"another key": torch.zeros(2)})

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_if_the_latest_asks_for_code_an_older_one_is_loaded(self, tmp_path: Path) -> None:
        for step in (1, 2):
            dcp.save(state(step), checkpoint_id=tmp_path / f"step_{step}", no_dist=True)
        (tmp_path / "step_2" / ".metadata").write_bytes(pickle.dumps(Call(os.abort)))
        step, value, skipped = load_what_is_there(str(tmp_path))
        assert (step, value, len(skipped)) == (1, 1.0, 1)


def fail_to_move_latest(root: str) -> str:
    manager = CheckpointManager(root)
    manager.save(1, state(1))
    if dist.get_rank() == 0:
        (Path(root) / LATEST_NAME).unlink()
        (Path(root) / LATEST_NAME / "in the way").mkdir(parents=True)
    try:
        manager.save(2, state(2))
    except RobustCheckpointError as error:
        return str(error)
    return "nothing was raised"


class TestLatest:
    def test_if_it_cannot_move_all_ranks_are_told(self, tmp_path: Path) -> None:
        for told in values(run_ranks(2, fail_to_move_latest, str(tmp_path))):
            assert "is committed" in told and "latest" in told

    def test_it_is_what_megatrons_tracker_names_where_there_is_one(self, tmp_path: Path) -> None:
        for step in (100, 200):
            dcp.save(state(step), checkpoint_id=tmp_path / f"iter_{step:07d}", no_dist=True)
        (tmp_path / TRACKER_NAME).write_text("100")
        (tmp_path / "iter_0000300").mkdir()  # never committed
        manager = CheckpointManager(tmp_path, name="iter_{step:07d}")
        assert [each.name for each in manager.checkpoints()] == ["iter_0000100", "iter_0000200"]
        assert load_what_is_there_in(manager) == 100
        save_steps(manager, 400)
        assert (tmp_path / TRACKER_NAME).read_text() == "400" and load_what_is_there_in(manager) == 400
        (tmp_path / TRACKER_NAME).write_text("200")  # the job has gone on without the manager
        assert load_what_is_there_in(manager) == 200


def load_what_is_there_in(manager: CheckpointManager) -> int:
    """The step of the latest, after a load that has to give the same."""
    found, latest = state(-1), manager.latest()
    one = manager.load_latest(found)
    assert one is not None and one.checkpoint == latest and found["shared"][0] == one.checkpoint.step
    return one.checkpoint.step


class SlowToLoad:
    """A ``Stateful`` during whose load the manager saves another step, and removes what is not kept."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.zeros(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.manager.save(2, state(2))


def save_with_two_managers(root: str) -> list[int]:
    """Both ranks are jobs of their own that save other steps below one root, and remove at the same time."""
    first = dist.get_rank()
    manager = CheckpointManager(root, keep_last=2)
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group()
    return save_steps(manager, *range(first, 20, 2))


class TestRemovals:
    @pytest.mark.parametrize("link", ["step_1", f"{REMOVING_PREFIX}step_1"])
    def test_what_a_symbolic_link_leads_to_is_never_removed(self, link: str, tmp_path: Path) -> None:
        kept = tmp_path / "kept for good"
        robust_dcp.save(state(1), checkpoint_id=kept)
        root = tmp_path / "root"
        root.mkdir()
        (root / link).symlink_to(kept)
        assert save_steps(CheckpointManager(root, keep_last=1), 2, 3)[-1] == 3
        assert loaded(kept) == 1
        assert not (root / "step_2").exists()

    def test_what_only_has_the_name_of_a_checkpoint_does_not_keep_others_from_being_removed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "worker0").write_text("a log")
        (tmp_path / "step_1").symlink_to("step_1")
        (tmp_path / "step_2").symlink_to("nowhere")
        assert save_steps(CheckpointManager(tmp_path, keep_last=1), 11, 12, 13) == [13]
        assert (tmp_path / "worker0").read_text() == "a log"
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]

    @pytest.mark.parametrize(
        "call", ["stat:step_1/.metadata#1", "stat:step_1/.metadata#2", f"rename:{REMOVING_PREFIX}step_1"]
    )
    def test_one_that_cannot_be_looked_at_or_removed_does_not_keep_others_from_being_removed(
        self, call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 2, 3)
        manager = CheckpointManager(tmp_path, keep_last=1)
        with FaultDisk(tmp_path, on={call: REFUSED}):
            assert manager.prune() == [str(tmp_path / "step_2")]
        assert [each.step for each in manager.checkpoints()] == [1, 3]
        if call.startswith("rename"):
            assert "step_1 is not removed: rename " in caplog.text
            return
        with FaultDisk(tmp_path, on={call: REFUSED}), pytest.raises(StorageError, match="Permission denied"):
            manager.checkpoints()  # it may be the latest

    @pytest.mark.parametrize(("error", "is_told"), [(PermissionError(13, "no"), True), (FileNotFoundError(), False)])
    def test_files_that_cannot_be_removed_are_told_and_removed_later(
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

    def test_a_load_holds_the_checkpoint_that_it_reads(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, keep_last=1)
        robust_dcp.save({"slow": {"value": torch.ones(3)}}, checkpoint_id=manager.path_of(1))
        robust_dcp.load({"slow": SlowToLoad(manager)}, checkpoint_id=manager.path_of(1))
        assert [each.step for each in manager.checkpoints()] == [1, 2]
        assert manager.prune() == [str(tmp_path / "step_1")]

    def test_two_managers_on_one_root_lose_nothing_that_both_keep(self, tmp_path: Path) -> None:
        values(run_ranks(2, save_with_two_managers, str(tmp_path)))
        manager = CheckpointManager(tmp_path, keep_last=2)
        assert [each.step for each in manager.checkpoints()][-2:] == [18, 19]
        found = {"shared": torch.zeros(100)}
        latest = manager.load_latest(found)
        assert latest is not None and found["shared"][0] == latest.checkpoint.step and latest.skipped == ()

    def test_whoever_waits_for_all_saves_waits_for_the_removals_too(self, tmp_path: Path) -> None:
        manager, gate = CheckpointManager(tmp_path, keep_last=1), Gate()
        manager.save(1, state(1))
        with FaultDisk(tmp_path, on={f"rename:{REMOVING_PREFIX}*": gate}):
            manager.async_save(2, state(2)).result()
            assert not robust_dcp.finish_async_saves(timeout_seconds=0.1) and (tmp_path / "step_1").exists()
            gate.opened.set()
            assert robust_dcp.finish_async_saves() and not (tmp_path / "step_1").exists()

    def test_a_failed_async_save_removes_nothing(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, keep_last=1)
        save_steps(manager, 1)
        with FaultDisk(tmp_path, on={"rename:step_2/.metadata": REFUSED}), pytest.raises(StorageError, match="EACCES"):
            manager.async_save(2, state(2)).result()
        robust_dcp.finish_async_saves()
        assert [each.step for each in manager.checkpoints()] == [1]


def save_and_be_killed(root: str) -> None:
    with kill_in("commit", rank=0):
        CheckpointManager(root).save(1, state(1))


class TestCrashedSaves:
    def test_what_is_ours_is_removed(self, tmp_path: Path) -> None:
        run_ranks(1, save_and_be_killed, str(tmp_path))
        assert not (tmp_path / "step_1/.metadata").exists() and data_files(tmp_path / "step_1")
        (tmp_path / "step_1/notes.txt").write_text("mine")
        assert save_steps(CheckpointManager(tmp_path, keep_last=1), 6) == [6]
        assert os.listdir(tmp_path / "step_1") == ["notes.txt"]

    def test_a_manager_that_sweeps_gives_way_to_a_save_that_begins(self, tmp_path: Path) -> None:
        """It looks into the directory of the step because of what a crashed save has left there."""
        step = tmp_path / "step_1"
        step.mkdir()
        (step / f"{SAVING_PREFIX}{'0' * 16}").touch()
        has_claimed, has_begun = threading.Event(), threading.Event()
        claimed: set[int] = set()

        def meet(call: object) -> None:
            if threading.get_ident() not in claimed:
                return
            if threading.current_thread() is threading.main_thread():
                threading.Timer(0.05, has_begun.set).start()
            else:
                has_claimed.set()
                has_begun.wait(20)

        on: dict[str, Fault] = {"list:step_1": meet}
        on[f"create:step_1/{SAVING_PREFIX}*"] = lambda call: claimed.add(threading.get_ident())
        with ThreadPoolExecutor(1) as thread, FaultDisk(tmp_path, on=on):
            sweeping = thread.submit(CheckpointManager(tmp_path).prune)
            assert has_claimed.wait(20)
            CheckpointManager(tmp_path).save(1, state(1))
            assert sweeping.result() == []
