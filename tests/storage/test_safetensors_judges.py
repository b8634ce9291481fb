"""The layout ``safetensors`` as others read it: torch's Hugging Face reader, and safetensors itself."""

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
from robust_dcp import CorruptCheckpoint, RobustCheckpointError, RobustWriter, StorageError
from robust_dcp.storage.layouts.safetensors import DTYPES
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.storage.test_record import tensor_of
from tests.support.torch_versions import HAS_SAFETENSORS, needs_safetensors

StateDict = dict[str, Any]

TABLE = [getattr(torch, name) for name in DTYPES]


def save(directory: Path, state_dict: StateDict, **options: Any) -> None:
    robust_dcp.save(state_dict, storage_writer=RobustWriter(directory, layout="safetensors", **options))


def load_by_stock(directory: Path | str, state_dict: StateDict) -> StateDict:
    dcp.load(state_dict, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    return state_dict


def blank(state_dict: StateDict) -> StateDict:
    return {name: tensor_of(value.dtype, tuple(value.shape), 999) for name, value in state_dict.items()}


def tensors() -> StateDict:
    state_dict = {
        f"{dtype}.{list(shape)}": tensor_of(dtype, shape, seed)
        for seed, dtype in enumerate(TABLE)
        for shape in [(), (0, 3), (1,), (5, 3), (64, 64), (1 << 20,)]
    }
    return {**state_dict, 'quo"te\\': torch.rand(3), "täglich 🙂\n": torch.rand(4), "": torch.rand(5)}


@pytest.mark.parametrize("dtype", TABLE, ids=str)
def test_safetensors_gives_back_every_dtype_of_the_table(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, (5, 3))
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    assert differences({"w": tensor}, load_file(tmp_path / "w.safetensors")) == []
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert file.get_slice("w").get_dtype() == DTYPES[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("options", [{}, {"direct": False, "files_per_rank": 1}])
def test_safetensors_opens_our_files(tmp_path: Path, options: dict[str, Any]) -> None:
    state_dict = tensors()
    save(tmp_path, {**state_dict, "step": 3, "double": torch.rand(3, dtype=torch.complex128)}, **options)
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert {*load_file(path)} <= {*found}
    assert differences(state_dict, found) == []


@needs_safetensors
def test_stock_s_reader_reads_our_files(tmp_path: Path) -> None:
    state_dict = tensors()
    save(tmp_path, {**state_dict, "step": 3})
    assert differences(state_dict, load_by_stock(tmp_path, blank(state_dict))) == []


def test_another_planner_than_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="pass planner=RobustPlanner") as caught:
        dcp.save({"w": torch.rand(3)}, storage_writer=RobustWriter(tmp_path, layout="safetensors"))
    assert isinstance(caught.value, (ValueError, dcp.api.CheckpointException))


def sharded(seed: int) -> StateDict:
    """DTensors cut along one and two dimensions, replicas, and plain tensors; the same global values on all ranks."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2)) if size > 1 else init_device_mesh("cpu", (1, 1))
    return {
        "rows": distribute_tensor(tensor_of(torch.float32, (13, 6), seed), line, [Shard(0)]),
        "columns": distribute_tensor(tensor_of(torch.bfloat16, (5, 9), seed + 1), line, [Shard(1)]),
        "grid": distribute_tensor(tensor_of(torch.int64, (8, 12), seed + 2), grid, [Shard(0), Shard(1)]),
        "replicated": distribute_tensor(tensor_of(torch.float16, (7,), seed + 3), line, [Replicate()]),
        "large": distribute_tensor(tensor_of(torch.float32, (1024, 1024), seed + 4), line, [Shard(0)]),
        "plain": tensor_of(torch.uint8, (5,), seed + 5),
    }


def save_sharded(path: str) -> None:
    state_dict = {**sharded(1), "step": 7, "double": tensor_of(torch.complex128, (3,), 9)}
    robust_dcp.save(state_dict, storage_writer=RobustWriter(path, layout="safetensors"))


def load_sharded(path: str) -> list[str]:
    expected = sharded(1)
    found = differences(expected, load_by_stock(path, sharded(50))) if HAS_SAFETENSORS else []
    ours = {**sharded(50), "step": 0, "double": torch.zeros(3, dtype=torch.complex128)}
    robust_dcp.load(ours, checkpoint_id=path)
    return found + differences({**expected, "step": 7, "double": tensor_of(torch.complex128, (3,), 9)}, ours)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 4), (4, 1)])
def test_what_some_ranks_save_any_number_of_ranks_load(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    values(run_ranks(saved_by, save_sharded, str(tmp_path)))
    shards = {name.split("-model-")[0] for name in os.listdir(tmp_path) if name.endswith(".safetensors")}
    assert shards == {f"shard-{rank:05d}" for rank in range(1, saved_by + 1)}
    assert values(run_ranks(loaded_by, load_sharded, str(tmp_path))) == [[]] * loaded_by


def floating(seed: int) -> StateDict:
    """What stock's consolidation takes: it fails on integers."""
    return {name: value for name, value in sharded(seed).items() if value.is_floating_point()}


def save_by_stock(path: str, consolidate: bool) -> None:
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=consolidate)
    dcp.save(floating(1) if consolidate else sharded(1), storage_writer=writer)


