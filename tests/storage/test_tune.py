"""What ``tune`` measures and chooses, what it leaves behind, and what it says where it cannot measure."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import robust_dcp
from robust_dcp.errors import StorageError
from robust_dcp.storage import tune
from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.tuning.settings import BLOCKS_NBYTES, GOOD_ENOUGH, Measured, Setting, choose

MIB = 1 << 20

settings = st.builds(Setting, st.booleans(), st.sampled_from([1, 2, 4, 8]), st.sampled_from(BLOCKS_NBYTES))
tables = st.lists(
    st.builds(Measured, settings, st.just(64 * MIB), st.floats(0.01, 10.0), st.floats(0.0, 10.0)),
    min_size=1,
    unique_by=lambda row: row.setting,
)


class NoDirectIo(PosixDisk):
    """As a file system that refuses ``O_DIRECT``, when a file is opened or when it is written to."""

    def __init__(self, refuses_at: str) -> None:
        self.refuses_at = refuses_at
        self.direct_fds: set[int] = set()

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        file = super().open_new(path, direct=direct)
        if direct and self.refuses_at == "open":
            self.use_page_cache(file, "the file system refuses O_DIRECT: Invalid argument")
        elif direct:
            self.direct_fds.add(file.fd)
        return file

    def close(self, file: OpenFile) -> None:
        self.direct_fds.discard(file.fd)
        super().close(file)

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        if file.fd in self.direct_fds and file.alignment is not None:
            raise storage_error("write", file.path, OSError(errno.EINVAL, "Invalid argument"))
        super().pwrite(file, data, offset)


class Quota(PosixDisk):
    """Room for so many bytes in open files, whatever the file system says that it has."""

    def __init__(self, room_nbytes: int) -> None:
        self.room_nbytes = room_nbytes
        self.reserved: dict[int, int] = {}
        self.most_nbytes = 0

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        self.reserve(file, nbytes)
        return super().preallocate(file, nbytes)

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        self.reserve(file, offset + len(data))
        super().pwrite(file, data, offset)

    def close(self, file: OpenFile) -> None:
        self.reserved.pop(file.fd, None)
        super().close(file)

    def reserve(self, file: OpenFile, nbytes: int) -> None:
        reserved = {**self.reserved, file.fd: max(nbytes, self.reserved.get(file.fd, 0))}
        if sum(reserved.values()) > self.room_nbytes:
            raise storage_error("write", file.path, OSError(errno.EDQUOT, "Disk quota exceeded"))
        self.reserved = reserved
        self.most_nbytes = max(self.most_nbytes, sum(reserved.values()))


class FailingFsync(PosixDisk):
    def fsync(self, file: OpenFile) -> None:
        raise storage_error("fsync", file.path, OSError(errno.EIO, "Input/output error"))


def test_the_options_are_those_of_writer_and_reader_and_nothing_is_left_behind(tmp_path: Path) -> None:
    options = tune(tmp_path, seconds=0.2)

    assert list(tmp_path.iterdir()) == []
    state_dict = {"weight": torch.arange(100_000.0)}
    writer = robust_dcp.RobustWriter(tmp_path / "checkpoint", **options.writer_options)
    robust_dcp.save(state_dict, storage_writer=writer)
    loaded = {"weight": torch.zeros(100_000)}
    reader = robust_dcp.RobustReader(tmp_path / "checkpoint", **options.reader_options)
    robust_dcp.load(loaded, storage_reader=reader)
    assert torch.equal(loaded["weight"], state_dict["weight"])


def test_the_table_says_what_was_measured_and_which_was_chosen(tmp_path: Path) -> None:
    options = tune(tmp_path, seconds=0.2)

    assert options.table
    assert choose(options.table) == options.writing
    assert choose(options.read_table) == options.reading
    lines = str(options).splitlines()
    assert (lines[0], lines[len(options.table) + 2]) == ("writing", "reading")
    assert lines[1].split() == ["I/O", "threads", "block", "MiB", "GiB/s", "CPU-s/GiB"]
    measured = len(options.table) + len(options.read_table)
    assert len([line for line in lines if "direct  " in line or "buffered  " in line]) == measured
    assert len([line for line in lines if line.endswith("<- chosen")]) == 2


@given(tables)
def test_the_choice_is_the_cheapest_within_five_percent_of_the_best(table: list[Measured]) -> None:
    chosen = choose(table)

    best = max(row.nbytes_per_second for row in table)
    enough = [row.setting for row in table if row.nbytes_per_second >= GOOD_ENOUGH * best]
    assert chosen in enough
    if any(setting.direct for setting in enough):
        assert chosen.direct
    same_way = [setting for setting in enough if setting.direct == chosen.direct]
    assert chosen.in_flight_nbytes == min(setting.in_flight_nbytes for setting in same_way)


@given(st.data())
def test_the_order_of_the_table_does_not_matter(data: st.DataObject) -> None:
    table: Sequence[Measured] = data.draw(tables)

    assert choose(data.draw(st.permutations(table))) == choose(table)


@pytest.mark.parametrize("refuses_at", ["open", "write"])
def test_without_direct_io_it_measures_the_page_cache_and_says_why(tmp_path: Path, refuses_at: str) -> None:
    options = tune(tmp_path, seconds=0.1, disk=NoDirectIo(refuses_at))

    assert not options.writing.direct
    assert not any(row.setting.direct for row in (*options.table, *options.read_table))
    assert options.reader_options["direct"] is False
    assert "Invalid argument" in (options.direct_refused or "")
    assert f"direct I/O was not measured: {options.direct_refused}" in str(options)
    assert list(tmp_path.iterdir()) == []


def test_under_a_quota_it_measures_less(tmp_path: Path) -> None:
    disk = Quota(9 * MIB)

    options = tune(tmp_path, seconds=0.5, disk=disk)

    assert options.writing.in_flight_nbytes <= 9 * MIB
    assert all(row.nbytes <= 9 * MIB for row in (*options.table, *options.read_table))


def test_on_a_nearly_full_disk_it_takes_a_quarter_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=40, f_frsize=MIB))
    disk = Quota(1 << 40)

    tune(tmp_path, seconds=0.5, disk=disk)

    assert 0 < disk.most_nbytes <= 10 * MIB


@pytest.mark.parametrize("free_mib", [0, 3])
def test_a_full_disk_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_mib, f_frsize=MIB))

    with pytest.raises(StorageError, match="free space") as caught:
        tune(tmp_path)

    assert caught.value.errno == errno.ENOSPC
    assert caught.value.path == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_quota_that_is_used_up_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="quotas") as caught:
        tune(tmp_path, disk=Quota(MIB // 2))

    assert caught.value.errno == errno.ENOSPC


def test_a_failing_device_is_an_error_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="fsync") as caught:
        tune(tmp_path, seconds=0.1, disk=FailingFsync())

    assert caught.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_yet_is_measured_where_it_would_be(tmp_path: Path) -> None:
    assert tune(tmp_path / "run" / "checkpoints", seconds=0.1).table
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StorageError, match="is not a directory"):
        tune(tmp_path / "file" / "checkpoints")


def test_no_time_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seconds must be positive"):
        tune(tmp_path, seconds=0)
