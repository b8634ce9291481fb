"""Files spread over several mounts are found through links, and go with the checkpoint that they belong to."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustWriter, StorageError
from robust_dcp.storage.committing.saving_file import remove_target
from robust_dcp.storage.files.disk import Disk
from tests.support.simulated_disk import WatchedDisk

StateDict = dict[str, Any]


def state_dict_of(fill: float) -> StateDict:
    return {**{f"w{n}": torch.full((1000,), fill + n) for n in range(8)}, "step": int(fill)}


def save(directory: Path, fill: float, stripes: list[Path], **options: Any) -> None:
    writer = RobustWriter(directory, stripe_paths=stripes, files_per_rank=3, **options)
    robust_dcp.save(state_dict_of(fill), storage_writer=writer)


def check_loads(directory: Path, fill: float) -> None:
    for load in (dcp.load, robust_dcp.load):
        target = state_dict_of(-1)
        load(target, checkpoint_id=directory)
        assert all(torch.equal(target[f"w{n}"], torch.full((1000,), fill + n)) for n in range(8))
        assert target["step"] == int(fill)


def files_below(path: Path) -> set[str]:
    return {name for _, _, names in os.walk(path) for name in names}


@pytest.fixture
def stripes(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for path in paths:
        path.mkdir()
    return paths


def test_files_lie_on_all_stripes_and_links_lead_to_them(tmp_path: Path, stripes: list[Path]) -> None:
    directory = tmp_path / "checkpoint"
    save(directory, 1, stripes)
    names = {name for name in os.listdir(directory) if name.endswith(".distcp")}
    assert len(names) == 4
    assert all((directory / name).is_symlink() for name in names)
    on_stripes = [files_below(path) for path in stripes]
    assert set.union(*on_stripes) == names
    assert [len(one) for one in on_stripes] == [2, 2]
    check_loads(directory, 1)


def test_the_next_commit_removes_files_and_links_of_the_last(tmp_path: Path, stripes: list[Path]) -> None:
    directory = tmp_path / "checkpoint"
    save(directory, 1, stripes)
    save(directory, 2, stripes)
    check_loads(directory, 2)
    left = {name for name in os.listdir(directory) if name.endswith(".distcp")}
    assert set.union(*[files_below(path) for path in stripes]) == left
    assert all(name.count(".") == 2 for name in left)
    save(directory, 3, [])
    check_loads(directory, 3)
    assert set.union(*[files_below(path) for path in stripes]) == set()


def test_a_copy_of_the_links_does_not_own_their_targets(tmp_path: Path, stripes: list[Path]) -> None:
    save(tmp_path / "checkpoint", 1, stripes)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy", symlinks=True)
    save(tmp_path / "copy", 2, [])
    check_loads(tmp_path / "copy", 2)
    check_loads(tmp_path / "checkpoint", 1)


def test_whichever_call_before_the_commit_fails_the_old_checkpoint_loads_and_nothing_stays(
    tmp_path: Path, stripes: list[Path]
) -> None:
    directory = tmp_path / "checkpoint"
    save(directory, 1, stripes)
    before = {path: files_below(path) for path in (directory, *stripes)}
    number = 0
    while True:
        disk = WatchedDisk(Disk(), fail_at=number)
        with contextlib.suppress(StorageError):
            save(directory, 2, stripes, disk=disk, threads=1)
            if disk.operations[number] == "lock":  # a save goes on without one
                check_loads(directory, 2)
                save(directory, 1, stripes)
                before = {path: files_below(path) for path in (directory, *stripes)}
                number += 1
                continue
        if any(path.endswith(".tmp") for _, path in disk.calls[: number + 1]):  # then it was the commit that failed
            break
        check_loads(directory, 1)
        left = {path: files_below(path) for path in before}
        assert left == before, disk.calls[number]
        number += 1
    assert number > 20


def test_only_links_to_data_files_of_this_checkpoint_are_followed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for name in ("__0_0.distcp", "precious"):
        (tmp_path / name).write_bytes(b"precious")
        (tmp_path / "checkpoint" / name).symlink_to(tmp_path / name)
    for name in ("__0_0.distcp", "precious", "__0_1.distcp"):
        remove_target(Disk(), str(tmp_path / "checkpoint"), name)
    assert files_below(tmp_path) == {"__0_0.distcp", "precious"}
