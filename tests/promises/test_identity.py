"""A record is the item that the metadata names, or the load says that it is not."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import robust_dcp
from robust_dcp import CorruptCheckpoint, ReadOptions, RobustReader, RobustWriter
from tests.harness.ranks import run_ranks, values

Layout = Literal["torch", "safetensors"]

_SIZES = {"small": 5, "medium": 40_000, "large": 700_000}


def _state(value: float) -> dict[str, Any]:
    return {f"{size}{n}": torch.full((_SIZES[size],), float(value + n)) for size in _SIZES for n in range(6)} | {
        "one": ("an", "object"),
        "two": ("an", "object"),
    }


def _swap(directory: Path, one: MetadataIndex, two: MetadataIndex) -> None:
    """Let the metadata say of two items that each lies where the other one does."""
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    places = metadata.storage_data
    places[one], places[two] = places[two], places[one]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / ".robust_dcp.index").unlink(missing_ok=True)


def _index(name: str) -> MetadataIndex:
    return MetadataIndex(name, torch.Size([0])) if name[-1].isdigit() else MetadataIndex(name)


def _targets(names: list[str]) -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in _state(0).items() if name in names and name[-1].isdigit()}


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize(
    ("one", "two"), [("small0", "small1"), ("medium0", "medium1"), ("large0", "large1"), ("one", "two")]
)
def test_two_items_whose_places_are_swapped_are_found(layout: Layout, one: str, two: str, tmp_path: Path) -> None:
    robust_dcp.save(_state(1.0), storage_writer=RobustWriter(tmp_path, layout=layout))
    _swap(tmp_path, _index(one), _index(two))
    for names in ([one], [one, two], list(_state(0))):
        state = _targets(names) | {name: None for name in names if not name[-1].isdigit()}
        with pytest.raises(CorruptCheckpoint, match=f"{one}|{two}"):
            robust_dcp.load(state, checkpoint_id=tmp_path)
    verify = [sys.executable, "-m", "robust_dcp.cli", "verify", os.fspath(tmp_path)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert one in done.stdout + done.stderr or two in done.stdout + done.stderr


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_a_slice_of_another_item_is_found(layout: Layout, tmp_path: Path) -> None:
    robust_dcp.save(_state(1.0), storage_writer=RobustWriter(tmp_path, layout=layout))
    _swap(tmp_path, _index("large0"), _index("large1"))
    state = _targets(["large0"])
    reader = RobustReader(tmp_path, options=ReadOptions(verify_checksums="all"))
    with pytest.raises(CorruptCheckpoint, match="large0"):
        robust_dcp.load(state, storage_reader=reader)


def _save_shards(directory: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(4 * 30_000, dtype=torch.float32).reshape(4, 30_000)
    robust_dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=directory)


def test_two_shards_of_one_tensor_whose_places_are_swapped_are_found(tmp_path: Path) -> None:
    values(run_ranks(2, _save_shards, tmp_path))
    _swap(tmp_path, MetadataIndex("w", torch.Size([0, 0])), MetadataIndex("w", torch.Size([2, 0])))
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
    verify = [sys.executable, "-m", "robust_dcp.cli", "verify", os.fspath(tmp_path)]
    assert subprocess.run(verify, capture_output=True).returncode == 1
    state = {"a": torch.zeros(6)}
    reader = RobustReader(tmp_path, verify_checksums=False)
    robust_dcp.load(state, storage_reader=reader)
    assert torch.equal(state["a"], torch.ones(6))


def test_whoever_verifies_nothing_loads_what_lies_there(tmp_path: Path) -> None:
    robust_dcp.save(_state(1.0), checkpoint_id=tmp_path)
    _swap(tmp_path, _index("medium0"), _index("medium1"))
    state = _targets(["medium0"])
    robust_dcp.load(state, storage_reader=RobustReader(tmp_path, verify_checksums=False))
    assert state["medium0"][0] == 2.0
