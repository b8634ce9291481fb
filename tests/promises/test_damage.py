"""No damage makes a load wrong: it raises, or what it loads is right, nothing is run, and ``verify`` finds it."""

from __future__ import annotations

import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import robust_dcp
from robust_dcp import CorruptCheckpoint, LoadReport, RobustReader, RobustWriter, StorageError, UnsafeCheckpoint
from tests.cli.commands import shell
from tests.faults.disk import LONG_TESTS
from tests.harness.damage import DAMAGES, data_files, flip_bit
from tests.harness.fingerprints import blank, differences
from tests.harness.ranks import run_ranks, values
from tests.promises.scenarios import where
from tests.promises.test_mixes import Boxes

ROWS = slice(120, 170)
PLACES = 300 if LONG_TESTS else 2
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


def load_whole(path: Path, **options: Any) -> None:
    found = blank(saved(1))
    robust_dcp.load(found, storage_reader=RobustReader(path, **options), no_dist=True)
    assert differences(saved(1), found) == []


def load_in_pieces(path: Path) -> None:
    """As tensors are read that are larger than a block: each by several threads."""
    load_whole(path, buffer_bytes=1 << 18, threads=2)


def load_sliced(path: Path) -> None:
    wanted = saved(1)
    found = {key: torch.full_like(wanted[key], -1) for key in ("large", "one", "two")}
    boxes = {key: ([ROWS.start, 0], [ROWS.stop - ROWS.start, value.shape[1]]) for key, value in found.items()}
    robust_dcp.load(found, checkpoint_id=path, planner=Boxes(boxes), no_dist=True)
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


