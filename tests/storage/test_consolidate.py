"""A checkpoint of any layout and number of ranks as one Hugging Face model, in bounded memory, whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustReader, RobustWriter, StorageError
from robust_dcp.storage import consolidate
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts import LAYOUTS
from robust_dcp.storage.pieces import boxes_of
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.storage.test_safetensors_judges import blank, floating, sharded, tensors
from tests.support.simulated_disk import WatchedDisk, runs_with_each_call_failing
from tests.support.torch_versions import needs_consolidation

StateDict = dict[str, Any]

each_layout = pytest.mark.parametrize("layout", [layout.name for layout in LAYOUTS])


def save(directory: Path, state_dict: StateDict, layout: str = "torch") -> None:
    robust_dcp.save(state_dict, storage_writer=RobustWriter(directory, layout=layout))


def model_in(directory: Path) -> StateDict:
    """What readers of Hugging Face models find: by way of the index."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(directory / name) for name in set(index["weight_map"].values())}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@each_layout
@pytest.mark.parametrize("options", [{}, {"buffer_bytes": 1000}, {"max_shard_bytes": 1 << 20, "buffer_bytes": 1 << 16}])
def test_the_model_holds_the_tensors(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    state_dict = tensors() if "max_shard_bytes" not in options else {f"w{n}": torch.rand(300, 700) for n in range(5)}
    if options.get("buffer_bytes") == 1000:
        state_dict = {name: value for name, value in state_dict.items() if value.nbytes < 1 << 16}
    save(tmp_path / "checkpoint", {**state_dict, "step": 3}, layout)
    report = consolidate(tmp_path / "checkpoint", tmp_path / "model", **options)
    assert differences(state_dict, model_in(tmp_path / "model")) == []
    assert sorted(report.files) == sorted(os.listdir(tmp_path / "model"))
    assert report.skipped == ("step",)
    assert (report.tensors, report.nbytes) == (len(state_dict), sum(value.nbytes for value in state_dict.values()))
    if "max_shard_bytes" in options:
        assert len(report.files) == 6
        assert report.files[0] == "model-00001-of-00005.safetensors"
    found = blank(state_dict)
    robust_dcp.load(found, checkpoint_id=tmp_path / "model")
    assert differences(state_dict, found) == []


def save_sharded(path: str, layout: str) -> None:
    robust_dcp.save(sharded(1), storage_writer=RobustWriter(path, layout=layout))


@each_layout
def test_what_ranks_hold_in_shards_becomes_whole_tensors(tmp_path: Path, layout: str) -> None:
    values(run_ranks(4, save_sharded, str(tmp_path / "checkpoint"), layout))
    consolidate(tmp_path / "checkpoint", tmp_path / "model", buffer_bytes=1 << 20)
    expected = values(run_ranks(1, whole_tensors))[0]
    assert differences(expected, model_in(tmp_path / "model")) == []


def whole_tensors() -> StateDict:
    return {name: getattr(value, "to_local", lambda value=value: value)() for name, value in sharded(1).items()}


def save_floating(path: str) -> None:
    robust_dcp.save(floating(1), storage_writer=RobustWriter(path, layout="safetensors"))


def whole_floating() -> StateDict:
    return {name: value.to_local() for name, value in floating(1).items()}


@needs_consolidation
def test_stock_s_own_tool_consolidates_our_shards(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    values(run_ranks(2, save_floating, str(tmp_path / "checkpoint")))
    names = values(run_ranks(1, whole_floating))[0]
    (tmp_path / "model").mkdir()
    consolidate_safetensors_files(
        str(tmp_path / "checkpoint"), str(tmp_path / "model"), fqn_to_index_mapping=dict.fromkeys(names, 1)
    )
    assert differences(names, load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")) == []


def test_a_stock_checkpoint_can_be_consolidated(tmp_path: Path) -> None:
    state_dict = {"a": torch.rand(30, 7), "b": torch.arange(9), "c": torch.rand(5).to(torch.bfloat16)}
    dcp.save(state_dict, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    consolidate(tmp_path / "checkpoint", tmp_path / "model")
    assert differences(state_dict, model_in(tmp_path / "model")) == []


def test_keys_choose_tensors(tmp_path: Path) -> None:
    state_dict = {"a": torch.rand(3), "b": torch.rand(3, dtype=torch.complex128), "o": "object"}
    save(tmp_path / "checkpoint", state_dict)
    with pytest.raises(ValueError, match=r"cannot hold 'b', a tensor of torch.complex128; pass keys without it"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model")
    with pytest.raises(ValueError, match="has no 'x'"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model", keys=["a", "x"])
    with pytest.raises(ValueError, match="has an object and no tensor called 'o'"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model", keys=["a", "o"])
    assert not (tmp_path / "model").exists()
    assert consolidate(tmp_path / "checkpoint", tmp_path / "model", keys=["a"]).skipped == ()
    assert differences({"a": state_dict["a"]}, model_in(tmp_path / "model")) == []


def test_a_directory_with_a_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": torch.rand(3)})
    consolidate(tmp_path / "checkpoint", tmp_path / "model")
    with pytest.raises(StorageError, match=r"holds model-00001-of-00001\.safetensors"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model")


@pytest.mark.parametrize("option", ["max_shard_bytes", "buffer_bytes"])
def test_nothing_is_no_limit(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        consolidate(tmp_path, tmp_path / "model", **{option: 0})


def test_a_checkpoint_without_tensors_gives_an_empty_model(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"step": 1})
    report = consolidate(tmp_path / "checkpoint", tmp_path / "model")
    assert (report.tensors, report.skipped) == (0, ("step",))
    assert load_file(tmp_path / "model" / report.files[0]) == {}


@each_layout
def test_damage_is_found_and_leaves_nothing(tmp_path: Path, layout: str) -> None:
    tensor = torch.rand(1000)
    save(tmp_path / "checkpoint", {"w": tensor}, layout)
    info = next(iter(RobustReader(tmp_path / "checkpoint").read_metadata().storage_data.values()))
    path = tmp_path / "checkpoint" / info.relative_path
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model")
    assert os.listdir(tmp_path / "model") == []


def test_a_call_that_fails_leaves_a_whole_model_or_none(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {f"w{n}": torch.full((50,), float(n)) for n in range(3)})
    numbers = itertools.count()
    outputs: list[Path] = []

    def run(disk: WatchedDisk) -> None:
        outputs.append(tmp_path / f"model{next(numbers)}")
        consolidate(tmp_path / "checkpoint", outputs[-1], max_shard_bytes=300, disk=disk)

    runs_with_each_call_failing(run, PosixDisk)
    assert len(outputs) > 20
    found = {tuple(sorted(os.listdir(output))) if output.exists() else () for output in outputs}
    assert found == {(), tuple(sorted(os.listdir(outputs[0])))}


def test_memory_is_bounded_by_the_buffer(tmp_path: Path) -> None:
    class Noted(PosixDisk):
        largest = 0

        def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
            buffers = data if isinstance(data, list) else [data]
            self.largest = max(self.largest, sum(memoryview(buffer).nbytes for buffer in buffers))
            super().pwrite(file, data, offset)

    state_dict = {"large": torch.rand(512, 3000), "wide": torch.rand(3, 300_000)}
    save(tmp_path / "checkpoint", state_dict)
    disk = Noted()
    consolidate(tmp_path / "checkpoint", tmp_path / "model", buffer_bytes=100_000, disk=disk)
    assert disk.largest <= 100_000
    assert differences(state_dict, model_in(tmp_path / "model")) == []


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 50))
def test_boxes_follow_each_other_in_the_data(shape: tuple[int, ...], max_numel: int) -> None:
    numbers = np.arange(prod(shape)).reshape(shape)
    found = []
    for offsets, lengths in boxes_of(shape, max_numel):
        assert prod(lengths) <= max_numel
        box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        found += box.reshape(-1).tolist()
    assert found == numbers.reshape(-1).tolist()
