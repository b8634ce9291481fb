"""A manager saves steps, keeps those that are wanted, and goes on from the newest one that is whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CheckpointManager, KeepBest, KeepEvery, KeepLast, RobustCheckpointError
from robust_dcp.manager.series import LATEST_NAME, RECORD_NAME
from robust_dcp.storage.committing.saving_file import needed_for_a_load
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.what_is_there import TRACKER_NAME
from tests.harness.damage import cut_short, data_files
from tests.harness.faults import fail_in
from tests.harness.ranks import errors, in_ranks, values


def state(step: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"shared": torch.full((100,), float(step)), f"own {rank}": torch.full((100,), step + rank / 10)}


def save_steps(root: str, steps: list[int], options: dict[str, Any], is_async: bool = False) -> list[int]:
    manager = CheckpointManager(root, **options)
    for step in steps:
        if is_async:
            manager.async_save(step, state(step), metrics={"loss": abs(step - 25.0)})
        else:
            manager.save(step, state(step), metrics={"loss": abs(step - 25.0)})
    robust_dcp.finish_async_saves()
    if dist.is_initialized():
        dist.barrier()
    return [each.step for each in manager.checkpoints()]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [10, 20, 30, 40, 50]),
        ({"keep_last": 2}, [40, 50]),
        ({"keep_last": 1, "keep_every": 20}, [20, 40, 50]),
        ({"keep_best": "loss"}, [30, 50]),  # of 20 and 30, which are equally good, the newer one
        ({"keep": [KeepBest("loss", number=2, best="largest"), KeepLast(1)]}, [40, 50]),
    ],
)
def test_what_a_policy_keeps_stays_and_so_does_the_newest(
    options: dict[str, Any], kept: list[int], is_async: bool, tmp_path: Path
) -> None:
    found = values(in_ranks(2, save_steps, str(tmp_path), [10, 20, 30, 40, 50], options, is_async))
    assert found == [kept, kept]


class KeepFirst:
    def kept(self, checkpoints: Any) -> Any:
        return checkpoints[:1]


def test_a_policy_can_be_written_by_oneself(tmp_path: Path) -> None:
    assert save_steps(str(tmp_path), [1, 2, 3], {"keep": [KeepFirst()]}) == [1, 3]


@pytest.mark.parametrize("policy", [lambda: KeepLast(0), lambda: KeepEvery(0), lambda: KeepBest("loss", number=0)])
def test_a_policy_that_keeps_nothing_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        policy()


def test_a_metric_that_is_nan_or_missing_is_never_the_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best="loss")
    for step, metrics in enumerate([{"loss": 2.0}, {"loss": float("nan")}, {}]):
        manager.save(step, state(step), metrics=metrics)
    assert [each.step for each in manager.checkpoints()] == [0, 2]


def test_a_metric_that_is_no_number_costs_no_other(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1), metrics={"loss": float("nan"), "rate": float("inf"), "accuracy": 0.5})
    (checkpoint,) = manager.checkpoints()
    assert checkpoint.metrics == {"accuracy": 0.5} and checkpoint.provenance["world_size"] == 1


class BrokenPolicy:
    def kept(self, checkpoints: Any) -> Any:
        raise KeyError("a mistake in the policy")


def save_with_a_broken_policy(root: str) -> list[int]:
    manager = CheckpointManager(root, keep=[BrokenPolicy()])
    manager.save(1, state(1))
    manager.save(2, state(2))
    return [each.step for each in manager.checkpoints()]


def test_a_policy_that_raises_fails_no_save_and_removes_nothing(tmp_path: Path) -> None:
    assert values(in_ranks(2, save_with_a_broken_policy, str(tmp_path))) == [[1, 2], [1, 2]]


def load_what_is_there(root: str) -> tuple[int, float, list[str]]:
    found = state(-1)
    loaded = CheckpointManager(root).load_latest(found)
    assert loaded is not None
    return loaded.checkpoint.step, found["shared"][0].item(), [each.reason for each in loaded.skipped]


def test_if_the_latest_is_damaged_the_newest_one_that_is_whole_is_loaded_and_the_others_are_named(
    tmp_path: Path,
) -> None:
    values(in_ranks(2, save_steps, str(tmp_path), [10, 20, 30], {}))
    cut_short(data_files(tmp_path / "step_30")[1], 3000)
    (tmp_path / "step_20" / ".metadata").write_bytes(b"nonsense")
    (tmp_path / "step_20" / ".robust_dcp.index").unlink()
    for step, value, reasons in values(in_ranks(2, load_what_is_there, str(tmp_path))):
        assert (step, value) == (10, 10.0)
        assert "__" in reasons[0] and ".metadata" in reasons[1]


def test_if_all_are_damaged_each_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    values(in_ranks(2, save_steps, str(tmp_path), [10, 20], {}))
    for step in (10, 20):
        for path in data_files(tmp_path / f"step_{step}"):
            path.unlink()
    for error in errors(in_ranks(2, load_what_is_there, str(tmp_path))):
        assert error.type_name == "CorruptCheckpoint"
        assert "none of the 2 checkpoints" in error.message
        assert "step_10" in error.message and "step_20" in error.message


def test_a_checkpoint_that_does_not_fit_is_no_damaged_one(tmp_path: Path) -> None:
    save_steps(str(tmp_path), [10, 20], {})
    with pytest.raises(RobustCheckpointError, match="another key"):
        CheckpointManager(tmp_path).load_latest({"another key": torch.zeros(2)})


def test_where_there_is_no_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "none").load_latest(state(0)) is None
    assert CheckpointManager(tmp_path / "none").latest() is None


def fail_to_save(root: str) -> str:
    manager = CheckpointManager(root, keep_last=1)
    manager.save(1, state(1))
    try:
        with fail_in("write", rank=1):
            manager.save(2, state(2))
    except RobustCheckpointError as error:
        return f"{error} {[each.step for each in manager.checkpoints()]} {manager.latest().step}"  # type: ignore[union-attr]
    return "nothing was raised"


def test_a_save_that_fails_moves_nothing_and_removes_nothing(tmp_path: Path) -> None:
    for told in values(in_ranks(2, fail_to_save, str(tmp_path))):
        assert "rank 1 fails" in told and told.endswith("[1] 1")


def fail_to_move_latest(root: str) -> str:
    manager = CheckpointManager(root)
    manager.save(1, state(1))
    if dist.get_rank() == 0:
        (Path(root) / LATEST_NAME).unlink()
        (Path(root) / LATEST_NAME).mkdir()
        (Path(root) / LATEST_NAME / "in the way").touch()
    try:
        manager.save(2, state(2))
    except RobustCheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_if_latest_cannot_move_all_ranks_are_told(tmp_path: Path) -> None:
    for told in values(in_ranks(2, fail_to_move_latest, str(tmp_path))):
        assert "is committed" in told and "latest" in told


def test_checkpoints_of_stock_and_megatron_are_found_and_their_tracker_is_kept_up(tmp_path: Path) -> None:
    for name, step in (("iter_0000100", 100), ("iter_0000200", 200)):
        dcp.save(state(step), checkpoint_id=tmp_path / name, no_dist=True)
    (tmp_path / TRACKER_NAME).write_text("100")
    (tmp_path / "logs").mkdir()
    (tmp_path / "iter_0000300").mkdir()  # never committed
    manager = CheckpointManager(tmp_path, name="iter_{step:07d}")
    assert [each.name for each in manager.checkpoints()] == ["iter_0000100", "iter_0000200"]
    assert manager.latest().step == 100  # type: ignore[union-attr]
    found = state(-1)
    loaded = manager.load_latest(found)
    assert loaded is not None and loaded.checkpoint.step == 100 and found["shared"][0] == 100
    manager.save(400, state(400))
    assert (tmp_path / TRACKER_NAME).read_text() == "400"
    assert manager.latest().step == 400  # type: ignore[union-attr]


def test_a_checkpoint_says_with_what_it_was_made(tmp_path: Path) -> None:
    repository = tmp_path / "code"
    repository.mkdir()
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
        subprocess.run(["git", "-C", repository, *identity, *command], check=True)
    program = repository / "train.py"
    program.write_text(
        "import torch, robust_dcp\n"
        "manager = robust_dcp.CheckpointManager('runs', config={'lr': 0.1, 'layers': [1, 2]})\n"
        "manager.save(7, {'w': torch.ones(2)}, metrics={'loss': 2.5})\n"
    )
    subprocess.run([sys.executable, program], check=True, cwd=tmp_path)
    (checkpoint,) = CheckpointManager(tmp_path / "runs").checkpoints()
    head = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert checkpoint.metrics == {"loss": 2.5}
    assert checkpoint.provenance["git"] == {"commit": head.stdout.strip(), "is_changed": False}
    assert checkpoint.provenance["world_size"] == 1
    assert len(checkpoint.provenance["config_digest"]) == 64
    assert checkpoint.provenance["torch"] == torch.__version__


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"step": "x"}',
        b'{"metrics": {"loss": "low"}}',
        b"[1]",
        b'{"step": 1, "metrics": {"\xff": 1}}',
        b" " * (2 << 20),
    ],
)
def test_a_record_that_cannot_be_understood_is_no_reason_to_lose_a_checkpoint(content: bytes, tmp_path: Path) -> None:
    save_steps(str(tmp_path), [10], {})
    (tmp_path / "step_10" / RECORD_NAME).write_bytes(content)
    (checkpoint,) = CheckpointManager(tmp_path).checkpoints()
    assert checkpoint.step == 10 and checkpoint.metrics == {}


def test_a_latest_that_is_no_name_is_not_followed(tmp_path: Path) -> None:
    save_steps(str(tmp_path), [10, 20], {})
    (tmp_path / LATEST_NAME).write_bytes(b"x" * 5000)
    assert CheckpointManager(tmp_path).latest().step == 20  # type: ignore[union-attr]


def test_a_checkpoint_that_is_being_loaded_is_not_removed_until_later(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1))
    with needed_for_a_load(Disk(), str(tmp_path / "step_1")):
        manager.save(2, state(2))
        assert [each.step for each in manager.checkpoints()] == [1, 2]
    assert manager.prune() == [str(tmp_path / "step_1")]


class SlowToLoad:
    """A ``Stateful`` that looks what its load holds while it is loaded."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self.value = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.manager.save(2, state(2))


