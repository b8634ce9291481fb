"""A checkpoint that another save replaces while it is read: a load finds a whole one, or says what has happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustReader
from robust_dcp.storage.files.disk import Disk, OpenFile

LONG = {f"layer.{number}": torch.full((40,), float(number)) for number in range(60)}
SHORT = {"layer.0": torch.full((4,), 7.0)}
MOST_OPENED = 40


class ReplacedOnOpen(Disk):
    """Another save replaces the checkpoint right after the ``number``-th file has been opened."""

    def __init__(self, number: int, replace: Callable[[], object]) -> None:
        super().__init__()
        self.left = number
        self.replace = replace

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        file = super().open_read(path, direct=direct)
        self.left -= 1
        if self.left == 0:
            self.replace()
        return file


def save_and_replace(path: Path, number: int, *, has_index: bool) -> ReplacedOnOpen:
    robust_dcp.save(dict(LONG), checkpoint_id=path)
    if not has_index:  # as stock leaves it
        (path / ".robust_dcp.index").unlink()
    return ReplacedOnOpen(number, lambda: robust_dcp.save(dict(SHORT), checkpoint_id=path))


def load_ours(path: Path, disk: Disk, state_dict: dict[str, Any]) -> None:
    robust_dcp.load(state_dict, storage_reader=RobustReader(path, disk=disk))


def load_by_stock(path: Path, disk: Disk, state_dict: dict[str, Any]) -> None:
    dcp.load(state_dict, storage_reader=RobustReader(path, disk=disk), no_dist=True)


@pytest.mark.parametrize("load", [load_ours, load_by_stock])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_checkpoint_that_is_replaced_by_a_shorter_one_while_it_is_read_is_never_called_corrupt(
    has_index: bool, load: Callable[[Path, Disk, dict[str, Any]], None], tmp_path: Path
) -> None:
    """One load for each file that a load opens: the checkpoint is replaced right after that file was opened."""

    n_whole = 0
    refusals: list[str] = []
    for number in range(1, MOST_OPENED):
        disk = save_and_replace(tmp_path, number, has_index=has_index)
        state_dict = {name: torch.zeros_like(tensor) for name, tensor in LONG.items()}
        try:
            load(tmp_path, disk, state_dict)
        except dcp.api.CheckpointException as error:
            refusals.append(repr(error) + str(error))
        else:
            n_whole += 1
            assert all(torch.equal(state_dict[name], LONG[name]) for name in LONG)
        if disk.left > 0:
            break
    assert disk.left > 0, "the load has opened more files than this test knows of"
    assert n_whole > 0
    assert [each for each in refusals if CorruptCheckpoint.__name__ in each] == []


@pytest.mark.parametrize("has_index", [True, False])
def test_metadata_that_is_replaced_by_a_shorter_one_while_it_is_read_is_the_old_or_the_new(
    has_index: bool, tmp_path: Path
) -> None:
    for number in range(1, MOST_OPENED):
        disk = save_and_replace(tmp_path, number, has_index=has_index)
        keys = RobustReader(tmp_path, disk=disk).read_metadata().state_dict_metadata.keys()
        assert keys in (LONG.keys(), SHORT.keys())
        if disk.left > 0:
            break
    assert disk.left > 0, "the reader has opened more files than this test knows of"
