"""Where there is no checkpoint, the error says what there is, and which path was meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import robust_dcp
from robust_dcp import StorageError


def _checkpoint(path: Path) -> None:
    robust_dcp.save({"w": torch.ones(2)}, checkpoint_id=path)


def _error(path: Path) -> str:
    with pytest.raises(StorageError) as caught:
        robust_dcp.load({"w": torch.zeros(2)}, checkpoint_id=path)
    assert "no checkpoint was committed there" in caught.value.message
    assert caught.value.path == f"{path}/.metadata" and caught.value.errno is not None
    return caught.value.message


@pytest.mark.parametrize("name", ["step_{}", "iter_{:07d}", "{}", "checkpoint-{}", "epoch=1-step={}.ckpt"])
def test_a_directory_of_checkpoints_lists_them_the_latest_first(name: str, tmp_path: Path) -> None:
    for step in (1, 9, 10, 100):
        _checkpoint(tmp_path / name.format(step))
    (tmp_path / name.format(200)).mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    text = _error(tmp_path)
    listed = ", ".join(name.format(step) for step in (100, 10, 9, 1))
    assert f"holds the checkpoints {listed} (latest_checkpointed_iteration.txt says '100')" in text


def test_directories_of_safetensors_files_are_checkpoints_too(tmp_path: Path) -> None:
    (tmp_path / "step_3").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "step_3" / "model.safetensors")
    assert "holds the checkpoints step_3" in _error(tmp_path)
    assert "is a safetensors file: pass its directory" in _error(tmp_path / "step_3" / "model.safetensors")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_save_is_told_with_what_to_do(is_zip: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=is_zip)
    text = _error(tmp_path / "model.pt")
    assert "a file of torch.save" in text and "torch.load" in text and "robust-dcp convert" in text
    assert "holds model.pt, which is a file of torch.save" in _error(tmp_path)


def test_a_missing_directory_names_the_nearest_parent(tmp_path: Path) -> None:
    assert f"the nearest parent that exists is {tmp_path}, and is empty" in _error(tmp_path / "a" / "b")
    _checkpoint(tmp_path / "step_1")
    assert f"is {tmp_path}, and holds the checkpoints step_1" in _error(tmp_path / "step_2")
    assert f"is {tmp_path / 'step_1'}, and is a checkpoint" in _error(tmp_path / "step_1" / "a")
    torch.save(1, tmp_path / "model.pt")
    assert "file of torch.save" in _error(tmp_path / "model.pt" / "a")


def test_a_file_of_a_checkpoint_names_its_directory(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "step_1")
    for path in (tmp_path / "step_1").iterdir():
        if not path.name.startswith(".robust_dcp"):
            assert f"pass its directory, {path.parent}" in _error(path)


def test_what_cannot_be_read_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    assert "it is a FIFO" in _error(tmp_path / "model.pt")
    assert "holds model.pt" in _error(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "is empty" in _error(tmp_path / "empty")
    (tmp_path / "text.txt").write_text("hello")
    assert "is a file, and a checkpoint is a directory" in _error(tmp_path / "text.txt")
