"""``inspect`` shows what a checkpoint holds: as a tree, by item, by file, by rank and by dtype."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import robust_dcp
from tests.cli.commands import shell
from tests.harness.ranks import run_ranks, values

FILES = {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp"}
"""The tensors of each rank, and the object of rank 0."""


def unmarked(text: str) -> str:
    """``text`` without the marks of saves in the names of data files: ``__0_0.distcp``."""
    return re.sub(r"\.[0-9a-f]{16}(?=\.distcp)", "", text)


def data_file(directory: Path, name: str) -> Path:
    """The only file that is called ``name`` without its mark."""
    (found,) = (path for path in directory.iterdir() if unmarked(path.name) == name)
    return found


def save_on_two_ranks(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "model": {
            "layers.0.weight": distribute_tensor(torch.rand(8, 4), mesh, [Shard(0)]),
            "layers.0.bias": torch.rand(4, dtype=torch.float64),
            "layers.1.norm.scale": torch.rand(3).to(torch.bfloat16),
        },
        "step": 7,
        f"of_rank_{dist.get_rank()}": torch.ones(2),
    }
    writer = robust_dcp.RobustWriter(path, options=robust_dcp.WriteOptions(files_per_rank=1))
    robust_dcp.save(state, storage_writer=writer)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspected") / "step_7"
    values(run_ranks(2, save_on_two_ranks, str(path)))
    return path


def test_the_tree_joins_levels_of_one_name_and_counts_what_is_below(sharded: Path) -> None:
    ended = shell("inspect", sharded)
    assert ended.out.splitlines()[:6] == [
        "model.layers  3 items, 166 B",
        "  0  2 items, 160 B",
        "    bias  float64 [4], 32 B",
        "    weight  float32 [8, 4] in 2 chunks, 128 B",
        "  1.norm  1 item, 6 B",
        "    scale  bfloat16 [3], 6 B",
    ]
    assert "5 tensors, 1 object" in ended.err
    lines = shell("inspect", sharded, "--depth", "1").out.splitlines()
    assert lines[0] == "model.layers  3 items, 166 B" and not any(line.startswith(" ") for line in lines)


def test_a_table_has_one_line_for_each_item_with_the_file_of_its_first_chunk(sharded: Path) -> None:
    rows = {row[0]: list(map(unmarked, row[1:])) for row in shell("inspect", sharded, "--table").rows}
    assert rows["model.layers.0.weight"] == ["float32", "[8, 4]", "2", "128 B", "__0_0.distcp and 1 other"]
    assert rows["of_rank_1"] == ["float32", "[2]", "1", "8 B", "__1_0.distcp"]
    assert rows["step"][:3] == ["object", "", "1"]


def test_only_items_that_fit_a_pattern_are_shown(sharded: Path) -> None:
    rows = shell("inspect", sharded, "model.layers.0.*", "step", "--table").rows
    assert shell("inspect", sharded, "--table", "--depth", 2).code == 2
    assert sorted(row[0] for row in rows) == ["model.layers.0.bias", "model.layers.0.weight", "step"]
    ended = shell("inspect", sharded, "--", "-nothing.*")
    assert ended.code == 1 and ended.out == "" and "No item has such a name: -nothing.*" in ended.err


def test_files_are_shown_with_their_sizes_and_what_is_wrong_with_them(sharded: Path, tmp_path: Path) -> None:
    sound = {unmarked(row[0]): row[1:] for row in shell("inspect", sharded, "--files").rows}
    assert set(sound) == FILES and all(problem == "" for *_, problem in sound.values())
    damaged = Path(shutil.copytree(sharded, tmp_path / "damaged"))
    data_file(damaged, "__0_0.distcp").unlink()
    data_file(damaged, "__1_0.distcp").write_bytes(b"x")
    found = {unmarked(row[0]): row[1:] for row in shell("inspect", damaged, "--files").rows}
    assert found["__0_0.distcp"][0] == "" and found["__0_0.distcp"][2] == "no such file"
    assert found["__1_0.distcp"][0] == "1 B" and found["__1_0.distcp"][2] != ""


def test_ranks_are_shown_with_what_each_has_written(sharded: Path) -> None:
    rows = shell("inspect", sharded, "--ranks").rows
    assert [row[:3] for row in rows] == [["0", "2", rows[0][2]], ["1", "1", rows[1][2]]]
    assert sum(int(row[2]) for row in rows) == 7  # the sharded tensor has two chunks
