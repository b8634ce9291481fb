"""RobustReader in stock ``load``: every writer's checkpoints, and only the bytes that are needed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.reader import RobustReader
from tests.storage.checkpoints import (
    assert_same,
    load,
    read_box,
    rewritten,
    save_stock,
    state_dict_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_megatrons_planner_is_served(tmp_path: Path) -> None:
    strategies = pytest.importorskip("megatron.core.dist_checkpointing.strategies.torch")
    save_stock(tmp_path)
    planner = strategies.MCoreLoadPlanner()
    assert_same(load(tmp_path, state_dict_of(fill=0), planner), state_dict_of())


def test_tensors_of_other_kinds_are_left_to_torch(tmp_path: Path) -> None:
    dense = torch.eye(3)
    save_stock(tmp_path, {"w": dense})
    metadata = decode_metadata((tmp_path / ".metadata").read_bytes(), "")
    buffer = io.BytesIO()
    torch.save(torch.nn.Parameter(dense), buffer)  # not what a stock writer leaves, but what torch.load understands
    (tmp_path / "__1_0.distcp").write_bytes(buffer.getvalue())
    (index,) = metadata.storage_data
    metadata.storage_data[index] = filesystem._StorageInfo("__1_0.distcp", 0, len(buffer.getvalue()))
    metadata.storage_meta = None
    (tmp_path / ".metadata").write_bytes(encode_metadata(metadata))
    assert_same(load(tmp_path, {"w": torch.zeros(3, 3)}), {"w": dense})

    damaged = bytearray(buffer.getvalue())
    damaged[damaged.index(dense.numpy().tobytes()) + 1] ^= 1
    (tmp_path / "__1_0.distcp").write_bytes(damaged)
    with pytest.raises(CorruptCheckpoint, match=r"'w at .*CRC-32"):
        load(tmp_path, {"w": torch.zeros(3, 3)})


@pytest.mark.parametrize("ours", [False, True])
def test_values_are_converted_to_the_dtype_that_is_asked_for(ours: bool, tmp_path: Path) -> None:
    value = torch.tensor([1.5, 2.5, -3.0])
    save_stock(tmp_path, {"w": value})
    if ours:
        rewritten(tmp_path, "w", value)
    assert_same(load(tmp_path, {"w": torch.zeros(3, dtype=torch.bfloat16)}), {"w": value.to(torch.bfloat16)})


BOXES = [
    ([0, 0, 0], [6, 4, 3]),
    ([2, 0, 0], [3, 4, 3]),
    ([5, 3, 2], [1, 1, 1]),
    ([1, 1, 0], [1, 2, 3]),
    ([0, 1, 1], [6, 2, 2]),
    ([0, 0, 2], [6, 4, 1]),
    ([3, 0, 0], [0, 4, 3]),
]


@pytest.mark.parametrize("record", ["ours", "stock", "transposed"])
@pytest.mark.parametrize(("offsets", "lengths"), BOXES)
def test_any_box_of_a_tensor_is_read(record: str, offsets: list[int], lengths: list[int], tmp_path: Path) -> None:
    value = torch.arange(72, dtype=torch.int32).reshape(6, 4, 3)
    stored = value.permute(2, 1, 0).contiguous().permute(2, 1, 0) if record == "transposed" else value
    save_stock(tmp_path, {"w": stored})
    if record == "ours":
        rewritten(tmp_path, "w", value)
    box = value[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    for target in (
        torch.full(lengths, -1, dtype=torch.int32),
        torch.full(lengths, -1.0, dtype=torch.float64),
        torch.full([2 * n for n in lengths], -1, dtype=torch.int32)[tuple(slice(0, 2 * n, 2) for n in lengths)],
    ):
        read_box(tmp_path, target, offsets, lengths)
        assert torch.equal(target.to(torch.int32), box)


def test_a_slice_reads_its_own_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.rand(1000, 1000)
    save_stock(tmp_path, {"w": value})
    rewritten(tmp_path, "w", value)
    read: list[int] = []
    pread_into = Disk.pread_into

    def counted(self: Disk, file: Any, buffer: Any, offset: int) -> int:
        if file.path.endswith(".distcp"):
            read.append(memoryview(buffer).nbytes)
        return pread_into(self, file, buffer, offset)

    monkeypatch.setattr(Disk, "pread_into", counted)
    target = torch.zeros(10, 1000)
    read_box(tmp_path, target, [500, 0], [10, 1000])
    assert torch.equal(target, value[500:510])
    assert 40_000 <= sum(read) < 41_000


def test_a_whole_tensor_is_read_straight_into_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.rand(1000)
    save_stock(tmp_path, {"w": value})
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    target = torch.zeros(1000)
    read_box(tmp_path, target, [0], [1000])
    assert torch.equal(target, value)


def test_a_coordinator_can_send_the_metadata_as_bytes(tmp_path: Path) -> None:
    save_stock(tmp_path)
    data = RobustReader(tmp_path).source.metadata_bytes()
    other = RobustReader("/somewhere/else")
    assert (
        other.source.decode_metadata(data).state_dict_metadata
        == RobustReader(tmp_path).read_metadata().state_dict_metadata
    )
