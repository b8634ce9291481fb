"""The place in which a target is made, while calls to the file system fail or another call ends just then."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

import robust_dcp
from robust_dcp.conversion import workplace
from robust_dcp.conversion.convert import convert
from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.directory_lock import DirectoryLock
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.paths import LOCK_NAME
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.conversion.kills import STATE, bytes_of, is_new


@pytest.fixture
def source(tmp_path: Path) -> Path:
    robust_dcp.save(dict(STATE), checkpoint_id=tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An older target, which a conversion replaces."""
    robust_dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "older")
    convert(tmp_path / "older", tmp_path / "place/target", form="safetensors")
    return tmp_path / "place/target"


def test_names_that_cannot_be_swapped_leave_the_old_target(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bytes_of(target)

    def fail(*_: str) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as changed:
        changed.setattr(workplace, "exchange_names", fail)
        with pytest.raises(StorageError, match=r"rename .*place/target.*Input/output error"):
            convert(source, target, form="safetensors", overwrite=True)
    assert bytes_of(target) == old
    convert(source, target, form="safetensors", overwrite=True)
    assert is_new(target) and os.listdir(target.parent) == ["target"]


def test_an_old_target_that_cannot_be_removed_is_told_when_the_new_one_has_its_name(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as changed:
        changed.setattr(shutil, "rmtree", fail)
        with pytest.raises(StorageError, match=r"remove .*Device or resource busy"):
            convert(source, target, form="safetensors", overwrite=True)
    assert is_new(target)
    convert(source, target, form="safetensors", overwrite=True)
    assert is_new(target) and os.listdir(target.parent) == ["target"]


class _EndsJustNow(PosixDisk):
    """Another call removes the directory in which it has worked, right before this one takes the lock there."""

    n_ended = 0

    def open_lock(self, path: str) -> OpenFile:
        if self.n_ended < 2:
            self.n_ended += 1
            os.rmdir(os.path.dirname(path))
        return super().open_lock(path)


def test_a_call_that_begins_when_another_one_ends_makes_the_place_anew(source: Path, tmp_path: Path) -> None:
    disk = _EndsJustNow()
    convert(source, tmp_path / "target", form="torch", disk=disk)
    assert disk.n_ended == 2 and is_new(tmp_path / "target")


class _OfAnotherMachine(PosixDisk):
    """A network file system, whose locks may be those of machines that are not seen here."""

    held: DirectoryLock | None = None

    def is_of_this_machine(self, path: str) -> bool:
        return False

    def open_lock(self, path: str) -> OpenFile:
        if self.held is None:
            self.held = DirectoryLock.take(PosixDisk(), os.path.dirname(path), save_id="conversion")
            holder = msgspec.json.decode(Path(path).read_bytes())
            Path(path).write_bytes(msgspec.json.encode({**holder, "boot_id": "another"}))
        return super().open_lock(path)


def test_a_lock_of_another_machine_is_waited_for_or_removed_by_people(source: Path, tmp_path: Path) -> None:
    disk = _OfAnotherMachine()
    with pytest.raises(StorageError, match=rf"another call makes .*it holds .*{LOCK_NAME}.* If its machine"):
        convert(source, tmp_path / "target", form="torch", disk=disk)
    assert disk.held is not None
    disk.held.release()
    convert(source, tmp_path / "target", form="torch")
    assert is_new(tmp_path / "target")


def test_a_disk_without_room_is_named_before_anything_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(StorageError, match=r"has 10 bytes free, and .*not/yet needs about \d+"):
        convert(source, tmp_path / "not/yet", form="torch")
    assert not (tmp_path / "not").exists()