@pytest.fixture(scope="module", params=["torch", "safetensors"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and another save of the same structure."""
    root = tmp_path_factory.mktemp("damage")
    for value in (1, 2):
        save(root / str(value), value, request.param)
    return root / "1", root / "2"


@pytest.fixture
def path(checkpoints: tuple[Path, Path], memory_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints[0], memory_path / "c"))


def files_of(path: Path) -> list[Path]:
    """The files that a load may read, sorted by what they are; the report of the save is for people."""
    return sorted(file for file in path.iterdir() if file.name != ".robust_dcp.report.json")


def check(path: Path, *, has_harm: bool = True) -> None:
    """That no load is wrong, and that ``verify`` finds what makes one fail."""
    found = [is_found(load, path) for load in (load_whole, load_in_pieces, load_sliced)]
    code = shell("verify", path).code
    is_right = code == 0 and not any(found) if not has_harm else code in (1, 2) or not any(found)
    assert is_right, f"verify ends with {code}, and the loads: {found}"


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_bytes_of_any_file_is_found_or_does_no_harm(kind: str, path: Path) -> None:
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


def test_a_missing_file_is_found(path: Path, memory_path: Path) -> None:
    for file in files_of(path):
        file.rename(memory_path / "away")
        with where(f"without {file.name}"):
            check(path, has_harm=file.name != ".robust_dcp.index")  # which may be removed
        (memory_path / "away").rename(file)


def test_a_file_of_another_save_is_found(checkpoints: tuple[Path, Path], path: Path) -> None:
    """It is whole and sound, has the same name and the same places in it, and other values."""
    for file, other in zip(files_of(path), files_of(checkpoints[1]), strict=True):
        whole = file.read_bytes()
        file.write_bytes(other.read_bytes())
        with where(f"{file.name} is {other}"):
            check(path)
            if not file.name.startswith("."):  # the mark of its save tells, whoever does not ask for checksums
                assert is_found(lambda path: load_whole(path, verify_checksums=False), path)
        file.write_bytes(whole)


@pytest.mark.parametrize("saver", [robust_dcp.save, dcp.save])
@pytest.mark.parametrize("text", [b"I0x10\n0cos\nsystem\n.", b"\x80\x02cposix\nmkdir\n", b"P\n"])
def test_a_record_that_begins_as_a_pickle_of_other_times_is_damaged(text: bytes, saver: Any, memory_path: Path) -> None:
    """It is no archive of ``torch.save``, so it has no checksum that could be compared."""
    saver(saved(1), checkpoint_id=memory_path, no_dist=True)
    places = FileSystemReader(memory_path).read_metadata().storage_data
    (place,) = (place for index, place in places.items() if index.fqn == "one")
    file = memory_path / place.relative_path
    data = bytearray(file.read_bytes())
    data[place.offset : place.offset + len(text)] = text
    file.write_bytes(data)
    assert is_found(load_whole, memory_path) and shell("verify", memory_path).code == 1


# --- places that are exchanged in the metadata ------------------------------------------------------------------------


def swap(directory: Path, one: MetadataIndex, two: MetadataIndex) -> None:
    """Let the metadata say of two items that each lies where the other one does."""
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    places = metadata.storage_data
    places[one], places[two] = places[two], places[one]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / ".robust_dcp.index").unlink(missing_ok=True)


SIZES = {"small": 5, "medium": 40_000, "large": 700_000}
ITEMS: dict[str, Any] = {f"{size}{n}": torch.full((SIZES[size],), 1.0 + n) for size in SIZES for n in range(6)}
ITEMS |= {"one": ("an", "object"), "two": ("an", "object")}


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize(
    ("one", "two"), [("small0", "small1"), ("medium0", "medium1"), ("large0", "large1"), ("one", "two")]
)
def test_two_items_whose_places_are_swapped_are_found(layout: Any, one: str, two: str, tmp_path: Path) -> None:
    robust_dcp.save(dict(ITEMS), storage_writer=RobustWriter(tmp_path, layout=layout))
    swap(tmp_path, *(MetadataIndex(name, torch.Size([0]) if name[-1].isdigit() else None) for name in (one, two)))
    for names in ([one], list(ITEMS)):
        state = {name: torch.zeros_like(ITEMS[name]) if name[-1].isdigit() else None for name in names}
        with pytest.raises(CorruptCheckpoint, match=f"{one}|{two}"):
            robust_dcp.load(state, checkpoint_id=tmp_path)
        if one != "one" and layout == "torch":  # whoever verifies nothing loads what lies there
            robust_dcp.load(state, storage_reader=RobustReader(tmp_path, verify_checksums=False))
            assert torch.equal(state[one], ITEMS[two])
    assert shell("verify", tmp_path).code == 1


def save_shards(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(4 * 30_000, dtype=torch.float32).reshape(4, 30_000)
    robust_dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=directory)


def test_two_shards_of_one_tensor_whose_places_are_swapped_are_found(tmp_path: Path) -> None:
    values(run_ranks(2, save_shards, tmp_path))
    swap(tmp_path, MetadataIndex("w", torch.Size([0, 0])), MetadataIndex("w", torch.Size([2, 0])))
    with pytest.raises(CorruptCheckpoint, match="w"):
        robust_dcp.load({"w": torch.zeros(4, 30_000)}, checkpoint_id=tmp_path)


def test_a_record_of_another_dtype_or_shape_than_the_metadata_says_is_found(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(6, dtype=torch.float64), "b": torch.ones(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    entries: dict[str, Any] = metadata.state_dict_metadata
    entries["a"].properties.dtype = torch.float32
    entries["b"].size = entries["b"].chunks[0].sizes = torch.Size([3, 2])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for name, sizes, here in (("a", (6,), r"float64 \[6\]"), ("b", (3, 2), r"float32 \[2, 3\]")):
        with pytest.raises(CorruptCheckpoint, match=f"as the metadata says, found .*{here} in the file"):
            robust_dcp.load({name: torch.zeros(sizes)}, checkpoint_id=tmp_path)
    assert shell("verify", tmp_path).code == 1
    state = {"a": torch.zeros(6)}
    robust_dcp.load(state, storage_reader=RobustReader(tmp_path, verify_checksums=False))
    assert torch.equal(state["a"], torch.ones(6))


# --- whatever is read of a tensor is verified, or counted as not verified ---------------------------------------------


BLOCK_NBYTES = 256 << 10
"""What has a checksum of its own."""

N_ROWS, WIDTH = 1500, 1000
BOXES = {
    "all rows": ([0, 0], [N_ROWS, WIDTH]),
    "the first rows": ([0, 0], [10, WIDTH]),
    "rows in the middle": ([700, 0], [420, WIDTH]),
    "the last row": ([N_ROWS - 1, 0], [1, WIDTH]),
    "columns": ([0, 333], [N_ROWS, 2]),
    "one element": ([999, 999], [1, 1]),
}
Box = tuple[list[int], list[int]]


def save_alone(directory: Path, layout: Any, value: torch.Tensor) -> Path:
    """The only data file."""
    writer = RobustWriter(directory, layout=layout, files_per_rank=1)
    robust_dcp.save({"w": value}, storage_writer=writer, no_dist=True)
    (path,) = data_files(directory)
    return path


def load(directory: Path, box: Box, verify: Any = True) -> tuple[torch.Tensor, LoadReport]:
    """The box, and the report."""
    found, reader = {"w": torch.zeros(N_ROWS, WIDTH)}, RobustReader(directory, verify_checksums=verify)
    report = robust_dcp.load(found, storage_reader=reader, planner=Boxes({"w": box}), no_dist=True)
    return cut(found["w"], box), report


def cut(value: torch.Tensor, box: Box) -> torch.Tensor:
    (row, column), (rows, columns) = box
    return value[row : row + rows, column : column + columns]


@pytest.mark.parametrize(
    ("box", "layout"), [(box, layout) for box in BOXES.values() for layout in ("torch", "safetensors")], ids=str
)
def test_a_flipped_bit_anywhere_in_a_slice_is_found(tmp_path: Path, layout: str, box: Box) -> None:
    value = torch.rand(N_ROWS, WIDTH)
    path = save_alone(tmp_path, layout, value)
    data_at = path.read_bytes().index(value.numpy().tobytes())
    (row, column), (rows, columns) = box
    begin, end = 4 * (row * WIDTH + column), 4 * ((row + rows - 1) * WIDTH + column + columns)
    dice = random.Random(7)
    places = {begin, end - 1, *(dice.randrange(begin, end) for _ in range(4))}
    places |= {at for at in range(0, 4 * value.numel(), 4 * BLOCK_NBYTES) if begin <= at < end}
    for at in places:
        flip_bit(path, data_at + at, 4)
        with pytest.raises(CorruptCheckpoint, match=r"'w at .*CRC-32") as caught:
            load(tmp_path, box)
        first = at - at % BLOCK_NBYTES
        if box != BOXES["all rows"]:  # whose one checksum is that of all of it
            last = min(first + BLOCK_NBYTES, 4 * value.numel())
            assert f"bytes {data_at + first} to {data_at + last} of the file" in str(caught.value)
        assert load(tmp_path, box, verify=False)[1].unverified_nbytes >= 4 * rows * columns
        flip_bit(path, data_at + at, 4)
    found, report = load(tmp_path, box, verify="all")
    assert torch.equal(found, cut(value, box)) and report.unverified_nbytes == 0


@pytest.mark.parametrize("place", [-70, -20], ids=["columns", "tail"])
def test_data_under_a_damaged_footer_can_be_saved(tmp_path: Path, place: int) -> None:
    value = torch.rand(N_ROWS, WIDTH)
    flip_bit(save_alone(tmp_path, "torch", value), place)
    box = BOXES["rows in the middle"]
    with pytest.raises(CorruptCheckpoint):
        load(tmp_path, box)
    assert torch.equal(load(tmp_path, box, verify=False)[0], cut(value, box))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_stock_has_written_is_verified_as_a_whole_and_counted_where_it_is_not(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(N_ROWS, WIDTH)}, checkpoint_id=tmp_path, no_dist=True)
    for box, verify, unverified_nbytes in (
        ("all rows", True, 0),
        ("rows in the middle", True, 4 * 420 * WIDTH),
        ("all rows", False, 4 * N_ROWS * WIDTH),
        ("rows in the middle", "all", 0),
    ):
        assert load(tmp_path, BOXES[box], verify)[1].unverified_nbytes == unverified_nbytes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_stock_has_written_without_checksums_is_loaded_and_counted(tmp_path: Path) -> None:
    saved = {"tensor": torch.rand(100), "object": "a text"}
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    found = blank(saved)
    report = robust_dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert not differences(found, saved) and report.unverified_nbytes > 400
    with pytest.raises(CorruptCheckpoint, match="no checksums were written with it"):
        robust_dcp.load(found, storage_reader=RobustReader(tmp_path, verify_checksums="all"), no_dist=True)


# --- forged files -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_no_hostile_input_is_lost() -> None:
    """The campaign of ``make torture``, with another seed each time; in a process of its own, because it forks."""
    pytest.importorskip("megatron.core")
    trials, seed = 1000 if LONG_TESTS else 20, random.randrange(1 << 30)
    command = [sys.executable, *f"-W ignore -m torture.hostile --trials {trials} --seed {seed}".split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    assert " trials, 0 broke a promise" in ended.stdout.splitlines()[-1]