def load_by_us(path: str, consolidated: bool) -> list[str]:
    make = floating if consolidated else sharded
    found = make(50)
    robust_dcp.load(found, checkpoint_id=path)
    return differences(make(1), found)


@needs_safetensors
@pytest.mark.parametrize("consolidate", [False, True])
def test_our_reader_reads_what_stock_s_writer_wrote(tmp_path: Path, consolidate: bool) -> None:
    values(run_ranks(2, save_by_stock, str(tmp_path), consolidate))
    assert not (tmp_path / ".metadata").exists()
    n_ranks = 1 if consolidate else 4
    assert values(run_ranks(n_ranks, load_by_us, str(tmp_path), consolidate)) == [[]] * n_ranks


def test_chunks_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.rand(4)}, tmp_path / "a.safetensors")
    save_file({"w": torch.rand(4)}, tmp_path / "b.safetensors")
    with pytest.raises(RobustCheckpointError, match="each chunk once") as caught:
        robust_dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value, CorruptCheckpoint)
    second_half = {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[9]}}'}
    save_file({"w": torch.rand(4)}, tmp_path / "b.safetensors", metadata=second_half)
    with pytest.raises(RobustCheckpointError, match="expected 13 elements in the chunks, found 8"):
        robust_dcp.load({"w": torch.zeros(13)}, checkpoint_id=tmp_path)


def test_chunks_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.rand(4)}, tmp_path / "a.safetensors")
    second_half = {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[4]}}'}
    save_file({"w": torch.arange(4)}, tmp_path / "b.safetensors", metadata=second_half)
    with pytest.raises(RobustCheckpointError, match=r"expected chunks of torch\.float32"):
        robust_dcp.load({"w": torch.zeros(8)}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_committed_checkpoint_is_not_replaced(tmp_path: Path, layout: str, overwrite: bool) -> None:
    state_dict = {"w": torch.rand(9)}
    robust_dcp.save(state_dict, storage_writer=RobustWriter(tmp_path, layout=layout))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageError, match=r"readers of safetensors take every file|already exists"):
        save(tmp_path, {"w": torch.zeros(9)}, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == before
    found = {"w": torch.zeros(9)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert differences(state_dict, found) == []


def test_files_of_others_are_neither_removed_nor_joined(tmp_path: Path) -> None:
    name = "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.rand(9)}, tmp_path / name)
    with pytest.raises(StorageError, match=name):
        save(tmp_path, {"w": torch.zeros(9)})
    assert os.listdir(tmp_path) == [name]
