"""Saves meet what others have put there: nobody's files are lost, and everybody is told the truth."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustPlanner, RobustReader, RobustWriter, StorageError
from robust_dcp.storage.committing.saving_file import is_gone
from robust_dcp.storage.files.disk import Disk
from tests.faults.disk import CHANGES, Fault, FaultDisk, each_call
from tests.harness.damage import data_files
from tests.harness.fingerprints import blank, differences, wrongly_loaded
from tests.harness.ranks import on_ranks, run_ranks, values
from tests.harness.torch_versions import needs_use_collectives
from tests.harness.verdicts import Verdict, verdict_of

StateDict = dict[str, Any]
N = 300_000
LOOK_ALIKES = [
    "optimizer__0_0.distcp",
    "__7_0.distcp",
    "__0_0.3.distcp",
    "shard-00001-model-00001-of-00002.safetensors.3.part",
    ".metadata.tmp",
    ".metadata.0123456789abcdef.tmp",
    "__0.metadata.tmp",
    ".robust_dcp.index.0123456789abcdef.tmp",
    "notes.txt",
]


def state(step: int, rank: int = 0) -> StateDict:
    return {f"w{rank}": torch.full((N,), float(step)), f"v{rank}": torch.full((5,), float(step)), f"o{rank}": step}


def step_in(directory: Any, rank: int = 0, **options: Any) -> int:
    found = state(-1, rank)
    robust_dcp.load(found, checkpoint_id=directory, **options)
    (step,) = {int(found[f"o{rank}"]), *found[f"w{rank}"].unique().tolist(), *found[f"v{rank}"].unique().tolist()}
    return int(step)


def check(directory: Any, step: int) -> None:
    assert wrongly_loaded(state(step), directory, no_dist=True) == []


def contents(directory: Path, names: list[str]) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in names}


def in_the_way(directory: Any) -> list[str]:
    return [name for name in os.listdir(directory) if ".saving." in name or name.endswith(".tmp")]


def leave_after_kills(root: str, layout: str) -> list[str]:
    """Directories that killed saves have left; in a process of one thread, which may fork."""

    def act(directory: str) -> None:
        robust_dcp.save(state(1), storage_writer=RobustWriter(directory, layout=layout), no_dist=True)

    return [path for _, _, path, _ in each_call(act, root, None, prepare=lambda path: None, every=4)]


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_what_a_killed_save_has_left_is_removed_by_the_next_and_files_with_names_like_ours_are_not(
    layout: str, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ((*left,),) = values(run_ranks(1, leave_after_kills, str(memory_path), layout, init=False))
    for path in map(Path, left):
        if (path / ".metadata").exists() and layout == "safetensors":
            continue
        path.mkdir(exist_ok=True)
        for name in LOOK_ALIKES:
            (path / name).write_text(f"what a user keeps in {name}")
        users = contents(path, LOOK_ALIKES)
        caplog.clear()
        robust_dcp.save(state(2), storage_writer=RobustWriter(path, layout=layout))
        assert contents(path, LOOK_ALIKES) == users
        ours = set(os.listdir(path)) - set(LOOK_ALIKES)
        assert len({mark_of(name) for name in ours}) <= 2, ours
        if layout != "safetensors":
            assert "files are kept" in caplog.text and "__7_0.distcp" in caplog.text
            check(path, 2)


def mark_of(name: str) -> str:
    """The mark of the save that made a file."""
    found = re.search(r"[0-9a-f]{16}", name)
    return found[0] if found else ""


def test_a_metadata_that_was_moved_away_or_that_cannot_be_read_costs_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "kept")
    old = contents(tmp_path, [each.name for each in data_files(tmp_path)])
    robust_dcp.save(state(2), checkpoint_id=tmp_path)
    check(tmp_path, 2)
    old |= contents(tmp_path, [each.name for each in data_files(tmp_path)])
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        robust_dcp.save(state(3), checkpoint_id=tmp_path)
    check(tmp_path, 3)
    assert contents(tmp_path, list(old)) == old
    assert "no file that it may name is removed" in caplog.text
    (tmp_path / "kept").replace(tmp_path / ".metadata")
    check(tmp_path, 1)


def save_alone(directory: str, step: int) -> None:
    dcp.save(state(step), checkpoint_id=directory, use_collectives=False)


@needs_use_collectives
def test_a_stock_checkpoint_without_collectives_stays(tmp_path: Path) -> None:
    values(run_ranks(2, save_alone, str(tmp_path), 1))
    before = sorted(os.listdir(tmp_path))
    stock = contents(tmp_path, before)
    assert "__0.metadata" in before and "__1.metadata" in before
    for step in (2, 3):
        robust_dcp.save(state(step), checkpoint_id=tmp_path)
        check(tmp_path, step)
        assert contents(tmp_path, before) == stock


Faults = dict[str, tuple[int, Fault]]


def fail_with(directory: str, faults: Faults, layout: str) -> tuple[Verdict, list[str], list[str]]:
    """Each fault strikes on one rank; where the directory was there before, and where it was not."""
    rank, left, verdict = dist.get_rank(), [], Verdict()
    on = {key: fault for key, (of_rank, fault) in faults.items() if of_rank == rank}
    for place in ("new/parent/checkpoint", "there"):
        path = os.path.join(directory, place)
        with FaultDisk(directory, on=on):
            writer: Any = RobustWriter(path, layout=layout)  # type: ignore[arg-type]
            verdict = verdict_of(robust_dcp.save, {**state(1, rank)}, storage_writer=writer)
        dist.barrier()
        left.append([str(each.relative_to(directory)) for each in Path(directory).rglob("*")])
        dist.barrier()
    robust_dcp.save(state(2, rank), checkpoint_id=f"{directory}/there")
    assert step_in(f"{directory}/there", rank) == 2
    dist.barrier()
    return verdict, left[1], in_the_way(f"{directory}/there")


FULL = OSError(errno.ENOSPC, "")


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize(
    "faults",
    [{"create:.robust_dcp.saving*": (0, FULL)}, {"write:[_s]*": (1, FULL)}, {"write:.metadata.*": (0, FULL)}],
    ids=["saving", "data", "metadata"],
)
def test_a_failed_save_leaves_no_file_and_no_directory_that_was_not_there_before(
    faults: Faults, layout: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    for verdict, left, after in on_ranks(2, fail_with, str(tmp_path), faults, layout):
        assert verdict.type_name == "StorageError" and verdict.fields["errno"] == errno.ENOSPC
        assert (left, after) == (["there"], [])


def test_what_cannot_be_removed_is_named_on_all_ranks_and_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    faults = {"write:__1_1*": (1, OSError(errno.EIO, "")), "unlink:__1_0*": (1, OSError(errno.EACCES, ""))}
    for verdict, left, after in on_ranks(2, fail_with, str(tmp_path), faults, "torch"):
        assert verdict.type_name == "StorageError" and verdict.fields["errno"] == errno.EIO
        (stuck,) = [name for name in left if name.startswith("there/__1_0.")]
        assert f"could not remove: {tmp_path}/{stuck}; the next save" in verdict.message
        assert after == [] and not (tmp_path / stuck).exists()
    with FaultDisk(tmp_path, on={"unlink": OSError(errno.EROFS, "")}):  # which is said of any path
        assert is_gone(Disk().unlink, f"{tmp_path}/never made") and not is_gone(Disk().unlink, f"{tmp_path}/there")


def test_a_directory_in_which_others_have_put_something_stays(tmp_path: Path) -> None:
    def put_a_file(call: object) -> None:
        (tmp_path / "c" / "notes.txt").write_text("a user's")
        raise LookupError

    with FaultDisk(tmp_path, on={"write:c/*.distcp": put_a_file}):
        verdict = verdict_of(robust_dcp.save, state(1), checkpoint_id=tmp_path / "c")
    assert "LookupError" in verdict.message and "could not remove" not in verdict.message
    assert os.listdir(tmp_path / "c") == ["notes.txt"]


def save_where_removing_is_slow(directory: str) -> None:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    robust_dcp.save(state(1, rank), checkpoint_id=directory)
    with FaultDisk(directory, on={"unlink:__*": lambda call: store.wait(["rank 1 has returned"])} if rank == 0 else {}):
        robust_dcp.save(state(2, rank), checkpoint_id=directory, timeout_seconds=30)
        if rank == 1:
            store.set("rank 1 has returned", "")


def test_nobody_waits_for_the_removal_of_what_a_committed_checkpoint_replaces(tmp_path: Path) -> None:
    on_ranks(2, save_where_removing_is_slow, str(tmp_path))
    check(tmp_path, 2)
    assert len({mark_of(each.name) for each in data_files(tmp_path)}) == 1


def test_a_committed_save_has_succeeded_whatever_becomes_of_the_old_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultDisk(tmp_path, on={"unlink:__0_*": OSError(errno.EACCES, "")}):
        for step in (1, 2):
            robust_dcp.save(state(step), checkpoint_id=tmp_path)
    check(tmp_path, 2)
    assert "not removed, which costs space and nothing else" in caplog.text


def stock_saves(directory: str) -> None:
    dcp.save(state(7), checkpoint_id=directory, no_dist=True)


def ours_saves(directory: str) -> None:
    robust_dcp.save(state(7), checkpoint_id=directory, no_dist=True)


def somebody_writes_metadata(directory: str) -> None:
    Path(directory, ".metadata").write_bytes(Path(directory, ".metadata").read_bytes())


def somebody_removes_a_file(directory: str) -> None:
    os.unlink(max(Path(directory).glob("__1_*.distcp"), key=lambda path: path.stat().st_mtime_ns))


def somebody_removes_the_claim(directory: str) -> None:
    (claim,) = Path(directory).glob(".robust_dcp.saving.*")
    claim.unlink()


def save_while(directory: str, meanwhile: Callable[[str], None], exists: bool) -> tuple[Verdict, list[str]]:
    """The file system knows no locks, and something happens right before the coordinator commits, or while the other
    rank writes.
    """
    rank = dist.get_rank()
    if exists:
        robust_dcp.save(state(1, rank), checkpoint_id=directory)
    on: dict[str, Fault] = {"lock": OSError(errno.ENOLCK, "")}
    with ExitStack() as stack:
        if rank == (meanwhile is somebody_removes_the_claim):
            on[("fsync:.metadata.*#2", "write:__1_0*#1")[rank]] = lambda call: (stack.close(), meanwhile(directory))
        stack.enter_context(FaultDisk(directory, on=on))
        verdict = verdict_of(robust_dcp.save, state(2, rank), checkpoint_id=directory, timeout_seconds=20)
    dist.barrier()
    return verdict, in_the_way(directory)


@pytest.mark.parametrize(
    ("meanwhile", "exists"),
    [
        *((each, exists) for each in (stock_saves, ours_saves) for exists in (True, False)),
        (somebody_writes_metadata, True),
        (somebody_removes_a_file, True),
        (somebody_removes_the_claim, True),
    ],
)
def test_a_save_commits_nothing_over_what_others_did_meanwhile(
    tmp_path: Path, meanwhile: Callable[[str], None], exists: bool
) -> None:
    directory = str(tmp_path / "checkpoint")
    for verdict, left in on_ranks(2, save_while, directory, meanwhile, exists):
        assert verdict.type_name == "StorageError" and "nothing is committed" in verdict.message
        assert left == []
    if meanwhile is not somebody_removes_a_file:
        check(directory, 7 if meanwhile in (stock_saves, ours_saves) else 1)


def has_no_locks(*arguments: object) -> None:
    raise OSError(errno.ENOLCK, "")


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("other_saves", [stock_saves, ours_saves])
def test_whatever_call_a_save_stands_still_before_while_another_job_saves_each_is_told_the_truth(
    memory_path: Path, other_saves: Callable[[str], None], locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: dict[int, Verdict] = {}
    if not locks:
        monkeypatch.setattr(fcntl, "flock", has_no_locks)

    def save_meanwhile(number: int) -> Fault:
        directory = str(memory_path / f"call-{number}")
        return lambda call: verdicts.update({number: verdict_of(other_saves, directory)})

    for number, call, directory, raised in each_call(
        lambda directory: robust_dcp.save(state(2), checkpoint_id=directory, no_dist=True),
        memory_path,
        save_meanwhile,
        prepare=lambda directory: robust_dcp.save(state(1), checkpoint_id=directory, no_dist=True),
        counted={*CHANGES, "open", "lock", "read"},
        every=7,
    ):
        saved = {2} if raised is None else set()
        saved |= {7} if verdicts[number].type_name == "" else set()
        assert step_in(directory, no_dist=True) in (saved or {1}), (number, call, raised, verdicts[number])
        assert raised is None or isinstance(raised, robust_dcp.StorageError)


def test_a_directory_that_is_removed_while_a_save_runs_is_what_the_error_says(tmp_path: Path) -> None:
    """Nobody has written into it: a clean-up took it for an old checkpoint."""
    path = tmp_path / "c"

    def remove(call: object) -> None:
        shutil.rmtree(path, ignore_errors=True)

    removed = FaultDisk(tmp_path, on={"stat:c/*.distcp": remove})
    with removed, pytest.raises(StorageError, match="somebody has removed the directory meanwhile") as caught:
        robust_dcp.save({"weight": torch.ones(10)}, checkpoint_id=path)
    assert "another save" not in str(caught.value) and not path.exists()


def test_a_stock_save_that_is_running_keeps_its_files(tmp_path: Path) -> None:
    def save_within(call: object) -> None:
        robust_dcp.save(state(2), checkpoint_id=tmp_path)
        check(tmp_path, 2)

    with FaultDisk(tmp_path, on={"create:.metadata.tmp": save_within}):
        dcp.save(state(1), checkpoint_id=tmp_path, no_dist=True)
    check(tmp_path, 1)  # it was the last to commit


def test_while_a_save_of_ours_is_running_another_one_is_told_who_it_is(tmp_path: Path) -> None:
    refused: list[str] = []

    def save_within(call: object) -> None:
        before = sorted(os.listdir(tmp_path))
        refused.append(verdict_of(robust_dcp.save, state(2), checkpoint_id=tmp_path, no_dist=True).message)
        assert sorted(os.listdir(tmp_path)) == before

    with FaultDisk(tmp_path, on={"write:__0_0*#1": save_within}):
        robust_dcp.save(state(1), checkpoint_id=tmp_path, no_dist=True)
    assert re.search(rf"another save is running into .* \(process {os.getpid()} on", refused[0])
    check(tmp_path, 1)
    robust_dcp.save(state(2), checkpoint_id=tmp_path)
    check(tmp_path, 2)


class SavesUnderTheLoad(RobustReader):
    """While it reads, another job saves into the same directory, so many times."""

    saves = 1
    n_loads = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        store, key = dist.distributed_c10d._get_default_store(), f"saved {self.path} {self.n_loads}"
        if dist.get_rank() == 0:
            if self.n_loads < self.saves:
                everything = state(50 + self.n_loads) | state(50 + self.n_loads, 1)
                robust_dcp.save(everything, checkpoint_id=self.path, no_dist=True)
            store.set(key, "")
        else:
            store.wait([key])
        self.n_loads += 1
        return super().read_data(plan, planner)


def load_while_it_is_overwritten(directory: str, saves: int) -> Verdict:
    rank = dist.get_rank()
    robust_dcp.save(state(1, rank), checkpoint_id=directory)
    reader = SavesUnderTheLoad(directory)
    reader.saves = saves
    verdict = verdict_of(step_in, directory, rank, storage_reader=reader)
    dist.barrier()
    return verdict


def test_a_load_whose_files_are_replaced_starts_over_and_says_so_if_that_happens_again(tmp_path: Path) -> None:
    for verdict in on_ranks(2, load_while_it_is_overwritten, str(tmp_path / "1"), 1):
        assert (verdict.type_name, verdict.value) == ("", 50)
    for verdict in on_ranks(2, load_while_it_is_overwritten, str(tmp_path / "2"), 2):
        assert verdict.type_name == "StorageError" and "was overwritten while it was loaded" in verdict.message


LONG = {f"layer.{number}": torch.full((40,), float(number)) for number in range(60)}
SHORT = {"layer.0": torch.full((4,), 7.0)}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("how", ["ours", "stock with our reader", "metadata"])
def test_a_checkpoint_that_is_replaced_by_a_shorter_one_while_it_is_read_is_never_called_corrupt(
    how: str, has_index: bool, tmp_path: Path
) -> None:
    """The shorter one comes right before each file that a load opens."""

    def load() -> bool:
        if how == "metadata":
            return set(RobustReader(tmp_path).read_metadata().state_dict_metadata) in (set(LONG), set(SHORT))
        found = blank(LONG)
        if how == "ours":
            robust_dcp.load(found, checkpoint_id=tmp_path)
        else:
            dcp.load(found, storage_reader=RobustReader(tmp_path), no_dist=True)
        return differences(LONG, found) == []

    for number in itertools.count(1):
        robust_dcp.save(dict(LONG), checkpoint_id=tmp_path)
        if not has_index:  # as stock leaves it
            (tmp_path / ".robust_dcp.index").unlink()
        replace = mock.Mock(side_effect=lambda call: robust_dcp.save(dict(SHORT), checkpoint_id=tmp_path))
        with FaultDisk(tmp_path, on={f"open:*#{number}": replace}):
            verdict = verdict_of(load)
        assert verdict.value or verdict.type_name in ("StorageError", "PlanConflict", "CheckpointException"), verdict
        assert CorruptCheckpoint.__name__ not in str(verdict), f"replaced at open {number}"
        if not replace.called:
            assert number > 1
            return


def test_a_save_by_stocks_planner_that_has_failed_is_over_though_its_writer_is_kept(tmp_path: Path) -> None:
    failed = RobustWriter(tmp_path)
    with pytest.raises(BaseException, match="cannot pickle"):
        dcp.save({"w": torch.ones(3), "lock": threading.Lock()}, storage_writer=failed, no_dist=True)
    dcp.save({"w": torch.ones(3)}, storage_writer=RobustWriter(tmp_path), no_dist=True)
    assert failed.disk and not list(tmp_path.glob(".robust_dcp.saving*"))


@pytest.mark.parametrize("planner", [RobustPlanner, dcp.DefaultSavePlanner])
def test_each_save_of_stocks_by_one_writer_is_a_save_of_its_own(planner: Any, tmp_path: Path) -> None:
    """Without a ``checkpoint_id`` stock does not tell the writer that another save begins."""
    writer, own_planner = RobustWriter(tmp_path), planner()
    for step in range(3):
        dcp.save({"w": torch.full((9,), float(step))}, storage_writer=writer, planner=own_planner, no_dist=True)
        loaded = {"w": torch.zeros(9)}
        robust_dcp.load(loaded, checkpoint_id=tmp_path)
        assert loaded["w"].unique().tolist() == [float(step)] and len(data_files(tmp_path)) == 1
