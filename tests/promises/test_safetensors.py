"""What is saved as safetensors torch's Hugging Face reader and safetensors itself read, and we read theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustWriter, StorageError
from robust_dcp.storage.layouts.safetensors import DTYPES
from tests.harness.fingerprints import differences
from tests.harness.ranks import in_ranks, values
from tests.harness.state_dicts import pattern
from tests.support.torch_versions import HAS_SAFETENSORS

StateDict = dict[str, Any]
TABLE = {name: getattr(torch, name) for name in DTYPES}


def save(directory: Path | str, state_dict: StateDict, **options: Any) -> None:
    robust_dcp.save(state_dict, storage_writer=RobustWriter(directory, layout="safetensors", **options))


def load_by_stock(directory: Path | str, state_dict: StateDict) -> StateDict:
    dcp.load(state_dict, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    return state_dict


def tensors(seed: int) -> StateDict:
    shapes = [(), (0, 3), (1,), (5, 3), (64, 64), (1 << 20,)]
    named = {f"{name}.{shape}": (shape, dtype) for name, dtype in TABLE.items() for shape in shapes}
    named |= dict.fromkeys(('quo"te\\', "täglich 🙂\n", ""), ((3,), torch.float32))
    return {name: pattern(name, shape, dtype, seed) for name, (shape, dtype) in named.items()}


def test_safetensors_gives_back_every_dtype_of_the_table(tmp_path: Path) -> None:
    state = {name: pattern(name, (5, 3), dtype, 1) for name, dtype in TABLE.items()}
    save_file(state, tmp_path / "w.safetensors")
    assert differences(state, load_file(tmp_path / "w.safetensors")) == []
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert {name: file.get_slice(name).get_dtype() for name in TABLE} == DTYPES


@pytest.mark.parametrize("options", [{}, {"direct": False, "files_per_rank": 1}], ids=str)
def test_safetensors_and_stocks_reader_read_our_files(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, {**tensors(1), "step": 3, "double": torch.rand(3, dtype=torch.complex128)}, **options)
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert differences(tensors(1), found) == []
    if HAS_SAFETENSORS:
        assert differences(tensors(1), load_by_stock(tmp_path, tensors(2))) == []


def test_another_planner_than_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="pass planner=RobustPlanner") as caught:
        dcp.save({"w": torch.rand(3)}, storage_writer=RobustWriter(tmp_path, layout="safetensors"))
    assert isinstance(caught.value, (ValueError, dcp.api.CheckpointException))


def sharded(seed: int, *, floating: bool = False) -> StateDict:
    """DTensors cut along one and two dimensions, replicas, and plain tensors; the same global values on all ranks."""
    size = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (min(2, size), max(size // 2, 1)))
    rows, columns, both, all_ranks = [Shard(0)], [Shard(1)], [Shard(0), Shard(1)], [Replicate()]
    cuts: dict[str, tuple[tuple[int, ...], torch.dtype, Any, Any]] = {
        "rows": ((13, 6), torch.float32, line, rows),
        "columns": ((5, 9), torch.bfloat16, line, columns),
        "grid": ((8, 12), torch.int64, grid, both),
        "replicated": ((7,), torch.float16, line, all_ranks),
        "large": ((1024, 1024), torch.float32, line, rows),
    }
    return {
        name: distribute_tensor(pattern(name, shape, dtype, seed), mesh, placements)
        for name, (shape, dtype, mesh, placements) in cuts.items()
        if dtype.is_floating_point or not floating
    }


def save_both_ways(path: str) -> None:
    save(f"{path}/ours", {**sharded(1), "step": 7, "double": pattern("double", (3,), torch.complex128, 1)})
    if HAS_SAFETENSORS:
        for name, consolidate in (("stock", False), ("consolidated", True)):
            writer = dcp.HuggingFaceStorageWriter(
                f"{path}/{name}", save_distributed=True, enable_consolidation=consolidate
            )
            dcp.save(sharded(1, floating=consolidate), storage_writer=writer)  # it fails to consolidate integers


def load_both_ways(path: str) -> list[str]:
    ours = {**sharded(2), "step": 0, "double": torch.zeros(3, dtype=torch.complex128)}
    robust_dcp.load(ours, checkpoint_id=f"{path}/ours")
    wrong = differences({**sharded(1), "step": 7, "double": pattern("double", (3,), torch.complex128, 1)}, ours)
    if HAS_SAFETENSORS:
        wrong += differences(sharded(1), load_by_stock(f"{path}/ours", sharded(2)))
        for name in ("stock", "consolidated"):
            assert not os.path.exists(f"{path}/{name}/.metadata")
            found = sharded(2, floating=name == "consolidated")
            robust_dcp.load(found, checkpoint_id=f"{path}/{name}")
            wrong += differences(sharded(1, floating=name == "consolidated"), found)
    return wrong


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 4), (4, 1)])
def test_what_some_ranks_save_either_way_any_number_of_ranks_load(
    tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    values(in_ranks(saved_by, save_both_ways, str(tmp_path)))
    shards = {path.name.split("-model-")[0] for path in (tmp_path / "ours").glob("*.safetensors")}
    assert shards == {f"shard-{rank:05d}" for rank in range(1, saved_by + 1)}
    assert values(in_ranks(loaded_by, load_both_ways, str(tmp_path))) == [[]] * loaded_by


@pytest.mark.parametrize(
    ("second", "offset", "wanted", "words"),
    [
        (torch.zeros(4), None, 4, "each chunk once"),
        (torch.zeros(4), 9, 13, "expected 13 elements in the chunks, found 8"),
        (torch.arange(4), 4, 8, r"expected chunks of torch\.float32"),
    ],
    ids=["a chunk twice", "a gap", "two dtypes"],
)
def test_chunks_that_do_not_make_up_a_tensor_are_refused(
    second: torch.Tensor, offset: int | None, wanted: int, words: str, tmp_path: Path
) -> None:
    save_file({"w": torch.rand(4)}, tmp_path / "a.safetensors")
    told = None if offset is None else {"DCP_SHARDING_INFO": f'{{"w":{{"saved_offsets":[{offset}]}}}}'}
    save_file({"w": second}, tmp_path / "b.safetensors", metadata=told)
    with pytest.raises(CorruptCheckpoint, match=words):
        robust_dcp.load({"w": torch.zeros(wanted)}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("before", ["torch", "safetensors", "a file of somebody else"])
def test_neither_a_checkpoint_nor_a_file_of_others_is_replaced_or_joined(
    tmp_path: Path, before: Any, overwrite: bool
) -> None:
    state = {"w": torch.rand(9)}
    if before in ("torch", "safetensors"):
        robust_dcp.save(state, storage_writer=RobustWriter(tmp_path, layout=before))
    else:
        save_file(state, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageError, match=r"readers of safetensors take every file|already exists|shard-00001"):
        save(tmp_path, {"w": torch.zeros(9)}, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == names
    found = {"w": torch.zeros(9)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert differences(state, found) == []
