"""A checkpoint of any layout and number of ranks as one Hugging Face model, in bounded memory, whole or not at all."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import robust_dcp
from robust_dcp import RobustWriter
from robust_dcp.conversion import convert
from robust_dcp.storage.layouts import LAYOUTS
from robust_dcp.storage.pieces import boxes_of
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.storage.test_safetensors_judges import floating, sharded
from tests.support.torch_versions import needs_consolidation

StateDict = dict[str, Any]

each_layout = pytest.mark.parametrize("layout", [layout.name for layout in LAYOUTS])


def model_in(directory: Path) -> StateDict:
    """What readers of Hugging Face models find: by way of the index."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(directory / name) for name in set(index["weight_map"].values())}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def save_sharded(path: str, layout: str) -> None:
    robust_dcp.save(sharded(1), storage_writer=RobustWriter(path, layout=layout))


@each_layout
def test_what_ranks_hold_in_shards_becomes_whole_tensors(tmp_path: Path, layout: str) -> None:
    values(run_ranks(4, save_sharded, str(tmp_path / "checkpoint"), layout))
    convert(tmp_path / "checkpoint", tmp_path / "model", form="safetensors", buffer_nbytes=1 << 20)
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


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 50))
def test_boxes_follow_each_other_in_the_data(shape: tuple[int, ...], max_numel: int) -> None:
    numbers = np.arange(prod(shape)).reshape(shape)
    found = []
    for offsets, lengths in boxes_of(shape, max_numel):
        assert prod(lengths) <= max_numel
        box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        found += box.reshape(-1).tolist()
    assert found == numbers.reshape(-1).tolist()