def test_a_load_holds_the_checkpoint_that_it_reads(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    robust_dcp.save({"slow": {"value": torch.ones(3)}}, checkpoint_id=manager.path_of(1))
    robust_dcp.load({"slow": SlowToLoad(manager)}, checkpoint_id=manager.path_of(1))
    assert [each.step for each in manager.checkpoints()] == [1, 2]


def save_and_be_killed(root: str) -> None:
    from tests.harness.faults import kill_in

    with kill_in("commit", rank=0):
        CheckpointManager(root).save(5, state(5))


def test_what_a_crashed_save_has_left_is_removed_but_for_files_that_are_not_ours(tmp_path: Path) -> None:
    in_ranks(1, save_and_be_killed, str(tmp_path))
    in_ranks(1, save_and_be_killed, str(tmp_path / "other"))
    (tmp_path / "other" / "step_5" / "notes.txt").write_text("mine")
    assert data_files(tmp_path / "step_5")
    CheckpointManager(tmp_path, keep_last=1).save(6, state(6))
    assert sorted(os.listdir(tmp_path)) == ["latest", "other", "step_6"]
    CheckpointManager(tmp_path / "other", keep_last=1).save(6, state(6))
    assert os.listdir(tmp_path / "other" / "step_5") == ["notes.txt"]


def save_with_two_managers(root: str) -> list[int]:
    """Both ranks are jobs of their own that save other steps below one root, and remove at the same time."""
    first = dist.get_rank()
    manager = CheckpointManager(root, keep_last=2, process_group=None)
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group()
    for step in range(first, 20, 2):
        manager.save(step, {"w": torch.full((1000,), float(step))})
    return [each.step for each in manager.checkpoints()]


def test_two_managers_on_one_root_lose_nothing_that_both_keep(tmp_path: Path) -> None:
    values(in_ranks(2, save_with_two_managers, str(tmp_path)))
    manager = CheckpointManager(tmp_path, keep_last=2)
    assert [each.step for each in manager.checkpoints()][-2:] == [18, 19]
    found = {"w": torch.zeros(1000)}
    loaded = manager.load_latest(found)
    assert loaded is not None and found["w"][0] == loaded.checkpoint.step and loaded.skipped == ()


class MeetingDisk(Disk):
    """Lets the renames that begin two removals happen at once."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def list_directory(self, path: str) -> list[str]:
        names = super().list_directory(path)
        if ".removing." in path:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.both.wait(timeout=1)
        return names


def test_two_removals_of_one_checkpoint_do_not_disturb_each_other(tmp_path: Path) -> None:
    save_steps(str(tmp_path), [1, 2], {})
    (tmp_path / "step_1").rename(tmp_path / ".robust_dcp.removing.step_1")  # as a removal that was cut off leaves it
    disk = MeetingDisk()
    managers = [CheckpointManager(tmp_path, keep_last=1, disk=disk) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert [removing.result() for removing in [threads.submit(each.prune) for each in managers]] == [[], []]
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", LATEST_NAME}


def test_one_manager_may_prune_while_its_async_saves_do(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in range(8):
        manager.async_save(step, state(step))
        manager.prune()
    robust_dcp.finish_async_saves()
    assert {path.name for path in tmp_path.iterdir()} == {"step_7", LATEST_NAME}


class SlowRemoval(Disk):
    """Removes nothing before somebody waits for the end of all saves."""

    def __init__(self) -> None:
        self.waited = threading.Event()

    def rename(self, source: str, target: str) -> None:
        if ".removing." in target:
            assert self.waited.wait(60)
        super().rename(source, target)


def test_whoever_waits_for_all_saves_waits_for_the_removals_too(tmp_path: Path) -> None:
    disk = SlowRemoval()
    manager = CheckpointManager(tmp_path, keep_last=1, disk=disk)
    manager.save(1, state(1))
    manager.async_save(2, state(2)).result()
    assert not robust_dcp.finish_async_saves(timeout_seconds=0.1) and (tmp_path / "step_1").exists()
    disk.waited.set()
    assert robust_dcp.finish_async_saves() and not (tmp_path / "step_1").exists()
