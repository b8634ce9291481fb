"""``consolidate`` writes into a directory that may hold other files, and touches none of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import robust_dcp
from robust_dcp import StorageError
from robust_dcp.storage import consolidate
from robust_dcp.storage.files.disk import storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk

INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    robust_dcp.save({"weight": torch.arange(8.0)}, checkpoint_id=tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A directory with files of the user's own."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("mine")
    return tmp_path / "model"


def content(path: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in path.iterdir()}


def test_an_index_that_is_there_is_refused_and_stays(checkpoint: Path, output: Path) -> None:
    (output / INDEX).write_text("mine, too")
    with pytest.raises(StorageError, match=rf"holds {INDEX}.*choose another"):
        consolidate(checkpoint, output)
    assert content(output) == {"config.json": "mine", INDEX: "mine, too"}


class ActsBeforeRename(PosixDisk):
    """Another program, or the disk, acts right before a file gets its final name."""

    def __init__(self, end: str, act: Callable[[str], object]) -> None:
        super().__init__()
        self.end, self.act = end, act

    def exists(self, path: str) -> bool:
        if path.endswith(self.end) and self._is_publishing(path):
            self.act(path)
        return super().exists(path)

    def _is_publishing(self, path: str) -> bool:
        return any(name.endswith(".part") for name in os.listdir(os.path.dirname(path)))

    def rename(self, source: str, target: str) -> None:
        if target.endswith(self.end) and not os.path.exists(target):
            raise storage_error("rename", target, OSError(errno.EIO, "Input/output error"))
        super().rename(source, target)


@pytest.mark.parametrize("end", [INDEX, "model-00001-of-00001.safetensors"])
def test_a_failure_removes_what_it_has_made_and_nothing_else(end: str, checkpoint: Path, output: Path) -> None:
    with pytest.raises(StorageError, match="Input/output error"):
        consolidate(checkpoint, output, disk=ActsBeforeRename(end, lambda path: None))
    assert content(output) == {"config.json": "mine"}


@pytest.mark.parametrize("end", [INDEX, "model-00001-of-00001.safetensors"])
def test_a_file_that_another_program_makes_meanwhile_is_neither_replaced_nor_removed(
    end: str, checkpoint: Path, output: Path
) -> None:
    disk = ActsBeforeRename(end, lambda path: Path(path).write_text("of another program"))
    with pytest.raises(StorageError, match="made by another program meanwhile"):
        consolidate(checkpoint, output, disk=disk)
    assert content(output) == {"config.json": "mine", end: "of another program"}


def test_beside_other_files_a_model_is_whole(checkpoint: Path, output: Path) -> None:
    consolidate(checkpoint, output)
    assert torch.equal(load_file(output / "model-00001-of-00001.safetensors")["weight"], torch.arange(8.0))
    assert (output / "config.json").read_text() == "mine"
