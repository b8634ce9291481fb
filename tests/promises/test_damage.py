"""No damage makes a load wrong: it raises, or what it loads is right; and ``robust-dcp verify`` finds the damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustReader, RobustWriter, StorageError, UnsafeCheckpoint
from tests.promises.scenarios import command, where

ROWS = slice(120, 170)
PLACES = 4
"""So many places of each file are tried for each kind of damage to bytes."""


def saved(value: int) -> dict[str, Any]:
    """Two tensors of one shape, some of more than one block of checksums, and an object."""
    return {
        "large": torch.arange(300 * 400.0).reshape(300, 400) + value,  # 480,000 bytes
        "one": torch.full((200, 8), 1.0 + value),
        "two": torch.full((200, 8), 2.0 + value),
        "small": torch.arange(5) + value,
        "text": f"some words of generation {value}",
    }


def save(path: Path, value: int, layout: str) -> None:
    robust_dcp.save(saved(value), storage_writer=RobustWriter(path, layout=layout), no_dist=True)


class SomeRows(DefaultLoadPlanner):
    """Reads only some rows of each matrix, as a rank does that holds a part."""

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name in ("large", "one", "two"):
            index = MetadataIndex(name, torch.Size([0, 0]), 0)
            sizes = torch.Size([ROWS.stop - ROWS.start, saved(0)[name].shape[1]])
            at = torch.Size([ROWS.start, 0])
            items.append(ReadItem(LoadItemType.TENSOR, index, at, index, at, sizes))
        return LoadPlan(items)


def load_whole(path: Path, **options: Any) -> None:
    found = {key: torch.full_like(value, -1) if key != "text" else "" for key, value in saved(0).items()}
    robust_dcp.load(found, storage_reader=RobustReader(path, **options), no_dist=True)
    for key, value in saved(1).items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key


def load_in_pieces(path: Path) -> None:
    """As tensors are read that are larger than a block: each by several threads."""
    load_whole(path, buffer_bytes=1 << 18, threads=2)


def load_sliced(path: Path) -> None:
    wanted = saved(1)
    found = {key: torch.full_like(wanted[key], -1) for key in ("large", "one", "two")}
    robust_dcp.load(found, checkpoint_id=path, planner=SomeRows(), no_dist=True)
    for key, value in found.items():
        assert torch.equal(value[ROWS], wanted[key][ROWS]), key


def is_found(load: Callable[[Path], None], path: Path) -> bool:
    """Whether a load refuses what is damaged. What it loads has to be right."""
    try:
        load(path)
    except (CorruptCheckpoint, UnsafeCheckpoint, StorageError) as error:
        message = str(error)
        is_right = str(path) in message and (not isinstance(error, StorageError) or "no checkpoint" in message)
    else:
        return False
    assert is_right, f"the error does not say where: {message}"
    return True


# --- damage -----------------------------------------------------------------------------------------------------------

Damage = Callable[[bytearray, random.Random], object]


def flip(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def zero(data: bytearray, dice: random.Random) -> None:
    begin = dice.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))


def cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.choice((0, len(data) - 1, dice.randrange(len(data)))) :]


def scramble(data: bytearray, dice: random.Random) -> None:
    begin = dice.randrange(len(data))
    data[begin : begin + 64] = dice.randbytes(len(data[begin : begin + 64]))


DAMAGES: dict[str, Damage] = {"flipped bit": flip, "zeroed block": zero, "cut": cut, "other bytes": scramble}


@pytest.fixture(scope="module", params=["torch", "safetensors"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and another save of the same structure."""
    root = tmp_path_factory.mktemp("damage")
    for value in (1, 2):
        save(root / str(value), value, request.param)
    return root / "1", root / "2"


def files_of(path: Path) -> list[Path]:
    """The files that a load may read, sorted by what they are; the report of the save is for people."""
    return sorted(file for file in path.iterdir() if file.name != ".robust_dcp.report.json")


def check(path: Path, *, has_harm: bool = True) -> None:
    """That no load is wrong, and that ``verify`` finds what makes one fail."""
    found = [is_found(load, path) for load in (load_whole, load_in_pieces, load_sliced)]
    code = command("verify", path)
    is_right = code == 0 and not any(found) if not has_harm else code in (1, 2) or not any(found)
    assert is_right, f"verify ends with {code}, and the loads: {found}"


