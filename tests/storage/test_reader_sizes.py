"""RobustReader over items of every size: in groups, whole, in pieces; cached or not; with little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from robust_dcp.storage.files.disk import Disk
from tests.storage.checkpoints import PairedPlanner, assert_same, load, read_box, rewritten, save_stock
from tests.storage.test_data_file import forget
from tests.support.simulated_disk import WatchedDisk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Small ones that are read together, some that are read whole, and some in pieces of at most 4 MiB.
NUMELS = {**{f"small.{n}": n for n in range(40)}, "a": 40_000, "b": 200_001, "c": 700_000, "d": 3_000_017}


def values_of(fill: float | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    if fill is not None:
        return {name: torch.full((numel,), float(fill)) for name, numel in NUMELS.items()}
    return {name: torch.rand(numel, generator=generator) for name, numel in NUMELS.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    stock, ours = tmp_path_factory.mktemp("stock"), tmp_path_factory.mktemp("ours")
    values = values_of()
    for directory in (stock, ours):
        save_stock(directory, values)
    for name, value in values.items():
        rewritten(ours, name, value)
    return {"stock": stock, "ours": ours}


@pytest.mark.parametrize("writer", ["stock", "ours"])
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, PairedPlanner])
@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20, 1 << 30])
def test_items_of_all_sizes_are_read(
    checkpoints: dict[str, Path], writer: str, planner: Any, direct: bool | None, buffer_bytes: int
) -> None:
    for file in checkpoints[writer].iterdir():
        forget(file)
    for _ in ("not cached", "cached"):
        found = load(checkpoints[writer], values_of(0), planner(), direct=direct, buffer_bytes=buffer_bytes, threads=3)
        assert_same(found, values_of())


@pytest.mark.parametrize("writer", ["stock", "ours"])
def test_targets_of_another_dtype_or_layout_are_filled(checkpoints: dict[str, Path], writer: str) -> None:
    targets = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in NUMELS.items()}
    targets["d"] = torch.zeros(NUMELS["d"], 2)[:, 1]
    targets["small.7"] = torch.zeros(7, 2)[:, 1]
    targets["small.9"] = torch.nn.Parameter(torch.zeros(9))
    load(checkpoints[writer], targets)
    for name, value in values_of().items():
        assert torch.equal(targets[name].to(torch.float32), value), name


def test_many_small_items_take_few_reads(checkpoints: dict[str, Path]) -> None:
    targets = {name: torch.zeros(numel) for name, numel in NUMELS.items() if name.startswith("small")}
    for directory in checkpoints.values():
        disk = WatchedDisk(Disk())
        load(directory, dict(targets), disk=disk)
        reads = [path for operation, path in disk.calls if operation == "pread_into" and path.endswith(".distcp")]
        assert len(reads) == 2  # one of them looks for a footer


def test_a_large_slice_is_read_in_pieces(tmp_path: Path) -> None:
    value = torch.rand(3000, 1000)
    save_stock(tmp_path, {"w": value})
    rewritten(tmp_path, "w", value)
    forget(tmp_path / "__9_0.distcp")
    target = torch.zeros(2500, 1000)
    read_box(tmp_path, target, [250, 0], [2500, 1000])
    assert torch.equal(target, value[250:2750])
    target = torch.zeros(3000, 900)
    read_box(tmp_path, target, [0, 50], [3000, 900])
    assert torch.equal(target, value[:, 50:950])
