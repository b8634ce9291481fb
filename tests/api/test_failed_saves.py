"""A failed save removes what it has made, its directories too; what it cannot remove is named in the error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.api.test_failures import Broken, BrokenPlanner, shards
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import in_ranks, values


def fail_in_each_way(directory: str) -> dict[str, tuple[str, list[str]]]:
    """What became of each save, and what lies in ``directory`` then; where it was made beforehand, too."""
    found = {}

    def attempt(case: str, save: Any) -> None:
        for place in ("new/parent/checkpoint", "there"):
            path = os.path.join(directory, place)
            if place == "there" and dist.get_rank() == 0:
                os.makedirs(path)
            dist.barrier()
            verdict = verdict_of(save, path)
            dist.barrier()
            left = [os.path.relpath(os.path.join(d, n), directory) for d, ds, fs in os.walk(directory) for n in ds + fs]
            dist.barrier()
            if place == "there" and dist.get_rank() == 0 and os.path.isdir(path):
                os.rmdir(path)
            dist.barrier()
            found[f"{case}, {place}"] = (verdict.type_name, left)

    class Full(PosixDisk):
        def __init__(self, what: str) -> None:
            self.what = what if dist.get_rank() == (0 if what.startswith(".") else 1) else "nothing"

        def pwrite(self, file: Any, data: Any, offset: int) -> None:
            if self.what in os.path.basename(file.path):
                raise storage_error("write", file.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            super().pwrite(file, data, offset)

    for rank in (0, 1):
        attempt(f"planning on rank {rank}", lambda path, r=rank: robust_dcp.save({"w": Broken(r)}, checkpoint_id=path))
    for what in (".robust_dcp.saving", "__1_1", ".metadata"):
        for layout in ("torch", "safetensors"):
            if (what, layout) != ("__1_1", "safetensors"):
                attempt(
                    f"a disk that is full at {what}, {layout}",
                    lambda path, w=what, kind=layout: robust_dcp.save(
                        shards(1), storage_writer=RobustWriter(path, layout=kind, disk=Full(w))
                    ),
                )
    attempt(
        "writing", lambda path: robust_dcp.save(shards(1), checkpoint_id=path, planner=BrokenPlanner("resolve_data"))
    )
    attempt(
        "writing in stock's save",
        lambda path: dcp.save(shards(1), storage_writer=RobustWriter(path), planner=BrokenPlanner("resolve_data")),
    )
    return found


def test_a_failed_save_leaves_no_file_and_no_directory_that_was_not_there_before(tmp_path: Path) -> None:
    for cases in values(in_ranks(2, fail_in_each_way, str(tmp_path), timeout_seconds=120)):
        assert len(cases) == 18
        for case, (type_name, left) in cases.items():
            assert type_name, case
            assert left == (["there"] if case.endswith("there") else []), case


def fail_to_remove(directory: str) -> tuple[Verdict, list[str]]:
    class Stuck(PosixDisk):
        """Rank 1 fails to write its second file, and cannot remove its first."""

        def pwrite(self, file: Any, data: Any, offset: int) -> None:
            if "__1_1" in file.path:
                raise storage_error("write", file.path, OSError(errno.EIO, os.strerror(errno.EIO)))
            super().pwrite(file, data, offset)

        def unlink(self, path: str) -> None:
            if "__1_0" in path:
                raise storage_error("remove", path, OSError(errno.EACCES, os.strerror(errno.EACCES)))
            super().unlink(path)

    verdict = verdict_of(robust_dcp.save, shards(1), storage_writer=RobustWriter(directory, disk=Stuck()))
    dist.barrier()
    left = sorted(os.listdir(directory))
    dist.barrier()
    robust_dcp.save(shards(2), checkpoint_id=directory)
    return verdict, left


def test_what_cannot_be_removed_is_named_on_all_ranks_and_removed_by_the_next_save(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    for verdict, left in values(in_ranks(2, fail_to_remove, str(directory))):
        assert verdict.type_name == "StorageError" and verdict.fields["errno"] == errno.EIO
        (stuck,) = [name for name in left if name.endswith(".distcp")]
        assert stuck.startswith("__1_0.")
        assert f"could not remove: {directory}/{stuck}; the next save" in verdict.message
    names = os.listdir(directory)
    assert any(name.startswith("__1_0.") for name in names) and stuck not in names
    assert not [name for name in names if name.startswith(".robust_dcp.saving")]


def test_a_directory_in_which_others_have_put_something_stays(tmp_path: Path) -> None:
    class Puts(RobustPlanner):
        def resolve_data(self, write_item: Any) -> Any:
            (tmp_path / "checkpoint" / "notes.txt").write_text("a user's")
            raise LookupError

    with pytest.raises(robust_dcp.RobustCheckpointError) as caught:
        robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "checkpoint", planner=Puts())
    assert not isinstance(caught.value, StorageError) and "could not remove" not in str(caught.value)
    assert os.listdir(tmp_path / "checkpoint") == ["notes.txt"]
