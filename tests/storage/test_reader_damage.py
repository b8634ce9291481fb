"""RobustReader notices what is damaged, missing or dangerous, and closes what it opened."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from robust_dcp.errors import CorruptCheckpoint, StorageError, UnsafeCheckpoint
from robust_dcp.storage.files.disk import storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.reader import RobustReader
from tests.storage.checkpoints import (
    PairedPlanner,
    load,
    rewritten,
    save_stock,
)
from tests.support.simulated_disk import WatchedDisk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
