"""Boxes of stored tensors: whatever part is wanted, in whatever order the target holds it, it is that part."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustReader, RobustWriter
from robust_dcp.staging.blocks import Block, BlockLease

MIB = 1 << 20
N = 400_000
Box = tuple[slice, ...]


class Boxes(dcp.DefaultLoadPlanner):
    """Reads a box of each tensor into the target of its name."""

    comparison: Any = None

    def __init__(self, boxes: dict[str, Box]) -> None:
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, box in self.boxes.items():
            target, whole = self.state_dict[name], torch.Size([0] * len(box))
            index, at = MetadataIndex(name, whole, 0), torch.Size([part.start or 0 for part in box])
            items.append(ReadItem(LoadItemType.TENSOR, index, whole, index, at, target.shape))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.state_dict[read_item.dest_index.fqn]
        return target


class LateBoxes(Boxes):
    """As Megatron-Core's planner: it gives out a tensor of its own, and hears when that is filled."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), memory_format=torch.contiguous_format)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


def cut(*parts: tuple[int, int]) -> Box:
    return tuple(slice(*part) for part in parts)


BOXES: list[tuple[tuple[int, ...], Box]] = [
    ((1500, 700), cut((0, 1500), (0, 350))),
    ((1500, 700), cut((0, 1500), (350, 700))),
    ((1500, 700), cut((7, 1499), (1, 2))),
    ((1500, 700), cut((700, 1500), (350, 700))),
    ((3, 700_001), cut((1, 3), (5, 700_000))),  # rows longer than what is read at once
    ((2, 3, 300_000), cut((0, 2), (1, 2), (100_000, 300_000))),  # gaps of whole blocks
    ((8, 260, 512), cut((0, 8), (130, 260), (0, 512))),  # experts, cut along h
    ((8, 260, 512), cut((0, 8), (0, 260), (256, 512))),  # and along f
    ((8, 260, 512), cut((2, 3), (17, 19), (3, 5))),
    ((4, 1, 30, 5, 100), cut((1, 4), (0, 1), (3, 29), (0, 5), (98, 100))),
    ((700, 1), cut((1, 700), (0, 1))),
    ((1500, 700), cut((0, 0), (0, 350))),
    ((5,), cut((1, 4))),
    ((), ()),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool)
ORDERS = {
    "in order": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "transposed": lambda shape, dtype: torch.zeros(shape[::-1], dtype=dtype).permute(
        tuple(reversed(range(len(shape))))
    ),
    "part of a larger": lambda shape, dtype: torch.zeros((*shape, 3), dtype=dtype)[..., 1],
}

