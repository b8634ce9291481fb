"""Drains: what was saved to a local directory is copied to durable storage beside training."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import robust_dcp
from robust_dcp import CheckpointManager, CopyOptions, RobustWriter, StorageError, nearest_copy
from robust_dcp.contents.read import read_contents
from robust_dcp.drain.record import (
    DrainRecord,
    awaited_copy,
    is_awaited,
    note_arrival,
    read_drain_record,
    write_drain_record,
)
from robust_dcp.storage.files.being_loaded import needed_for_a_load, not_being_loaded
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.api import on_nodes
from tests.harness.nodes import can_become_node
from tests.harness.ranks import errors, run_ranks, values

StateDict = dict[str, Any]


def state_dict(value: float, rank: int = 0) -> StateDict:
    return {"all": torch.full((100,), value), f"of_{rank}": torch.full((5000,), value)}


def loaded(place: str, rank: int = 0) -> float:
    found = state_dict(-1.0, rank)
    robust_dcp.load(found, checkpoint_id=place)
    (value,) = torch.cat(list(found.values())).unique().tolist()
    return float(value)


def _save_and_drain(path: str, target: str) -> list[float]:
    rank = dist.get_rank()
    for value in (1.0, 2.0):
        robust_dcp.save(state_dict(value, rank), storage_writer=RobustWriter(path, drain_to=target))
    writer = RobustWriter(f"{path}_async", drain_to=f"{target}_async")
    robust_dcp.async_save(state_dict(3.0, rank), storage_writer=writer)
    robust_dcp.finish_async_saves()
    return [loaded(target, rank), loaded(f"{target}_async", rank), loaded(path, rank)]


def test_each_save_of_all_ranks_arrives_beside_training(tmp_path: Path) -> None:
    path, target = str(tmp_path / "local"), f"file://{tmp_path}/durable"
    assert values(run_ranks(3, _save_and_drain, path, target)) == [[2.0, 3.0, 2.0]] * 3
    names = {name for name in os.listdir(path) if not name.startswith(".robust_dcp")}
    assert names == {name for name in os.listdir(tmp_path / "durable") if not name.startswith(".robust_dcp")}
    record = read_drain_record(PosixDisk(), path)
    assert record is not None and record.is_complete and record.target == target


def test_a_drain_that_failed_is_told_by_the_next_save_and_the_local_copy_stays(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no directory")
    path, target = str(tmp_path / "local"), str(tmp_path / "taken/durable")
    for error in errors(run_ranks(2, _fail_until_told, path, target)):
        assert error.type_name == "StorageError" and "taken" in error.message
    assert loaded(path) == 1.0
    (tmp_path / "taken").unlink()
    robust_dcp.copy_checkpoint(path, target)
    assert loaded(target) == 1.0


def _fail_until_told(path: str, target: str) -> None:
    rank = dist.get_rank()
    robust_dcp.save(state_dict(1.0, rank), storage_writer=RobustWriter(path, drain_to=target))
    for number in range(1000):  # the drain fails at some time after the save, and the save after that says so
        robust_dcp.save(state_dict(2.0, rank), checkpoint_id=f"{path}_{number}")


def test_a_drain_that_failed_is_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no directory")
    writer = RobustWriter(tmp_path / "local", drain_to=tmp_path / "taken/durable")
    robust_dcp.save(state_dict(1.0), storage_writer=writer)
    with pytest.raises(StorageError, match="taken"):
        robust_dcp.finish_async_saves()


def test_a_checkpoint_is_drained_although_on_commit_has_raised(tmp_path: Path) -> None:
    def name_as_latest() -> None:
        raise StorageError("the link to the latest checkpoint cannot be made")

    writer = RobustWriter(tmp_path / "local", drain_to=tmp_path / "durable")
    with pytest.raises(StorageError, match="is committed, but the link"):
        robust_dcp.save(state_dict(1.0), storage_writer=writer, on_commit=name_as_latest)
    robust_dcp.finish_async_saves()
    assert loaded(str(tmp_path / "durable")) == 1.0


class _RemovesSource(PosixDisk):
    """When the first file is made at the target, the local checkpoint is removed."""

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        target, found, _ = path.partition("/durable/__")
        if found:
            shutil.rmtree(f"{target}/local", ignore_errors=True)
        return super().open_new(path, direct=direct)


def test_a_drain_whose_local_checkpoint_was_removed_has_failed(tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path / "local", drain_to=tmp_path / "durable", disk=_RemovesSource())
    robust_dcp.save(state_dict(1.0), storage_writer=writer)
    with pytest.raises(StorageError, match="local was removed while it was copied"):
        robust_dcp.finish_async_saves()


class _HangsOnce(PosixDisk):
    """On rank 1, the first call that makes a file at the target does not return."""

    has_hung = False

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if "/durable/" in path and dist.get_rank() == 1 and not self.has_hung:
            self.has_hung = True
            threading.Event().wait(60)
        return super().open_new(path, direct=direct)


def _drain_with_a_call_that_hangs(path: str, target: str) -> bool:
    rank, disk = dist.get_rank(), _HangsOnce()
    options = CopyOptions(call_timeout_seconds=3)
    writer = RobustWriter(path, drain_to=target, drain_options=options, disk=disk)
    robust_dcp.save(state_dict(1.0, rank), storage_writer=writer, timeout_seconds=1)
    robust_dcp.finish_async_saves()
    assert loaded(target, rank) == 1.0
    return disk.has_hung


def test_a_call_that_hangs_is_repeated_although_the_rank_is_silent_meanwhile(tmp_path: Path) -> None:
    found = values(run_ranks(2, _drain_with_a_call_that_hangs, str(tmp_path / "local"), str(tmp_path / "durable")))
    assert found == [False, True]


def test_stock_save_refuses_a_writer_that_drains(tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path / "local", drain_to=tmp_path / "durable")
    with pytest.raises(CheckpointException, match=r"drain_to=…\) needs robust_dcp\.save"):
        dcp.save(state_dict(1.0), storage_writer=writer, no_dist=True)


def test_a_manager_keeps_what_has_not_arrived_and_goes_on_with_it(tmp_path: Path) -> None:
    root, durable = tmp_path / "local", tmp_path / "durable"
    durable.write_text("no directory yet")
    manager = CheckpointManager(root, keep_last=1, drain_to=durable)
    manager.save(1, state_dict(1.0))
    with pytest.raises(StorageError, match="durable"):
        robust_dcp.finish_async_saves()
    manager.policies.clear()
    durable.unlink()
    manager = CheckpointManager(root, keep_last=1, drain_to=f"file://{durable}")
    manager.save(2, state_dict(2.0))
    robust_dcp.finish_async_saves()
    assert (loaded(f"{durable}/step_1"), loaded(f"{durable}/step_2")) == (1.0, 2.0)
    manager.prune()
    assert [each.step for each in manager.checkpoints()] == [2]


def test_a_copy_that_somebody_works_on_is_not_begun_a_second_time(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "root").save(1, state_dict(1.0))
    local, durable = tmp_path / "root/step_1", tmp_path / "durable"
    save_id = read_contents(PosixDisk(), str(local)).save_id or ""
    write_drain_record(PosixDisk(), str(local), DrainRecord(str(durable / "step_1"), save_id, is_complete=False))
    manager = CheckpointManager(tmp_path / "root", drain_to=durable)
    with needed_for_a_load(PosixDisk(), str(local)):  # a drain holds it as a load does
        manager.save(2, state_dict(2.0))
        robust_dcp.finish_async_saves()
    assert sorted(os.listdir(durable)) == ["step_2"]
    manager.save(3, state_dict(3.0))
    robust_dcp.finish_async_saves()
    assert sorted(os.listdir(durable)) == ["step_1", "step_2", "step_3"]


def _drain_steps(root: str, durable: str) -> list[float]:
    rank = dist.get_rank()
    manager = CheckpointManager(root, keep_last=1, drain_to=durable)
    for step in (1, 2):
        manager.save(step, state_dict(float(step), rank))
    robust_dcp.finish_async_saves()
    return [loaded(f"{durable}/step_{step}", rank) for step in (1, 2)]


def test_the_ranks_of_a_manager_drain_each_step_together(tmp_path: Path) -> None:
    root, durable = str(tmp_path / "root"), str(tmp_path / "durable")
    assert values(run_ranks(2, _drain_steps, root, durable)) == [[1.0, 2.0]] * 2


def test_a_manager_does_not_remove_a_checkpoint_whose_drain_has_failed(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no directory")
    manager = CheckpointManager(tmp_path / "local", keep_last=1, drain_to=tmp_path / "taken/durable")
    for step in (1, 2, 3):
        manager.save(step, state_dict(float(step)))
        with pytest.raises(StorageError, match="taken"):
            robust_dcp.finish_async_saves()
    manager.prune()
    assert [each.step for each in manager.checkpoints()] == [1, 2, 3]


def test_a_copy_that_a_later_save_has_made_needless_keeps_nothing_from_being_removed(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no directory")
    root = tmp_path / "local"
    robust_dcp.save(state_dict(1.0), storage_writer=RobustWriter(root / "step_1", drain_to=tmp_path / "taken/durable"))
    with pytest.raises(StorageError, match="taken"):
        robust_dcp.finish_async_saves()
    manager = CheckpointManager(root, keep_last=1)
    manager.save(2, state_dict(2.0))
    assert [each.step for each in manager.checkpoints()] == [1, 2]  # step 1 is awaited

    robust_dcp.save(state_dict(1.5), checkpoint_id=root / "step_1")
    manager.save(3, state_dict(3.0))
    assert [each.step for each in manager.checkpoints()] == [3]


@pytest.mark.parametrize("target", ["durable", "./durable/", "file://{path}/durable"])
def test_a_drain_that_somebody_else_has_ended_is_not_awaited_any_more(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("durable").write_text("no directory yet")
    writer = RobustWriter("local/step_1", drain_to="durable")
    robust_dcp.save(state_dict(1.0), storage_writer=writer)
    with pytest.raises(StorageError, match="durable"):
        robust_dcp.finish_async_saves()
    os.remove("durable")
    robust_dcp.copy_checkpoint("local/step_1", "elsewhere")
    assert is_awaited(PosixDisk(), "local/step_1")

    robust_dcp.copy_checkpoint("local/step_1", target.format(path=tmp_path))
    assert not is_awaited(PosixDisk(), "local/step_1")


def test_the_arrival_of_a_copy_is_not_noted_for_the_save_that_came_after_it(tmp_path: Path) -> None:
    earlier, later = (DrainRecord("s3://bucket/run", save_id, is_complete=False) for save_id in ("earlier", "later"))
    (tmp_path / ".metadata").write_bytes(b"later")
    write_drain_record(PosixDisk(), str(tmp_path), later)
    note_arrival(PosixDisk(), str(tmp_path), earlier)
    assert awaited_copy(PosixDisk(), str(tmp_path)) == later
    note_arrival(PosixDisk(), str(tmp_path), later)
    assert awaited_copy(PosixDisk(), str(tmp_path)) is None


@pytest.mark.parametrize("nbytes_before", [0, 1, (1 << 20) - 3, 3 << 20])
@pytest.mark.parametrize("nbytes_after", [0, 1, (1 << 20) - 3, 3 << 20])
def test_the_save_of_a_record_is_found_wherever_it_stands_in_the_metadata(
    nbytes_before: int, nbytes_after: int, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(b"x" * nbytes_before + b"0123-abcd" + b"x" * nbytes_after)
    for save_id, expected in (("0123-abcd", True), ("0123-abce", False), ("0" * (3 << 18), False)):
        write_drain_record(PosixDisk(), str(tmp_path), DrainRecord("elsewhere", save_id, is_complete=False))
        assert is_awaited(PosixDisk(), str(tmp_path)) is expected


def test_a_checkpoint_that_is_copied_cannot_be_removed_meanwhile(tmp_path: Path) -> None:
    robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "local")
    free: list[bool] = []

    def look(done_nbytes: int, total_nbytes: int) -> None:
        with not_being_loaded(PosixDisk(), str(tmp_path / "local")) as is_free:
            free.append(is_free)

    robust_dcp.copy_checkpoint(tmp_path / "local", tmp_path / "durable", progress=look)
    assert free and not any(free)


class TestNearestCopy:
    def test_the_first_whole_one_is_taken(self, tmp_path: Path) -> None:
        near, far = str(tmp_path / "near"), str(tmp_path / "far")
        robust_dcp.save(state_dict(1.0), checkpoint_id=near)
        robust_dcp.copy_checkpoint(near, far)
        assert nearest_copy([near, far]) == near
        os.truncate(tmp_path / "near/__0_1.distcp", 100)
        assert nearest_copy([near, far]) == far
        os.remove(tmp_path / "near/.metadata")
        assert nearest_copy([near, f"file://{far}"]) == f"file://{far}"

    def test_a_directory_that_holds_another_save_is_not_taken(self, tmp_path: Path) -> None:
        near, far = str(tmp_path / "near"), str(tmp_path / "far")
        robust_dcp.save(state_dict(1.0), checkpoint_id=near)
        robust_dcp.save(state_dict(2.0), checkpoint_id=far)
        assert nearest_copy([near, far]) == far

    def test_a_local_save_that_has_not_arrived_yet_is_newer(self, tmp_path: Path) -> None:
        near, far = str(tmp_path / "near"), tmp_path / "far"
        robust_dcp.save(state_dict(1.0), checkpoint_id=far)
        blocked = tmp_path / "taken"
        blocked.write_text("no directory")
        robust_dcp.save(state_dict(2.0), storage_writer=RobustWriter(near, drain_to=blocked / "x"))
        with pytest.raises(StorageError):
            robust_dcp.finish_async_saves()
        assert nearest_copy([near, far]) == near

    def test_without_a_whole_one_the_error_says_what_each_lacks(self, tmp_path: Path) -> None:
        with pytest.raises(
            StorageError, match=r"none of 2 places holds a whole copy(?s:.*)a/\.metadata(?s:.*)b/\.metadata"
        ):
            nearest_copy([tmp_path / "a", tmp_path / "b"])

    def test_a_directory_that_one_rank_lacks_is_taken_by_none(self, tmp_path: Path) -> None:
        robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "far")
        for rank in range(2):
            robust_dcp.copy_checkpoint(tmp_path / "far", tmp_path / f"rank_{rank}/near")
        assert values(run_ranks(2, _nearest, str(tmp_path))) == ["near", "near"]
        os.remove(tmp_path / "rank_1/near/__0_0.distcp")
        assert values(run_ranks(2, _nearest, str(tmp_path))) == [f"{tmp_path}/far"] * 2

    def test_a_url_of_a_directory_that_one_node_lacks_is_not_taken_either(self, tmp_path: Path) -> None:
        if not can_become_node():  # not in a decorator, which would ask in each rank
            pytest.skip("no process can see a directory of its own under one path")
        (tmp_path / "seen").mkdir()
        robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "nodes/a/near")
        robust_dcp.copy_checkpoint(tmp_path / "nodes/a/near", tmp_path / "far")
        found = values(run_ranks(2, _nearest_on_nodes, str(tmp_path), init=False))
        assert found == [f"{tmp_path}/far"] * 2

    def test_one_rank_looks_into_a_directory_that_all_share(self, tmp_path: Path) -> None:
        robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "shared")
        assert values(run_ranks(3, _opened_by_nearest, str(tmp_path / "shared"))) == [True, False, False]


def _opened_by_nearest(place: str) -> bool:
    """Whether this rank opens a file of the checkpoint while it looks for the nearest copy."""
    opened: list[str] = []
    sys.addaudithook(lambda name, arguments: opened.append(str(arguments[0])) if name == "open" else None)
    assert nearest_copy([f"{place}/nothing", place]) == place
    return any(each.startswith(f"{place}/") and "nothing" not in each for each in opened)


def _nearest_on_nodes(root: str) -> str:
    on_nodes.start(f"{root}/seen", f"{root}/nodes", ("a", "b"))
    return nearest_copy([f"file://{root}/seen/near", f"{root}/far"])


def _nearest(root: str) -> str:
    os.chdir(f"{root}/rank_{dist.get_rank()}")  # a path that each rank sees otherwise, as nodes do
    return nearest_copy(["near", f"{root}/far"])


def _save_to_url_without_fsspec_on_rank_1() -> None:
    if dist.get_rank() == 1:
        sys.modules["fsspec"] = sys.modules["fsspec.core"] = None  # type: ignore[assignment]
    robust_dcp.save(state_dict(1.0), checkpoint_id="memory://test_drains/lacks", timeout_seconds=5)


def test_a_package_that_one_node_lacks_is_told_on_all_ranks() -> None:
    found = errors(run_ranks(2, _save_to_url_without_fsspec_on_rank_1))
    assert [error.type_name for error in found] == ["StorageError"] * 2
    for error in found:
        assert [failure.rank for failure in error.rank_failures] == [1]
        assert "pip install 'robust_dcp[remote]'" in error.message
