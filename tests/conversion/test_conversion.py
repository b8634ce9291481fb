"""Conversions of checkpoints and files of ``torch.save``: whole tensors, in bounded memory, whole or not at all."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from robust_dcp import RobustReader, RobustWriter
from robust_dcp.conversion import Rules, convert
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.layouts import LAYOUTS
from robust_dcp.storage.pieces import Piece, PieceReader, boxes_of
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


# --- memory

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    state = {"large": torch.rand(24, MIB // 4), **{f"w{number}": torch.rand(300, 1000) for number in range(9)}}
    robust_dcp.save(state, checkpoint_id=tmp_path / "source")
    gc.collect()
    gc.disable()
    yield tmp_path / "source"
    gc.enable()


@pytest.mark.parametrize(
    ("form", "layout"), [("dcp", "torch"), ("dcp", "safetensors"), ("safetensors", ""), ("torch", "")]
)
def test_few_pieces_are_in_memory_at_a_time(
    form: str, layout: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most_nbytes = 0
    read, lock = PieceReader.read, threading.Lock()

    def watched(self: PieceReader, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        nonlocal most_nbytes
        values = read(self, pieces)
        with lock:
            alive.extend(map(weakref.ref, values))
            most_nbytes = max(most_nbytes, sum(value.nbytes for each in alive if (value := each()) is not None))
        return values

    monkeypatch.setattr(PieceReader, "read", watched)
    convert(
        *(source, tmp_path / "made"),
        form=form,  # type: ignore[arg-type]
        layout=layout or "torch",
        buffer_nbytes=4 * MIB,
    )
    assert len(alive) > 20
    # Two threads write, each with half of the buffer, while as much is read.
    assert most_nbytes <= 6 * MIB


# --- targets

SMALL = {"a": torch.arange(100.0), "b": torch.ones(7, 5), "c": torch.zeros(3, dtype=torch.int64)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    robust_dcp.save(dict(SMALL), checkpoint_id=tmp_path / "small")
    return tmp_path / "small"


def test_a_converted_checkpoint_names_the_place_where_it_ends(small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path / "target", form="dcp")
    meta = RobustReader(tmp_path / "target").read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == str(tmp_path / "target")


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_many_calls_at_once_each_make_a_whole_target(form: Any, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: convert(small, target, form=form, overwrite=True), range(12)))
    assert differences(dict(SMALL), torch.load(target) if form == "torch" else loaded(target)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"small", "target"}


def loaded(path: Path) -> StateDict:
    state = {name: torch.zeros_like(value) for name, value in SMALL.items()}
    robust_dcp.load(state, checkpoint_id=path)
    return state


# --- files of torch.save


def state() -> dict[str, Any]:
    whole = torch.randn(40, 30)
    return {
        "whole": torch.randn(50, 20),
        "turned": whole.t(),
        "half": whole[20:],
        "tied": whole,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(4, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        "inner": (torch.ones(3), 7),
    }


def flip(path: Path, record: str) -> None:
    with zipfile.ZipFile(path) as archive:
        info = next(each for each in archive.infolist() if each.filename.endswith(record))
        data = archive.read(info)
    whole = bytearray(path.read_bytes())
    whole[whole.index(data, info.header_offset) + len(data) // 2] ^= 4
    path.write_bytes(whole)


def test_tensors_of_all_kinds_pass_as_they_were(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "made", form="dcp", buffer_nbytes=2000)
    convert(tmp_path / "made", tmp_path / "back.pt", form="torch")
    expected, found = torch.load(tmp_path / "file.pt"), torch.load(tmp_path / "back.pt")
    for each in (expected, found):
        each["sparse"], each["quantized"] = each["sparse"].to_dense(), each["quantized"].dequantize()
        each["complex"] = each["complex"].resolve_conj()
    expected["inner"] = list(expected["inner"])
    assert differences(expected, found) == []


def test_a_file_with_a_flipped_bit_is_refused_and_one_without_checksums_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(9), "b": torch.arange(3.0) + 1}, path)
    flip(path, "data/1")
    with pytest.raises(CorruptCheckpoint, match=r"data/1"):
        convert(path, tmp_path / "made", form="dcp")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(9)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    convert(path, tmp_path / "made", form="dcp")
    with pytest.raises(ValueError, match=r"is a file of torch\.save already"):
        convert(path, tmp_path / "other", form="torch")


class _Own:
    pass


class _AsksForCode:
    def __reduce__(self) -> Any:
        return os.getpid, ()


@pytest.mark.parametrize(
    ("value", "named"), [(_Own(), "test_conversion._Own"), (_AsksForCode(), f"{os.name}.getpid")], ids=["class", "code"]
)
def test_the_class_that_a_file_may_not_ask_for_is_named(value: Any, named: str, tmp_path: Path) -> None:
    torch.save({"a": value}, tmp_path / "file")
    with pytest.raises(UnsafeCheckpoint, match="is not plain data") as refused:
        convert(tmp_path / "file", tmp_path / "made", form="dcp")
    assert named in refused.value.message
    assert "weights_only` set to `False`" not in refused.value.message  # no advice to read it with less care


@pytest.mark.parametrize("content", [b"x\n", b"", b"PK\x03\x04 and so on", bytes(100)])
def test_a_file_of_another_kind_is_none_of_torch_save(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"expected a file of torch\.save"):
        convert(tmp_path / "file", tmp_path / "made", form="dcp")


def test_lists_are_lists_again_and_a_list_that_has_lost_an_item_is_a_dict(tmp_path: Path) -> None:
    made = {"list": [torch.ones(1), {"x": torch.ones(2)}], "dict": {"0": torch.ones(3), "1": 4}}
    dcp.save(made, checkpoint_id=tmp_path / "stock", no_dist=True)
    convert(tmp_path / "stock", tmp_path / "back.pt", form="torch")
    assert differences(torch.load(tmp_path / "back.pt"), made) == []
    rules = Rules(exclude=("list.0",), rename=(("dict.1", "count"),))
    convert(tmp_path / "stock", tmp_path / "part.pt", form="torch", rules=rules)
    part = torch.load(tmp_path / "part.pt")
    assert list(part["list"]) == [1] and part["count"] == 4 and list(part["dict"]) == ["0"]
