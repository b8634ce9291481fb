"""RobustReader in stock ``load``: every writer's checkpoints, only the bytes that are needed, and no silent damage."""

from __future__ import annotations

import collections
import errno
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from robust_dcp.errors import CorruptCheckpoint, StorageError, UnsafeCheckpoint
from robust_dcp.storage.disk import PosixDisk, storage_error
from robust_dcp.storage.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.reader import RobustReader
from tests.storage.test_torch_zip import record_of
from tests.support.simulated_disk import WatchedDisk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def zstd() -> Any:
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard()


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


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}, {"zstd": True}], ids=str)
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, PairedPlanner])
def test_a_stock_checkpoint_is_read(options: dict[str, Any], planner: Any, tmp_path: Path) -> None:
    if options.get("zstd"):
        options = {"_extensions": [zstd()]}
    save_stock(tmp_path, **options)
    made = planner()
    assert_same(load(tmp_path, state_dict_of(fill=0), made), state_dict_of())
    if isinstance(made, PairedPlanner):
        assert made.threads == {threading.get_ident()}


def test_megatrons_planner_is_served(tmp_path: Path) -> None:
    strategies = pytest.importorskip("megatron.core.dist_checkpointing.strategies.torch")
    save_stock(tmp_path)
    planner = strategies.MCoreLoadPlanner()
    assert_same(load(tmp_path, state_dict_of(fill=0), planner), state_dict_of())


def test_our_records_are_read_by_us_and_by_stock(tmp_path: Path) -> None:
    save_stock(tmp_path)
    for name in ("weight", "half", "float8", "scalar", "empty", "large"):
        rewritten(tmp_path, name, state_dict_of()[name])
    assert_same(load(tmp_path, state_dict_of(fill=0)), state_dict_of())
    stock = state_dict_of(fill=0)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_same(stock, state_dict_of())


def test_tensors_of_other_kinds_are_left_to_torch(tmp_path: Path) -> None:
    dense = torch.eye(3)
    save_stock(tmp_path, {"w": dense})
    metadata = decode_metadata((tmp_path / ".metadata").read_bytes(), "")
    buffer = io.BytesIO()
    torch.save(torch.nn.Parameter(dense), buffer)  # not what a stock writer leaves, but what torch.load understands
    (tmp_path / "__1_0.distcp").write_bytes(buffer.getvalue())
    (index,) = metadata.storage_data
    metadata.storage_data[index] = filesystem._StorageInfo("__1_0.distcp", 0, len(buffer.getvalue()))
    (tmp_path / ".metadata").write_bytes(encode_metadata(metadata))
    assert_same(load(tmp_path, {"w": torch.zeros(3, 3)}), {"w": dense})

    damaged = bytearray(buffer.getvalue())
    damaged[damaged.index(dense.numpy().tobytes()) + 1] ^= 1
    (tmp_path / "__1_0.distcp").write_bytes(damaged)
    with pytest.raises(CorruptCheckpoint, match=r"'w at .*Bad CRC-32"):
        load(tmp_path, {"w": torch.zeros(3, 3)})


@pytest.mark.parametrize("ours", [False, True])
def test_values_are_converted_to_the_dtype_that_is_asked_for(ours: bool, tmp_path: Path) -> None:
    value = torch.tensor([1.5, 2.5, -3.0])
    save_stock(tmp_path, {"w": value})
    if ours:
        rewritten(tmp_path, "w", value)
    assert_same(load(tmp_path, {"w": torch.zeros(3, dtype=torch.bfloat16)}), {"w": value.to(torch.bfloat16)})


def read_box(
    directory: Path, target: torch.Tensor, offsets: list[int], lengths: list[int], **options: Any
) -> WatchedDisk:
    """Read one box of the stored tensor ``w`` into ``target``."""

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return target

    disk = WatchedDisk(PosixDisk())
    reader = RobustReader(directory, disk=disk, **options)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    index = next(index for index in metadata.storage_data if index.fqn == "w")
    item = ReadItem(
        LoadItemType.TENSOR, index, torch.Size([0] * len(lengths)), index, torch.Size(offsets), torch.Size(lengths)
    )
    reader.read_data(LoadPlan([item]), Planner()).wait()
    return disk


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
    pread_into = PosixDisk.pread_into

    def counted(self: PosixDisk, file: Any, buffer: Any, offset: int) -> int:
        if file.path.endswith(".distcp"):
            read.append(memoryview(buffer).nbytes)
        return pread_into(self, file, buffer, offset)

    monkeypatch.setattr(PosixDisk, "pread_into", counted)
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


