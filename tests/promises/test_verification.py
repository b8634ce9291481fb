"""Whatever is read of a tensor, the whole or a slice: a flipped bit in it is found, or was counted as not verified."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CorruptCheckpoint, LoadReport, RobustReader, RobustWriter
from tests.harness.damage import data_files, flip_bit
from tests.promises.test_mixes import Boxes

BLOCK_NBYTES = 256 << 10
"""What has a checksum of its own."""

ROWS, WIDTH = 1500, 1000
BOXES = {
    "all rows": ([0, 0], [ROWS, WIDTH]),
    "the first rows": ([0, 0], [10, WIDTH]),
    "rows in the middle": ([700, 0], [420, WIDTH]),
    "the last row": ([ROWS - 1, 0], [1, WIDTH]),
    "columns": ([0, 333], [ROWS, 2]),
    "one element": ([999, 999], [1, 1]),
}
Box = tuple[list[int], list[int]]


def save(directory: Path, layout: Any, value: torch.Tensor) -> Path:
    """The only data file."""
    writer = RobustWriter(directory, layout=layout, files_per_rank=1)
    robust_dcp.save({"w": value}, storage_writer=writer, no_dist=True)
    (path,) = data_files(directory)
    return path


def load(directory: Path, box: Box, verify: Any = True) -> tuple[torch.Tensor, LoadReport]:
    """The box, and the report."""
    found, reader = {"w": torch.zeros(ROWS, WIDTH)}, RobustReader(directory, verify_checksums=verify)
    report = robust_dcp.load(found, storage_reader=reader, planner=Boxes({"w": box}), no_dist=True)
    return cut(found["w"], box), report


def cut(value: torch.Tensor, box: Box) -> torch.Tensor:
    (row, column), (rows, columns) = box
    return value[row : row + rows, column : column + columns]


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_flipped_bit_anywhere_in_a_slice_is_found(tmp_path: Path, layout: str, box: Box) -> None:
    value = torch.rand(ROWS, WIDTH)
    path = save(tmp_path, layout, value)
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
    value = torch.rand(ROWS, WIDTH)
    flip_bit(save(tmp_path, "torch", value), place)
    box = BOXES["rows in the middle"]
    with pytest.raises(CorruptCheckpoint):
        load(tmp_path, box)
    assert torch.equal(load(tmp_path, box, verify=False)[0], cut(value, box))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_stock_has_written_is_verified_as_a_whole_and_counted_where_it_is_not(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(ROWS, WIDTH)}, checkpoint_id=tmp_path, no_dist=True)
    for box, verify, unverified_nbytes in (
        ("all rows", True, 0),
        ("rows in the middle", True, 4 * 420 * WIDTH),
        ("all rows", False, 4 * ROWS * WIDTH),
        ("rows in the middle", "all", 0),
    ):
        assert load(tmp_path, BOXES[box], verify)[1].unverified_nbytes == unverified_nbytes


def test_with_checksums_a_report_says_that_all_was_verified(tmp_path: Path) -> None:
    state = {"large": torch.rand(1 << 20), "small": torch.rand(10), "object": {"step": 3}}
    robust_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    report = robust_dcp.load(state, storage_reader=RobustReader(tmp_path, verify_checksums="all"), no_dist=True)
    assert report.unverified_nbytes == 0 and "not verified" not in str(report)
