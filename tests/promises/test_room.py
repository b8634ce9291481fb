"""A disk that is too small for a save: an error on all ranks before the first byte, and the checkpoint before stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from tests.harness.nodes import become_node, can_become_node
from tests.harness.ranks import run_ranks, values

MIB = 1 << 20


class SmallDisk(Disk):
    """Has a given number of bytes, whatever lies there, and notes which data files are made."""

    def __init__(self, free_nbytes: int) -> None:
        super().__init__()
        self.free_nbytes = free_nbytes
        self.made: list[str] = []

    def room(self, path: str) -> tuple[int, int]:
        return super().room(path)[0], self.free_nbytes

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if not os.path.basename(path).startswith("."):
            self.made.append(path)
        return super().open_new(path, direct=direct)


def save_somehow(how: str, path: str, disk: Disk) -> str:
    state = {f"rank {dist.get_rank()}": torch.ones(MIB)}
    try:
        if how == "stock with our plugins":
            dcp.save(state, storage_writer=RobustWriter(path, disk=disk), planner=RobustPlanner())
        elif how == "async":
            robust_dcp.async_save(state, storage_writer=RobustWriter(path, disk=disk)).result(timeout=60)
        else:
            robust_dcp.save(state, storage_writer=RobustWriter(path, layout=how, disk=disk))
    except (StorageError, CheckpointException) as error:  # stock wraps the errors of ranks into its own
        return str(error)
    return "saved"


def save_where_one_rank_would_fit(path: str, how: str) -> list[str]:
    """Each of two ranks needs 4 MiB. First there is room for one of them, then for both, then again for one."""
    found = []
    for free_nbytes in (6 * MIB, 9 * MIB, 6 * MIB):
        disk = SmallDisk(free_nbytes)
        directory = f"{path}/{len(found)}" if how == "safetensors" else path  # it replaces no checkpoint
        found.append(save_somehow(how, directory, disk))
        assert bool(disk.made) is (found[-1] == "saved")
    return found


@pytest.mark.parametrize("how", ["torch", "safetensors", "stock with our plugins", "async"])
def test_nothing_is_written_where_all_ranks_together_have_no_room(how: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    for before, fits, after in values(run_ranks(2, save_where_one_rank_would_fit, str(directory), how)):
        assert fits == "saved"
        for told in (before, after):  # the second plan is reused; what is replaced does not count
            for word in ("no room", f"{6 * MIB} are free", "bytes are needed", "ranks 0-1", "nothing was written"):
                assert word in told
    if how != "safetensors":
        found = {"rank 0": torch.zeros(MIB), "rank 1": torch.zeros(MIB)}
        robust_dcp.load(found, checkpoint_id=directory)
        assert found["rank 0"].all() and found["rank 1"].all()


def save_on_nodes(path: str, nodes: str) -> str:
    """Each rank is on a node that has a directory of its own under the same path."""
    rank = int(os.environ["RANK"])
    become_node(f"host-{rank}", path, Path(nodes, str(rank)))
    dist.init_process_group("gloo")
    writer = RobustWriter(path, disk=SmallDisk(5 * MIB))
    try:
        robust_dcp.save({f"rank {rank}": torch.ones(MIB)}, storage_writer=writer)
    except StorageError as error:
        return str(error)
    return "saved"


@pytest.mark.skipif(not can_become_node(), reason="no process can see a directory of its own under one path here")
def test_each_node_needs_room_for_its_own_ranks_only(tmp_path: Path) -> None:
    for place in ("checkpoint", "nodes/0", "nodes/1"):
        (tmp_path / place).mkdir(parents=True)
    run = run_ranks(2, save_on_nodes, str(tmp_path / "checkpoint"), str(tmp_path / "nodes"), init=False)
    assert values(run) == ["saved", "saved"]


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True)
    if made.returncode:
        pytest.skip(f"this process may not mount a file system: {made.stderr.decode().strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def save_to_small_mount(one: str) -> list[str]:
    told = []
    robust_dcp.save({"w": torch.ones(MIB)}, checkpoint_id=f"{one}/c")
    try:  # 4 of 8 MiB are those of the checkpoint before
        robust_dcp.save({"w": torch.ones(MIB) * 2, "more": torch.ones(MIB // 4)}, checkpoint_id=f"{one}/c")
    except StorageError as error:
        told.append(f"{error.errno} {error}")
    found = {"w": torch.zeros(MIB)}
    robust_dcp.load(found, checkpoint_id=f"{one}/c")
    assert found["w"].eq(1).all()
    return told


def test_a_relative_path_that_nobody_has_made_has_the_room_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Disk().room("checkpoint")[0] == Disk().room(str(tmp_path))[0]


def test_a_real_file_system_is_asked(small_mount: Path) -> None:
    ((replaced,),) = values(run_ranks(1, save_to_small_mount, str(small_mount)))
    assert replaced.startswith("28 ") and f"{small_mount}/c has no room" in replaced