@pytest.mark.parametrize("ours", [False, True])
def test_a_flipped_byte_is_found(ours: bool, tmp_path: Path) -> None:
    value = torch.rand(1000)
    save_stock(tmp_path, {"w": value})
    if ours:
        rewritten(tmp_path, "w", value)
    path = tmp_path / ("__9_0.distcp" if ours else "__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(value.numpy().tobytes()) + 1234] ^= 4
    path.write_bytes(data)

    dcp.load({"w": torch.zeros(1000)}, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)  # stock: no word
    with pytest.raises(CorruptCheckpoint, match=r"'w at \[0\]'.*CRC-32") as caught:
        load(tmp_path, {"w": torch.zeros(1000)})
    assert caught.value.file == str(path)
    load(tmp_path, {"w": torch.zeros(1000)}, verify_checksums=False)


def test_a_flipped_byte_of_an_object_is_found(tmp_path: Path) -> None:
    save_stock(tmp_path, {"text": "a long enough text"})
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(b"long")] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="'text'"):
        load(tmp_path, {"text": None})


def test_any_flipped_bit_of_a_data_file_is_found_or_does_no_harm(tmp_path: Path) -> None:
    value = torch.arange(5.0)
    save_stock(tmp_path, {"w": value})
    rewritten(tmp_path, "w", value)
    path = tmp_path / "__9_0.distcp"
    original = path.read_bytes()
    reader = RobustReader(tmp_path, threads=1)
    metadata = reader.read_metadata()
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        state_dict = {"w": torch.zeros(5)}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state_dict, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except CorruptCheckpoint:
            continue
        assert torch.equal(state_dict["w"], value), position


def test_a_missing_or_short_file_is_named_with_the_item(tmp_path: Path) -> None:
    save_stock(tmp_path, {"w": torch.rand(1000)})
    path = tmp_path / "__0_0.distcp"
    data = path.read_bytes()
    for nbytes in (len(data) - 1, 1000, 0):
        path.write_bytes(data[:nbytes])
        with pytest.raises(CorruptCheckpoint, match="'w at") as caught:
            load(tmp_path, {"w": torch.zeros(1000)})
        assert caught.value.file == str(path)
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match="missing"):
        load(tmp_path, {"w": torch.zeros(1000)})


def test_an_item_that_was_listed_and_never_written_is_named(tmp_path: Path) -> None:
    save_stock(tmp_path, {"w": torch.rand(3), "new": torch.rand(3)})
    metadata = decode_metadata((tmp_path / ".metadata").read_bytes(), "")
    del metadata.storage_data[MetadataIndex("new", [0])]
    (tmp_path / ".metadata").write_bytes(encode_metadata(metadata))
    with pytest.raises(CorruptCheckpoint, match=r"'new at \[0\]'.*never written"):
        load(tmp_path, {"w": torch.zeros(3), "new": torch.zeros(3)})


def test_a_record_of_another_shape_than_the_metadata_says_is_found(tmp_path: Path) -> None:
    save_stock(tmp_path, {"w": torch.rand(3)})
    rewritten(tmp_path, "w", torch.rand(2))
    with pytest.raises(CorruptCheckpoint, match=r"box of \[3\].*shape \[2\]"):
        load(tmp_path, {"w": torch.zeros(3)})


def test_a_directory_without_a_commit_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no checkpoint was committed") as caught:
        RobustReader(tmp_path).read_metadata()
    assert caught.value.errno == errno.ENOENT


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_an_object_that_runs_code_does_not_reach_the_planner(tmp_path: Path) -> None:
    save_stock(tmp_path / "c", {"w": torch.rand(3), "evil": Touch(tmp_path / "ran")})
    with pytest.raises(UnsafeCheckpoint, match="'evil'"):
        load(tmp_path / "c", {"w": torch.zeros(3), "evil": None})
    assert not (tmp_path / "ran").exists()
    load(tmp_path / "c", {"w": torch.zeros(3), "evil": None}, trusted=True)
    assert (tmp_path / "ran").is_dir()