def test_undamaged_checkpoints_are_loaded_and_verified(checkpoints: tuple[Path, Path]) -> None:
    path, other = checkpoints
    check(path, has_harm=False)
    assert len(files_of(path)) == len(files_of(other)) >= 4
    assert not is_found(load_whole, path) and not is_found(load_sliced, path)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_bytes_of_any_file_is_found_or_does_no_harm(
    kind: str, checkpoints: tuple[Path, Path], memory_path: Path
) -> None:
    path = memory_path / "c"
    shutil.copytree(checkpoints[0], path)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for file in files_of(path):
        whole = file.read_bytes()
        for number in range(PLACES):
            data = bytearray(whole)
            DAMAGES[kind](data, dice)
            if data == whole:
                continue
            file.write_bytes(data)
            with where(f"{kind} in {file.name}, number {number} of seed {seed}"):
                check(path)
        file.write_bytes(whole)
    check(path, has_harm=False)


def test_a_missing_file_is_found(checkpoints: tuple[Path, Path], memory_path: Path) -> None:
    path = memory_path / "c"
    shutil.copytree(checkpoints[0], path)
    for file in files_of(path):
        file.rename(memory_path / "away")
        with where(f"without {file.name}"):
            check(path, has_harm=file.name != ".robust_dcp.index")  # which may be removed
        (memory_path / "away").rename(file)


def test_a_file_of_another_save_is_found(checkpoints: tuple[Path, Path], memory_path: Path) -> None:
    """It is whole and sound, has the same name and the same places in it, and other values."""
    path = memory_path / "c"
    shutil.copytree(checkpoints[0], path)
    for file, other in zip(files_of(path), files_of(checkpoints[1]), strict=True):
        whole = file.read_bytes()
        file.write_bytes(other.read_bytes())
        with where(f"{file.name} is {other}"):
            check(path)
        file.write_bytes(whole)


def records(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Where the items called ``one`` and ``two`` lie."""
    for index, info in sorted(
        FileSystemReader(path).read_metadata().storage_data.items(), key=lambda each: each[0].fqn
    ):
        if index.fqn in ("one", "two"):
            yield path / info.relative_path, info.offset, info.length


def test_a_record_of_another_item_is_found(checkpoints: tuple[Path, Path], memory_path: Path) -> None:
    """Both are whole, of the same save, dtype and shape; only their places are exchanged."""
    path = memory_path / "c"
    shutil.copytree(checkpoints[0], path)
    (file, one, nbytes), (other_file, two, other_nbytes) = records(path)
    assert file == other_file and nbytes == other_nbytes
    data = bytearray(file.read_bytes())
    data[one : one + nbytes], data[two : two + nbytes] = data[two : two + nbytes], data[one : one + nbytes]
    file.write_bytes(data)
    assert command("verify", path) == 1
    assert is_found(load_whole, path) and is_found(load_sliced, path)


def test_data_files_that_are_exchanged_are_found(checkpoints: tuple[Path, Path], memory_path: Path) -> None:
    path = memory_path / "c"
    shutil.copytree(checkpoints[0], path)
    first, second = [file for file in files_of(path) if file.suffix in (".distcp", ".safetensors")][:2]
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    check(path)


def test_a_flipped_bit_in_a_record_of_stock_is_found_or_does_no_harm(memory_path: Path) -> None:
    """Stock writes no checksums but those of the zip of a tensor."""
    path = memory_path / "c"
    dcp.save(saved(1), checkpoint_id=path, no_dist=True)
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    places = [
        info for index, info in FileSystemReader(path).read_metadata().storage_data.items() if index.fqn != "text"
    ]
    n_found = 0
    for number in range(20):
        info = dice.choice(places)
        file = path / info.relative_path
        whole = file.read_bytes()
        data = bytearray(whole)
        data[info.offset + dice.randrange(info.length)] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        with where(f"number {number} of seed {seed}"):
            n_found += is_found(load_whole, path)
        file.write_bytes(whole)
    assert n_found > 0
