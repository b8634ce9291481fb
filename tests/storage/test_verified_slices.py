"""Whatever is read of a tensor, the whole or a slice, a flipped bit in it is found, or was counted as not verified."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustReader, RobustWriter
from robust_dcp.storage.records.checksum import SUM_NBYTES
from tests.storage.checkpoints import read_box, save_stock

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, WIDTH = 1500, 1000
BOXES = {
    "all rows": ([0, 0], [ROWS, WIDTH]),
    "the first rows": ([0, 0], [10, WIDTH]),
    "rows in the middle": ([700, 0], [420, WIDTH]),
    "the last row": ([ROWS - 1, 0], [1, WIDTH]),
    "columns": ([0, 333], [ROWS, 2]),
    "one element": ([999, 999], [1, 1]),
}


def save(directory: Path, layout: str, value: torch.Tensor, **options: Any) -> None:
    writer = RobustWriter(directory, layout=layout, direct=False, files_per_rank=1, **options)
    robust_dcp.save({"w": value}, storage_writer=writer, no_dist=True)


def data_file(directory: Path) -> Path:
    (found,) = [each for each in directory.iterdir() if each.suffix in (".distcp", ".safetensors")]
    return found


def bounds(box: tuple[list[int], list[int]]) -> tuple[int, int]:
    """The bytes from the first to the last element."""
    (row, column), (rows, columns) = box
    return 4 * (row * WIDTH + column), 4 * ((row + rows - 1) * WIDTH + column + columns)


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_flipped_bit_anywhere_in_a_slice_is_found(
    tmp_path: Path, layout: str, box: tuple[list[int], list[int]]
) -> None:
    value = torch.rand(ROWS, WIDTH)
    save(tmp_path, layout, value)
    path = data_file(tmp_path)
    content = bytearray(path.read_bytes())
    begin, end = bounds(box)
    data_at = content.index(value.numpy().tobytes())
    generator = random.Random(7)
    places = {begin, end - 1, *(generator.randrange(begin, end) for _ in range(6))}
    places |= {at for at in range(0, 4 * value.numel(), SUM_NBYTES) if begin <= at < end}
    for at in places:
        content[data_at + at] ^= 16
        path.write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match=r"'w at .*CRC-32") as caught:
            read_box(tmp_path, torch.zeros(box[1]), *box)
        first = at - at % SUM_NBYTES
        if box != BOXES["all rows"]:  # whose one checksum is that of all of it
            last = min(first + SUM_NBYTES, 4 * value.numel())
            assert f"bytes {data_at + first} to {data_at + last} of the file" in str(caught.value)
        read_box(tmp_path, torch.zeros(box[1]), *box, verify_checksums=False)
        content[data_at + at] ^= 16
    path.write_bytes(content)
    target = torch.zeros(box[1])
    read_box(tmp_path, target, *box, verify_checksums="all")
    (row, column), (rows, columns) = box
    assert torch.equal(target, value[row : row + rows, column : column + columns])


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("place", ["columns", "tail"])
def test_data_under_a_damaged_footer_can_be_saved(tmp_path: Path, place: str) -> None:
    value = torch.rand(300, WIDTH)
    save(tmp_path, "torch", value)
    path = data_file(tmp_path)
    flip(path, path.stat().st_size - (70 if place == "columns" else 20))
    box = [100, 0], [30, WIDTH]
    with pytest.raises(CorruptCheckpoint):
        read_box(tmp_path, torch.zeros(box[1]), *box)
    target = torch.zeros(box[1])
    read_box(tmp_path, target, *box, verify_checksums=False)
    assert torch.equal(target, value[100:130])


def test_what_stock_has_written_is_verified_as_a_whole_and_counted_where_it_is_not(tmp_path: Path) -> None:
    value = torch.rand(ROWS, WIDTH)
    save_stock(tmp_path, {"w": value})

    def loaded(box: tuple[list[int], list[int]], verify: Any) -> RobustReader:
        reader = RobustReader(tmp_path, verify_checksums=verify)
        target = torch.zeros(box[1])

        class Planner(dcp.DefaultLoadPlanner):
            def create_local_plan(self) -> dcp.LoadPlan:
                plan = super().create_local_plan()
                (item,) = plan.items
                lengths = torch.Size(box[1])
                return dcp.LoadPlan(
                    [item.__class__(item.type, item.dest_index, torch.Size(box[0]), item.storage_index,
                                    torch.Size(box[0]), lengths)]
                )  # fmt: skip

            def resolve_tensor(self, read_item: Any) -> torch.Tensor:
                return target

        dcp.load({"w": torch.zeros(ROWS, WIDTH)}, storage_reader=reader, planner=Planner(), no_dist=True)
        return reader

    assert loaded(BOXES["all rows"], True).unverified_nbytes == 0
    assert loaded(BOXES["rows in the middle"], True).unverified_nbytes == 420 * WIDTH * 4
    assert loaded(BOXES["all rows"], False).unverified_nbytes == ROWS * WIDTH * 4
    assert loaded(BOXES["rows in the middle"], "all").unverified_nbytes == 0


def test_with_checksums_a_report_says_that_all_was_verified(tmp_path: Path) -> None:
    state = {"large": torch.rand(1 << 20), "small": torch.rand(10), "object": {"step": 3}}
    robust_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found: dict[str, Any] = {"large": torch.zeros(1 << 20), "small": torch.zeros(10), "object": {"step": 0}}
    report = robust_dcp.load(found, storage_reader=RobustReader(tmp_path, verify_checksums="all"), no_dist=True)
    assert report.unverified_nbytes == 0 and "not verified" not in str(report)
