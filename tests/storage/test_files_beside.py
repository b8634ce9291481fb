"""Files that belong to a checkpoint and lie beside its data: they are of the same save, or a load says so."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustWriter, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.reading.metadata_source import MetadataSource
from tests.faults.disk import FaultDisk

MOST = 1 << 10


def save(path: Path, **beside: bytes | None) -> None:
    writer = RobustWriter(path)
    writer.beside = beside
    robust_dcp.save({"w": torch.zeros(3)}, storage_writer=writer, no_dist=True)


def read(path: Path, name: str, *, trusted: bool = False) -> bytes | None:
    return MetadataSource(Disk(), str(path)).read_beside(name, MOST, trusted=trusted)


@pytest.mark.parametrize("has_index", [True, False])
def test_each_save_has_its_own_and_those_that_it_has_not_are_gone(tmp_path: Path, has_index: bool) -> None:
    save(tmp_path, a=b"1", b=b"2")
    assert (read(tmp_path, "a"), read(tmp_path, "b"), read(tmp_path, "c")) == (b"1", b"2", None)
    save(tmp_path, a=b"3", b=None)
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").write_bytes(b"2")  # as if the save had been killed before it removed that
    if not has_index:
        (tmp_path / ".robust_dcp.index").unlink()
    assert (read(tmp_path, "a"), read(tmp_path, "b")) == (b"3", None)
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(CorruptCheckpoint, match=f"{tmp_path}/a was not saved with this checkpoint: expected SHA-256"):
        read(tmp_path, "a")
    assert read(tmp_path, "a", trusted=True) == b"1"
    (tmp_path / "a").unlink()
    assert read(tmp_path, "a") is None
    stock = pickle.loads((tmp_path / ".metadata").read_bytes())  # as DCP does
    assert stock.storage_meta.save_id


def test_a_file_that_does_not_get_its_name_is_found_by_its_save(tmp_path: Path) -> None:
    save(tmp_path, a=b"1")
    with (
        FaultDisk(tmp_path, on={"rename:a": OSError(errno.EIO, "")}),
        pytest.raises(StorageError, match="is committed, and robust_dcp loads it, but other readers take a"),
    ):
        save(tmp_path, a=b"2")
    assert read(tmp_path, "a") == b"2" and (tmp_path / "a").read_bytes() == b"1"
    save(tmp_path, a=b"3")
    assert read(tmp_path, "a") == b"3" and not list(tmp_path.glob("a.*"))


def test_a_save_that_fails_before_its_commit_leaves_those_of_before(tmp_path: Path) -> None:
    save(tmp_path, a=b"1")
    n_files = len(list(tmp_path.iterdir()))
    with FaultDisk(tmp_path, on={"rename:.metadata": OSError(errno.EIO, "")}), pytest.raises(StorageError):
        save(tmp_path, a=b"2")
    assert read(tmp_path, "a") == b"1"
    with FaultDisk(tmp_path, on={"write:a.*": OSError(errno.ENOSPC, "")}), pytest.raises(StorageError):
        save(tmp_path, a=b"2")
    assert read(tmp_path, "a") == b"1"
    save(tmp_path, a=b"3")
    assert read(tmp_path, "a") == b"3" and len(list(tmp_path.iterdir())) == n_files


def test_a_save_that_knows_of_none_takes_what_lies_there(tmp_path: Path) -> None:
    save(tmp_path, a=b"1")
    (tmp_path / "a").write_bytes(b"by the caller")
    save(tmp_path)
    assert read(tmp_path, "a") == b"by the caller"
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    (tmp_path / "stock" / "a").write_bytes(b"1")
    assert read(tmp_path / "stock", "a") == b"1"


def test_a_file_that_asks_for_memory_that_it_does_not_fill_is_refused_before_that_is_taken(tmp_path: Path) -> None:
    save(tmp_path, a=b"PK\3\4" + b"1" * 40)
    source = MetadataSource(Disk(), str(tmp_path))
    assert source.read_beside("a", 16 << 30, begins=b"PK\3\4") == b"PK\3\4" + b"1" * 40
    (tmp_path / "a").write_bytes(b"")
    os.truncate(tmp_path / "a", 15 << 30)  # sparse
    with pytest.raises(CorruptCheckpoint, match=f"{tmp_path}/a was not saved with this checkpoint"):
        source.read_beside("a", 16 << 30, begins=b"PK\3\4")
    with Disk().reading(str(tmp_path / "a")) as file, pytest.raises(StorageError, match="no memory for") as caught:
        Disk().read(file, 0, 1 << 62)
    assert caught.value.errno == errno.ENOMEM
