"""``verify`` finds small changes in all parts of a checkpoint, and sound files that are not of that checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from tests.cli.commands import shell as run_command
from tests.harness.damage import data_files
from tests.harness.names import data_file

STATE = {
    "weight": torch.arange(6.0).reshape(2, 3) + 1,
    "half": torch.ones(5).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7),
}

EVERY = 11
"""How far the bytes that change lie apart. Of two bytes in one field the test finds what it finds of one."""


def save(path: Path, layout: str = "torch") -> Path:
    options = robust_dcp.WriteOptions(layout=layout, files_per_rank=1, report=False)
    robust_dcp.save(STATE, storage_writer=robust_dcp.RobustWriter(path, options=options))
    return path


def problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint, in words."""
    ended = run_command("verify", path, "--jobs", 1, "--json")
    assert ended.code == bool(ended.json["n_problems"])
    return [f"{each['file']}: {each['item']}: {each['expected']}: {each['found']}" for each in ended.json["problems"]]


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_a_bit_that_changes_in_any_field_of_any_file_is_found(layout: str, tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", layout)
    assert problems(path) == []
    missed = []
    for file in (each for each in path.iterdir() if each.name != REPORT_NAME):
        data = file.read_bytes()
        for place in range(len(file.name) % EVERY, len(data), EVERY):
            file.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
            if not problems(path):
                missed.append((file.name, place))
        file.write_bytes(data)
    assert missed == [] and problems(path) == []


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_a_data_file_of_any_other_length_is_found(layout: str, tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", layout)
    (file,) = data_files(path)
    data = file.read_bytes()
    unnoticed = []
    for nbytes in {*range(0, len(data), EVERY), *range(len(data) - EVERY, len(data))}:
        file.write_bytes(data[:nbytes])
        if not problems(path):
            unnoticed.append(nbytes)
    assert unnoticed == []


def test_a_file_that_breaks_off_while_it_is_read_is_a_problem_of_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Disk.pread_into

    def failing(self: Disk, file: OpenFile, buffer: object, offset: int) -> int:
        if file.path.endswith(".distcp"):
            raise storage_error("read", file.path, OSError(5, "Input/output error"))
        return read(self, file, buffer, offset)  # type: ignore[arg-type]

    path = save(tmp_path / "checkpoint")
    monkeypatch.setattr(Disk, "pread_into", failing)
    (problem,) = problems(path)
    assert problem.startswith("__0_0.") and "Input/output error" in problem


def swap_saves(path: Path, other: Path) -> None:
    shutil.copy(data_file(other, "__0_0.distcp"), data_file(path, "__0_0.distcp"))


def record_of_another_item(path: Path, other: Path) -> None:
    """Two records of the same length, so that all sizes fit."""
    state = {"a": torch.ones(4), "b": torch.ones(4, dtype=torch.int32)}
    for place, order in ((path, ("a", "b")), (other, ("b", "a"))):
        shutil.rmtree(place)
        dcp.save({key: state[key] for key in order}, checkpoint_id=place)
    data = (path / "__0_0.distcp").read_bytes()
    half = len(data) // 2
    (path / "__0_0.distcp").write_bytes(data[half:] + data[:half])


@pytest.mark.parametrize(
    ("damage", "told"),
    [(swap_saves, "a file of save"), (record_of_another_item, "another item's record")],
)
def test_a_file_that_is_sound_but_not_of_this_checkpoint_is_named(
    damage: Callable[[Path, Path], None], told: str, tmp_path: Path
) -> None:
    path, other = save(tmp_path / "checkpoint"), save(tmp_path / "other")
    damage(path, other)
    found = problems(path)
    assert found and all(each.startswith("__0_0.") and told in each for each in found)