WAYS: list[tuple[type[Boxes], bool, bool | None, int, int]] = [
    (Boxes, True, False, 3, 1 << 30),
    (Boxes, False, None, 3, 1 << 30),
    (Boxes, True, None, 1, 100_000),
    (LateBoxes, True, None, 3, 1 << 30),
    (LateBoxes, False, False, 1, 100_000),
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 100, (nbytes,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is saved, and where by whom."""
    kinds = itertools.cycle(DTYPES)
    values = {f"box{number}": random_tensor(shape, next(kinds)) for number, (shape, _) in enumerate(BOXES)}
    values["transposed"] = random_tensor((700, 900), torch.float32).t()
    values["overlapping"] = random_tensor((4,), torch.float32).as_strided((2, 2), (1, 1))
    values["large overlapping"] = random_tensor((2 * N,), torch.float32).as_strided((2, N), (1, 1))
    root = tmp_path_factory.mktemp("boxes")
    robust_dcp.save(values, storage_writer=RobustWriter(root / "torch", files_per_rank=2))
    robust_dcp.save(values, storage_writer=RobustWriter(root / "safetensors", layout="safetensors"))
    dcp.save(values, checkpoint_id=root / "stock", no_dist=True)
    return {"values": values, "root": root}


@pytest.mark.parametrize("by", ["torch", "safetensors", "stock"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_box_is_that_part_of_the_tensor(by: str, order: str, stored: dict[str, Any]) -> None:
    values = stored["values"]
    boxes = {f"box{number}": box for number, (_, box) in enumerate(BOXES)}
    boxes["transposed"] = cut((100, 900), (3, 650))
    boxes["overlapping"] = cut((0, 2), (0, 2))
    boxes["large overlapping"] = cut((0, 2), (3, N - 5))
    for planner, verify, direct, threads, buffer_bytes in WAYS:
        wanted = {name: values[name][box] for name, box in boxes.items()}
        targets = {name: ORDERS[order](part.shape, part.dtype) for name, part in wanted.items()}
        reader = RobustReader(
            stored["root"] / by,
            verify_checksums=verify,
            direct=direct,
            threads=threads,
            buffer_bytes=buffer_bytes,
        )
        robust_dcp.load(targets, storage_reader=reader, planner=planner(boxes))
        assert [name for name, part in wanted.items() if not same(part, targets[name])] == []


@pytest.mark.parametrize("by", ["torch", "safetensors"])
def test_a_flipped_bit_in_a_box_is_found_wherever_it_lies(by: str, stored: dict[str, Any], tmp_path: Path) -> None:
    """Blocks that hold nothing of the box need not be read."""
    draws = random.Random(1)
    large = {number: box for number, (shape, box) in enumerate(BOXES) if torch.Size(shape).numel() > 100_000}
    source = stored["root"] / by
    copies = tmp_path / "copies"
    copies.mkdir()
    for file in source.iterdir():
        (copies / file.name).write_bytes(file.read_bytes())
    files = [file for file in copies.iterdir() if file.suffix in (".distcp", ".safetensors")]
    for number, box in large.items():
        name, value = f"box{number}", stored["values"][f"box{number}"]
        part = value[box]
        if not part.numel():
            continue
        # An element of the box that occurs as these bytes in one file.
        place = tuple(draws.randrange(each.start, each.stop) for each in box)
        row = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        file = next(file for file in files if row in file.read_bytes())
        flat = sum(at * step for at, step in zip(place, value.contiguous().stride(), strict=True))
        at = file.read_bytes().index(row) + flat * value.itemsize
        with file.open("r+b") as opened:
            byte = os.pread(opened.fileno(), 1, at)[0]
            os.pwrite(opened.fileno(), bytes([byte ^ 1 << draws.randrange(8)]), at)
            targets = {name: torch.zeros(part.shape, dtype=part.dtype)}
            with pytest.raises(CorruptCheckpoint, match=name):
                robust_dcp.load(targets, storage_reader=RobustReader(copies), planner=Boxes({name: box}))
            os.pwrite(opened.fileno(), bytes([byte]), at)


def test_a_box_between_blocks_leaves_out_what_nobody_wants(tmp_path: Path) -> None:
    """The second half of each expert along h is not read for the first one."""
    value = random_tensor((4, 2 * MIB), torch.uint8)
    robust_dcp.save({"experts": value}, checkpoint_id=tmp_path)
    box, target = cut((0, 4), (0, MIB)), torch.zeros(4, MIB, dtype=torch.uint8)
    before = _read_nbytes()
    robust_dcp.load({"experts": target}, checkpoint_id=tmp_path, planner=Boxes({"experts": box}))
    assert same(target, value[box])
    assert _read_nbytes() - before < 6 * MIB


def _read_nbytes() -> int:
    """The bytes that this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_put_on_a_device_by_way_of_a_copy_there(order: str) -> None:
    """The CPU stands in for the device."""
    lease, block, at = BlockLease(MIB, 1, of_load=True), Block(MIB), 13  # no element is aligned there
    value = random_tensor((40, 30, 7), torch.float32)
    block.data[at : at + value.nbytes] = value.reshape(-1).view(torch.uint8).numpy()
    target = ORDERS[order]((40, 30, 7), torch.float32)[:, 5:9, 2:]
    begin = at + (5 * 7 + 2) * 4
    lease.fill([target], block, [begin], value.stride())
    assert same(target, value[:, 5:9, 2:])
    lease.close()
