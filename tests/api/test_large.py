"""One tensor of more than 4 GiB: where lengths no longer fit into the 32 bits of a plain zip file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from tests.support.ranks import run_ranks, values

NBYTES = (4 << 30) + (200 << 20) + 7
MARKS = {0: 1, 1: 2, (1 << 31) - 1: 3, 1 << 31: 4, (1 << 32) - 1: 5, 1 << 32: 6, NBYTES - 1: 7}


def save_and_load_a_large_tensor(directory: str) -> list[dict[int, int]]:
    # Zeros that were never written to take no memory until they are read.
    large = torch.zeros(NBYTES, dtype=torch.uint8)
    small = torch.arange(3)
    for place, mark in MARKS.items():
        large[place] = mark
    robust_dcp.save({"large": large, "small": small}, checkpoint_id=directory)
    found = []
    for load in (robust_dcp.load, dcp.load):
        large[list(MARKS)] = 0
        small.zero_()
        load({"large": large, "small": small}, checkpoint_id=directory)
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
