"""Two saves into one directory, a save under a load, files of another save: everybody is told the truth, and what is
there loads as one checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustPlanner, RobustReader, RobustWriter, StorageError
from robust_dcp.storage.committing.saving_file import SavingFile
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import in_ranks, run_ranks, values

StateDict = dict[str, Any]
N = 300_000


def state(step: int) -> StateDict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"w{rank}": torch.full((N,), float(step)), f"o{rank}": f"step {step}"}


def blank() -> StateDict:
    return {key: torch.zeros(N) if isinstance(value, torch.Tensor) else "" for key, value in state(0).items()}


def step_of(found: StateDict) -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    steps = {int(found[f"o{rank}"].split()[1]), *found[f"w{rank}"].to(torch.int64).unique().tolist()}
    (step,) = steps  # all of one save
    return int(step)


def loaded_step(directory: str, load: Callable[..., Any] = robust_dcp.load) -> int:
    found = blank()
    load(found, checkpoint_id=directory)
    return step_of(found)


class WithoutLocks(PosixDisk):
    """As many network file systems are."""

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        return None


class Paused(RobustWriter):
    """Stands still on the coordinator between the data and the commit, while ``meanwhile`` happens."""

    meanwhile: Callable[[], Any]

    def check_own(self) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.meanwhile()
        super().check_own()


def write_stock(directory: str) -> None:
    """A save by stock of one process, which writes over ``__0_0.distcp``."""
    dcp.save({"w0": torch.full((N,), 7.0), "o0": "step 7"}, checkpoint_id=directory, no_dist=True)


def save_ours_alone(directory: str) -> None:
    robust_dcp.save({"w0": torch.full((N,), 7.0), "o0": "step 7"}, checkpoint_id=directory, no_dist=True)


def touch_metadata(directory: str) -> None:
    Path(directory, ".metadata").write_bytes(Path(directory, ".metadata").read_bytes())


def remove_a_file(directory: str) -> None:
    os.unlink(max(Path(directory).glob("__1_*.distcp"), key=lambda path: path.stat().st_mtime_ns))


MEANWHILE = {
    "stock saves": write_stock,
    "another of ours saves": save_ours_alone,
    "somebody writes .metadata": touch_metadata,
    "somebody removes a data file": remove_a_file,
}


def be_paused(directory: str, what: str, exists: bool) -> tuple[Verdict, list[str], list[str]]:
    if exists:
        robust_dcp.save(state(1), checkpoint_id=directory)
    writer = Paused(directory, disk=WithoutLocks())
    after: list[str] = []

    def meanwhile() -> None:
        MEANWHILE[what](directory)
        after.extend(sorted(os.listdir(directory)))

    writer.meanwhile = meanwhile
    verdict = verdict_of(robust_dcp.save, state(2), storage_writer=writer, timeout_seconds=20)
    dist.barrier()
    return verdict, after, sorted(os.listdir(directory))


@pytest.mark.parametrize(
    ("what", "exists"),
    [(what, exists) for what in MEANWHILE for exists in (True, False) if exists or not what.startswith("somebody")],
)
def test_a_save_that_was_paused_commits_nothing_over_what_others_did_meanwhile(
    tmp_path: Path, what: str, exists: bool
) -> None:
    directory = str(tmp_path / "checkpoint")
    outcomes = values(in_ranks(2, be_paused, directory, what, exists))
    for verdict, _, _ in outcomes:
        assert verdict.type_name == "StorageError" and "nothing is committed" in verdict.message
    left = outcomes[0][2]
    assert not [name for name in left if ".saving." in name or name.endswith(".tmp")]
    if what in ("stock saves", "another of ours saves"):
        found = {"w0": torch.zeros(N), "o0": ""}
        for load in (robust_dcp.load, dcp.load):
            load(found, checkpoint_id=directory, no_dist=True)
            assert step_of(found) == 7
    elif exists and what == "somebody writes .metadata":
        assert values(in_ranks(2, loaded_step, directory)) == [1, 1]


def save_twice_at_once(directory: str, locks: bool) -> tuple[list[str], int]:
    """Each rank is a job of its own."""
    disk = PosixDisk() if locks else WithoutLocks()
    rank, verdicts = dist.get_rank(), []
    for round_number in range(6):
        step = 10 * (round_number + 1) + rank
        both = {"w0": torch.full((N,), float(step)), "o0": f"step {step}"}
        dist.barrier()
        writer = RobustWriter(directory, disk=disk)
        verdict = verdict_of(robust_dcp.save, both, storage_writer=writer, no_dist=True)
        verdicts.append(verdict.type_name)
        dist.barrier()
        found = {"w0": torch.zeros(N), "o0": ""}
        robust_dcp.load(found, checkpoint_id=directory, no_dist=True)
        ((step,),) = {tuple({int(found["o0"].split()[1]), *found["w0"].to(torch.int64).unique().tolist()})}
        winner = torch.tensor(step)
        dist.broadcast(winner, src=0)
        assert int(winner) == step
        if verdict.type_name == "" and step // 10 == round_number + 1 and step % 10 != rank:
            verdicts[-1] = "replaced"  # told "saved", and another saved after that
        assert verdict.type_name in {"", "StorageError"}
    return verdicts, step


@pytest.mark.parametrize("locks", [True, False])
def test_of_two_jobs_that_save_at_once_each_is_told_the_truth(tmp_path: Path, locks: bool) -> None:
    one, other = (verdicts for verdicts, _ in values(in_ranks(2, save_twice_at_once, str(tmp_path / "c"), locks)))
    for verdicts in zip(one, other, strict=True):
        assert "" in verdicts  # what is there is what one of them was told that it has saved


class Network(PosixDisk):
    """A file system of several machines."""

    def is_of_this_machine(self, path: str) -> bool:
        return False


@pytest.mark.parametrize("is_of_this_boot", [True, False])
def test_on_a_network_file_system_only_a_holder_on_this_machine_is_believed(
    tmp_path: Path, is_of_this_boot: bool, caplog: pytest.LogCaptureFixture
) -> None:
    held = SavingFile.create(Network(), str(tmp_path), save_id="0123456789abcdef")
    if not is_of_this_boot:
        lock = Path(held.path)
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "boot_id": "another", "host": "elsewhere"}))
    writer = RobustWriter(tmp_path, disk=Network())
    if is_of_this_boot:
        with pytest.raises(StorageError, match="another save is running"):
            robust_dcp.save(state(1), storage_writer=writer, no_dist=True)
    else:
        robust_dcp.save(state(1), storage_writer=writer, no_dist=True)
        assert "on elsewhere" in caplog.text and loaded_step(str(tmp_path)) == 1
    held.release()


def be_killed_holding_the_lock(directory: str) -> None:
    class Dies(RobustWriter):
        def check_own(self) -> None:
            os.kill(os.getpid(), 9)

    robust_dcp.save(state(1), storage_writer=Dies(directory), no_dist=True)


def test_a_lock_goes_with_the_process_that_holds_it(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    run_ranks(1, be_killed_holding_the_lock, directory, init=False)
    assert [name for name in os.listdir(directory) if ".saving." in name]
    robust_dcp.save(state(2), checkpoint_id=directory, no_dist=True)
    assert loaded_step(directory) == 2
    assert not [name for name in os.listdir(directory) if ".saving." in name]


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_a_data_file_of_another_save_of_the_same_structure_is_refused(tmp_path: Path, layout: str) -> None:
    for step in (1, 2):
        writer = RobustWriter(tmp_path / str(step), layout=layout)
        robust_dcp.save(state(step), storage_writer=writer, no_dist=True)
    names, others = (
        sorted(name for name in os.listdir(tmp_path / step) if name.endswith((".distcp", ".safetensors")))
        for step in "12"
    )
    assert len(names) == 2
    for name, other in zip(names, others, strict=True):
        mixed = tmp_path / f"mixed-{name}"
        shutil.copytree(tmp_path / "1", mixed)
        shutil.copy(tmp_path / "2" / other, mixed / name)
        for load in (
            lambda into, path=mixed: robust_dcp.load(into, checkpoint_id=path, no_dist=True),
            lambda into, path=mixed: dcp.load(into, storage_reader=RobustReader(path), no_dist=True),
            lambda into, path=mixed: robust_dcp.load(
                into, storage_reader=RobustReader(path, verify_checksums=False), no_dist=True
            ),
        ):
            with pytest.raises((CorruptCheckpoint, dcp.api.CheckpointException), match="expected the mark of save"):
                load(blank())


class SavesUnderTheLoad(RobustReader):
    """While it reads, another job saves into the same directory."""

    saves = 1

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self.saves and dist.get_rank() == 0:
            self.saves -= 1
            robust_dcp.save(
                {f"w{rank}": torch.full((N,), 50.0 - self.saves) for rank in range(2)}
                | {f"o{rank}": f"step {50 - self.saves}" for rank in range(2)},
                checkpoint_id=self.path,
                no_dist=True,
            )
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set(f"saved {self.load_id_of_test}", "")
        else:
            store.wait([f"saved {self.load_id_of_test}"])
        self.load_id_of_test += 1
        return super().read_data(plan, planner)

    load_id_of_test = 0


def load_while_it_is_overwritten(directory: str, saves: int) -> tuple[Verdict, int | None]:
    robust_dcp.save(state(1), checkpoint_id=directory)
    reader = SavesUnderTheLoad(directory)
    reader.saves = saves
    found = blank()
    verdict = verdict_of(robust_dcp.load, found, storage_reader=reader, timeout_seconds=30)
    dist.barrier()
    return verdict, None if verdict.type_name else step_of(found)


def test_a_load_whose_files_are_replaced_starts_over_and_gets_the_new_ones(tmp_path: Path) -> None:
    for verdict, step in values(in_ranks(2, load_while_it_is_overwritten, str(tmp_path / "c"), 1)):
        assert (verdict.type_name, step) == ("", 50)


def test_a_load_that_is_overwritten_again_and_again_says_so(tmp_path: Path) -> None:
    for verdict, _ in values(in_ranks(2, load_while_it_is_overwritten, str(tmp_path / "c"), 2)):
        assert verdict.type_name == "StorageError" and "was overwritten while it was loaded" in verdict.message


def test_through_stock_a_load_whose_files_are_replaced_says_so(tmp_path: Path) -> None:
    robust_dcp.save(state(1), checkpoint_id=tmp_path, no_dist=True)

    class Late(RobustReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            robust_dcp.save(state(2), checkpoint_id=tmp_path, no_dist=True)
            return super().read_data(plan, planner)

    with pytest.raises(dcp.api.CheckpointException, match="was overwritten while it was loaded"):
        dcp.load(blank(), storage_reader=Late(tmp_path), no_dist=True)


def test_a_second_save_of_one_process_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    class SavesWithin(RobustPlanner):
        def describe(self, *args: Any, **kwargs: Any) -> Any:
            with pytest.raises(StorageError, match=f"another save is running into .*process {os.getpid()} on"):
                robust_dcp.save(state(2), checkpoint_id=tmp_path, no_dist=True)
            return super().describe(*args, **kwargs)

    robust_dcp.save(state(1), checkpoint_id=tmp_path, planner=SavesWithin(), no_dist=True)
    assert loaded_step(str(tmp_path)) == 1