def test_metadata_that_runs_code_or_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(UnsafeCheckpoint):
        RobustReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()

    save_stock(tmp_path / "secret", {"w": torch.ones(3)})
    save_stock(tmp_path / "c", {"w": torch.zeros(3)})
    metadata = decode_metadata((tmp_path / "c" / ".metadata").read_bytes(), "")
    for info in metadata.storage_data.values():
        info.relative_path = "../secret/__0_0.distcp"
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpoint, match=r"\.\./secret"):
        RobustReader(tmp_path / "c").read_metadata()


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, PairedPlanner])
def test_a_failing_read_is_raised_and_every_file_closed(planner: Any, tmp_path: Path) -> None:
    state_dict = {str(number): torch.rand(10) for number in range(40)}
    save_stock(tmp_path, state_dict, single_file_per_rank=False)
    watched = WatchedDisk(PosixDisk())
    targets = {name: torch.zeros(10) for name in state_dict}
    load(tmp_path, dict(targets), planner(), disk=watched)
    assert watched.operations.count("open_read") == watched.operations.count("close")

    for number in (0, 17, 39):

        class Failing(PosixDisk):
            path = str(tmp_path / f"__0_{number}.distcp")

            def pread_into(self, file: Any, buffer: Any, offset: int) -> int:
                if file.path == self.path:
                    raise storage_error("read", file.path, OSError(errno.EIO, "Input/output error"))
                return super().pread_into(file, buffer, offset)

        watched = WatchedDisk(Failing())
        with pytest.raises(StorageError, match="EIO") as caught:
            load(tmp_path, dict(targets), planner(), disk=watched)
        assert caught.value.path == Failing.path
        assert watched.operations.count("open_read") == watched.operations.count("close")


def test_an_error_of_the_planner_is_raised_and_every_file_closed(tmp_path: Path) -> None:
    class Failing(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            raise KeyError("no place")

    save_stock(tmp_path, {"w": torch.rand(3)})
    watched = WatchedDisk(PosixDisk())
    with pytest.raises(KeyError, match="no place"):
        load(tmp_path, {"w": torch.zeros(3)}, Failing(), disk=watched)
    assert watched.operations.count("open_read") == watched.operations.count("close")


@pytest.mark.parametrize("threads", [1, 3])
def test_little_memory_and_few_threads_read_the_same(threads: int, tmp_path: Path) -> None:
    save_stock(tmp_path, thread_count=2)
    assert_same(load(tmp_path, state_dict_of(fill=0), threads=threads, buffer_bytes=1), state_dict_of())


def test_a_coordinator_can_send_the_metadata_as_bytes(tmp_path: Path) -> None:
    save_stock(tmp_path)
    data = RobustReader(tmp_path).metadata_bytes()
    other = RobustReader("/somewhere/else")
    assert other.decode_metadata(data).state_dict_metadata == RobustReader(tmp_path).read_metadata().state_dict_metadata


def test_metadata_of_a_single_rank_is_found(tmp_path: Path) -> None:
    save_stock(tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "__3.metadata")
    assert RobustReader(tmp_path).read_metadata(rank=3).storage_meta is not None


def test_a_reader_can_be_pointed_to_another_checkpoint(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_stock(tmp_path / name, {"w": torch.full((2,), value)})
    reader = RobustReader(tmp_path / "a")
    state_dict = {"w": torch.zeros(2)}
    dcp.load(state_dict, checkpoint_id=str(tmp_path / "b"), storage_reader=reader, no_dist=True)
    assert state_dict["w"].tolist() == [2.0, 2.0]
    assert reader.checkpoint_id == str(tmp_path / "b")
    assert RobustReader.validate_checkpoint_id(tmp_path)
    assert RobustReader.validate_checkpoint_id("checkpoint")
    assert not RobustReader.validate_checkpoint_id("s3://bucket/checkpoint")
