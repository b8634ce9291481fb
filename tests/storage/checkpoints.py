"""Checkpoints by stock and by us, and loads of them with RobustReader, for the tests of the reader."""

from __future__ import annotations

import collections
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.reader import RobustReader
from tests.storage.test_record import record_of
from tests.support.simulated_disk import WatchedDisk


def state_dict_of(fill: float | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    state_dict = {
        "weight": torch.rand(7, 5, generator=generator),
        "half": torch.rand(4, 3, generator=generator).to(torch.bfloat16),
        "float8": torch.rand(8, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "transposed": torch.rand(3, 4, generator=generator).t(),
        "large": torch.rand(1 << 20, generator=generator),
        "nested": {"bias": torch.rand(2, generator=generator)},
    }
    if fill is None:
        return {**state_dict, "step": 17, "extra": collections.deque([1.5, "x"])}
    filled: dict[str, Any] = {
        name: torch.full_like(value, fill) for name, value in state_dict.items() if isinstance(value, torch.Tensor)
    }
    return {**filled, "nested": {"bias": torch.full((2,), float(fill))}, "step": None, "extra": None}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.float(), expected.float())
    else:
        assert found == expected


def save_stock(directory: Path, state_dict: dict[str, Any] | None = None, **options: Any) -> None:
    writer = dcp.FileSystemWriter(directory, **options)
    dcp.save(state_dict_of() if state_dict is None else state_dict, storage_writer=writer, no_dist=True)


def load(directory: Path, state_dict: dict[str, Any], planner: Any = None, **options: Any) -> dict[str, Any]:
    """Stock ``load`` with our reader; raises what the reader raised, without stock's wrapping."""
    try:
        dcp.load(state_dict, storage_reader=RobustReader(directory, **options), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error
    return state_dict


def rewritten(directory: Path, name: str, tensor: torch.Tensor) -> None:
    """Append our own record of ``tensor`` to the checkpoint and let the metadata point to it."""
    path = directory / "__9_0.distcp"
    with path.open("ab") as file:
        offset = file.tell()
        file.write(record_of(tensor))
    metadata = decode_metadata((directory / ".metadata").read_bytes(), "")
    index = next(index for index in metadata.storage_data if index.fqn == name)
    length = path.stat().st_size - offset
    metadata.storage_data[index] = filesystem._StorageInfo(path.name, offset, length)
    metadata.storage_meta = None  # no save of ours has written these files to their ends
    (directory / ".metadata").write_bytes(encode_metadata(metadata))


class PairedPlanner(DefaultLoadPlanner):
    """Like Megatron-Core's: commits what it gave out last, to a place of its own, on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.resolved: tuple[ReadItem, torch.Tensor] | None = None
        self.threads: set[int] = set()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self.resolved is None, "resolve_tensor before commit_tensor of the last item"
        self.threads.add(threading.get_ident())
        target = super().resolve_tensor(read_item)
        self.resolved = (read_item, target)
        return torch.empty_like(target, memory_format=torch.contiguous_format)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert self.resolved is not None
        assert self.resolved[0] is read_item
        self.resolved[1].copy_(tensor)
        self.resolved = None


def read_box(
    directory: Path, target: torch.Tensor, offsets: list[int], lengths: list[int], inner: Any = None, **options: Any
) -> WatchedDisk:
    """Read one box of the stored tensor ``w`` into ``target``, from the disk ``inner``."""

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return target

    disk = WatchedDisk(Disk() if inner is None else inner)
    reader = RobustReader(directory, disk=disk, **options)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    index = next(index for index in metadata.storage_data if index.fqn == "w")
    item = ReadItem(
        LoadItemType.TENSOR, index, torch.Size([0] * len(lengths)), index, torch.Size(offsets), torch.Size(lengths)
    )
    reader.read_data(LoadPlan([item]), Planner()).wait()
    return disk
