"""Two loads at once on one group, which share their reads, get what was saved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import robust_dcp
from robust_dcp import ReadOptions, RobustReader
from tests.harness.ranks import run_ranks, values

_N_TENSORS = 6


def _state(value: float, numel: int) -> dict[str, Any]:
    return {f"t{n}": torch.full((numel + n,), value + n) for n in range(_N_TENSORS)}


def _load_two_at_once(directory: Path, numels: tuple[int, int]) -> list[str]:
    for number, numel in enumerate(numels):
        robust_dcp.save(_state(10.0 * number, numel), checkpoint_id=directory / str(number))

    def load(number: int) -> list[str]:
        wrong = []
        for turn in range(3):
            found = _state(-1.0, numels[number])
            reader = RobustReader(directory / str(number), options=ReadOptions(share_reads=True))
            report = robust_dcp.load(found, storage_reader=reader)
            expected = _state(10.0 * number, numels[number])
            wrong += [
                f"load {number}, turn {turn}: {key}" for key in found if not torch.equal(found[key], expected[key])
            ]
            assert report.nbytes
        return wrong

    with ThreadPoolExecutor(2) as pool:
        return [each for found in pool.map(load, range(2)) for each in found]


@pytest.mark.parametrize("numels", [(300_000, 300_000), (300_000, 100_000)])
def test_two_loads_at_once_on_one_group_get_what_was_saved(numels: tuple[int, int], tmp_path: Path) -> None:
    assert values(run_ranks(2, _load_two_at_once, tmp_path, numels, timeout_seconds=150)) == [[], []]
