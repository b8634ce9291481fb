"""Large in every direction: one tensor of more than 4 GiB, where lengths no longer fit into the 32 bits of a plain zip
file; more items than anybody has; an item that is larger than all memory that it may pass through."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustReader
from tests.harness.ranks import run_ranks, values

NBYTES = (4 << 30) + (200 << 20) + 7
MARKS = {0: 1, 1: 2, (1 << 31) - 1: 3, 1 << 31: 4, (1 << 32) - 1: 5, 1 << 32: 6, NBYTES - 1: 7}


def save_and_load_a_large_tensor(directory: str) -> list[dict[int, int]]:
    # Memory that was never written to: the save reads one page of zeros again and again, and the first load takes it.
    large = torch.from_numpy(np.zeros(NBYTES, dtype=np.uint8))
    small = torch.arange(3)
    for place, mark in MARKS.items():
        large[place] = mark
    robust_dcp.save({"large": large, "small": small}, checkpoint_id=directory)
    found = []
    for load in (dcp.load, robust_dcp.load):
        large[list(MARKS)] = 0
        small.zero_()
        report = load({"large": large, "small": small}, checkpoint_id=directory)
        assert load is dcp.load or report.peak_buffer_nbytes <= 64 << 20
        assert small.tolist() == [0, 1, 2]
        assert int(torch.count_nonzero(large)) == len(MARKS)
        found.append({place: int(large[place]) for place in MARKS})
    return found


@pytest.mark.slow
def test_a_tensor_of_more_than_4_gib_is_saved_and_loaded_also_by_stock(tmp_path: Path) -> None:
    try:
        outcome = run_ranks(
            1, save_and_load_a_large_tensor, str(tmp_path / "checkpoint"), init=False, timeout_seconds=170
        )
        assert values(outcome) == [[MARKS, MARKS]]
    finally:
        for name in os.listdir(tmp_path / "checkpoint"):
            os.unlink(tmp_path / "checkpoint" / name)


def test_a_hundred_thousand_items_are_saved_and_loaded(tmp_path: Path) -> None:
    numbers = torch.arange(300_000, dtype=torch.int32)
    state_dict = {f"layer.{n}.weight": numbers[3 * n : 3 * n + 3] for n in range(100_000)}
    report = robust_dcp.save(state_dict, checkpoint_id=tmp_path, no_dist=True)
    assert report.items == 100_000
    found = torch.zeros_like(numbers)
    targets = {f"layer.{n}.weight": found[3 * n : 3 * n + 3] for n in range(100_000)}
    loaded = robust_dcp.load(targets, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found, numbers)
    assert loaded.items == 100_000
    assert loaded.peak_buffer_nbytes <= 64 << 20


@pytest.mark.parametrize(("by", "direct"), [("ours", None), ("ours", False), ("stock", None)])
def test_an_item_larger_than_all_buffers_is_loaded_within_them(tmp_path: Path, by: str, direct: bool | None) -> None:
    value = torch.rand((64 << 20) // 4 + 5, generator=torch.Generator().manual_seed(1))
    save = robust_dcp.save if by == "ours" else dcp.save
    save({"large": value, "small": value[:3].clone()}, checkpoint_id=tmp_path, no_dist=True)
    target = {"large": torch.zeros_like(value), "small": torch.zeros(3)}
    reader = RobustReader(tmp_path, buffer_bytes=4 << 20, direct=direct)
    report = robust_dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["large"], value) and torch.equal(target["small"], value[:3])
    assert report.peak_buffer_nbytes <= 4 << 20
