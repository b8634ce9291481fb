"""Nothing in the head of a safetensors file is believed before it fits together and fills the file."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustCheckpointError, RobustReader, RobustWriter
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.safetensors import parse_head, read_head
from tests.harness.damage import flip_bit


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parsed(header: Any, data_nbytes: int = 8) -> Any:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_head(text, 8 + len(text) + data_nbytes, "model.safetensors")


def test_a_head_by_safetensors_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3, 2), "b": torch.arange(5), "e": torch.empty(0, 4), "s": torch.tensor(True)}
    data = save(tensors, metadata={"note": "x"})
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    head = read_head(Disk(), str(path))
    assert not head.is_of_checkpoint
    assert head.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = head.tensors[name]
        assert (stored.dtype, stored.shape, stored.crc32) == (tensor.dtype, tuple(tensor.shape), None)
        assert data[stored.offset : stored.offset + stored.nbytes] == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{", "a JSON object in its header"),
        (b"\xff", "a JSON object in its header"),
        (b"[" * 200_000, "a JSON object in its header"),
        (b"[]", "a JSON object in its header"),
        ({"w": {**entry(), "more": 1}}, "dtype, shape and data_offsets"),
        ({"w": entry(dtype="F6_E2M3")}, "a dtype that this version can read"),
        ({"w": entry(dtype="F4", shape=[3])}, "an even number of values of F4|a dtype that this version can read"),
        ({"w": entry(shape=[-2])}, "dtype, shape and data_offsets"),
        ({"w": entry(shape=[2.0])}, "dtype, shape and data_offsets"),
        ({"w": entry(offsets=[0, 4, 8])}, "dtype, shape and data_offsets"),
        ({"w": entry(offsets=[0, 9])}, "expected 8 bytes of data for torch.float32"),
        ({"w": entry(shape=[3])}, "expected 12 bytes of data"),
        ({"w": entry(offsets=[8, 16])}, "expected data from byte 0 on, found from byte 8 on"),
        ({"w": entry(), "v": entry()}, "expected data from byte 8 on, found from byte 0 on"),
        ({"w": entry(), "v": entry(offsets=[8, 16])}, "a file of"),
        ({}, "a file of"),
        ({"__metadata__": {"x": 3}, "w": entry()}, "texts in __metadata__"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{"}, "w": entry()}, "a JSON object in DCP_SHARDING_INFO"),
        ({"__metadata__": {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[1,2]}}'}, "w": entry()}, "saved_offsets of 1"),
        ({"__metadata__": {"DCP_SHARDING_INFO": '{"w":[1]}'}, "w": entry()}, "saved_offsets of 1"),
        ({"__metadata__": {"robust_dcp.crc32": '{"w":"xyz"}'}, "w": entry()}, "a CRC-32 of 8 hexadecimal digits"),
        ({"__metadata__": {"robust_dcp.crc32": '{"w":7}'}, "w": entry()}, "a CRC-32 of 8 hexadecimal digits"),
    ],
)
def test_what_does_not_fit_together_is_refused(header: Any, problem: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=problem) as caught:
        parsed(header)
    assert caught.value.file == "model.safetensors"


@given(st.binary(max_size=80), st.integers(0, 100))
def test_bytes_of_any_kind_are_read_or_refused(data: bytes, data_nbytes: int) -> None:
    with contextlib.suppress(CorruptCheckpoint):
        parsed(data, data_nbytes)


@pytest.mark.parametrize("length", [1 << 63, 100_000_001, 50])
def test_a_length_that_cannot_be_is_refused_before_it_is_allocated(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 40)
    with pytest.raises(CorruptCheckpoint, match="a header of at most 42 bytes"):
        read_head(Disk(), str(path))


def test_a_damaged_head_never_gives_other_data(tmp_path: Path) -> None:
    """A bit is flipped in every fourth byte of a head: what loads is what was saved, or nothing."""
    state_dict = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int32)}
    writer = RobustWriter(tmp_path, layout="safetensors", files_per_rank=1)
    report = robust_dcp.save(state_dict, storage_writer=writer)
    path = tmp_path / report.files[0]
    sound = path.read_bytes()
    used = len(sound[8 : int.from_bytes(sound[:8], "little") + 8].rstrip()) + 20
    refused = 0
    for bit in range(0, 8 * used, 33):
        flip_bit(path, bit // 8, bit % 8)
        found = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int32)}
        try:
            robust_dcp.load(found, storage_reader=RobustReader(tmp_path, threads=1))
            assert all(torch.equal(found[name], value) for name, value in state_dict.items())
        except RobustCheckpointError:
            refused += 1
        flip_bit(path, bit // 8, bit % 8)
    assert refused > used // 8


def test_a_tensor_that_lies_elsewhere_than_the_metadata_says_is_refused(tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path, layout="safetensors", files_per_rank=1)
    report = robust_dcp.save({"a": torch.rand(3), "b": torch.rand(3)}, storage_writer=writer)
    path = tmp_path / report.files[0]
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a":{', b'"x":{').replace(b'"b":{', b'"a":{').replace(b'"x":{', b'"b":{'))
    with pytest.raises(CorruptCheckpoint, match="according to its head"):
        robust_dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path)
