"""Copies between directories and stores: what arrives, in which order, and what is left after a failure."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import robust_dcp
from robust_dcp import (
    CopyOptions,
    CorruptCheckpoint,
    RobustReader,
    StorageError,
    UnsafeCheckpoint,
    copy_checkpoint,
)
from robust_dcp.drain.bandwidth import Bandwidth
from robust_dcp.drain.copy import Copy
from robust_dcp.drain.copy_threads import CopyThreads
from robust_dcp.drain.transfer import Transfer
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.drain.checkpoints import (
    IMPATIENT,
    ONE_THREAD,
    files_of,
    loaded,
    save_like_megatron,
    save_ours,
    save_shards,
    save_stock,
    state_dict,
)
from tests.support.waiting import wait_until

KINDS = {"ours": save_ours, "safetensors": save_shards, "stock": save_stock, "Megatron": save_like_megatron}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_any_kind_arrives_with_all_its_files_and_comes_back(kind: str, tmp_path: Path) -> None:
    KINDS[kind](str(tmp_path / "source"))
    url = f"memory://test_copy/{kind}"
    there = copy_checkpoint(tmp_path / "source", url)
    copy_checkpoint(url, f"file://{tmp_path}/back")
    names = files_of(tmp_path / "source") - {".robust_dcp.lock"}
    assert names == files_of(tmp_path / "back")
    assert filecmp.cmpfiles(tmp_path / "source", tmp_path / "back", names, shallow=False)[0] == list(names)
    assert there.verified_by_store + there.verified_by_reading == there.files == len(names)


def test_metadata_is_the_last_file_that_gets_its_name(tmp_path: Path) -> None:
    save_like_megatron(str(tmp_path / "source"))
    disk = _NotingDisk()
    copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    names = [os.path.relpath(path, tmp_path / "target") for path in disk.renamed]
    assert names[-1] == ".metadata"
    assert names.index("modelopt_state/.metadata") > names.index("modelopt_state/__0_0.distcp")


class _NotingDisk(PosixDisk):
    def __init__(self) -> None:
        super().__init__()
        self.renamed: list[str] = []

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if ".robust_dcp.copying." not in target:
            self.renamed.append(target)


@pytest.mark.parametrize("target", ["file://{path}/target", "memory://test_copy/flipped"])
def test_only_what_is_missing_or_damaged_is_sent_again(target: str, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    url = target.format(path=tmp_path)
    copy_checkpoint(tmp_path / "source", url)
    filesystem, root = fsspec.url_to_fs(url)
    name = f"{root}/__0_0.distcp"
    data = bytearray(filesystem.cat_file(name))
    data[len(data) // 2] ^= 1
    filesystem.pipe_file(name, bytes(data))
    again = copy_checkpoint(tmp_path / "source", url)
    assert (again.files, again.nbytes, again.skipped_files) == (1, len(data), 3)
    assert loaded(url) == 1.0


def test_a_checkpoint_that_was_there_stays_whole_until_the_new_one_is_committed(tmp_path: Path) -> None:
    robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "one")
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "two")
    copy_checkpoint(tmp_path / "one", tmp_path / "target")
    with pytest.raises(StorageError, match=r"\.metadata.*Input/output error"):
        copy_checkpoint(tmp_path / "two", tmp_path / "target", options=IMPATIENT, disk=_NoCommit())
    assert loaded(tmp_path / "target") == 1.0
    result = copy_checkpoint(tmp_path / "two", tmp_path / "target")
    assert loaded(tmp_path / "target") == 2.0
    assert result.skipped_files == 3  # the data files and the report of the try before
    assert files_of(tmp_path / "target") == {".metadata", ".robust_dcp.report.json", *result.renamed.values()}
    again = copy_checkpoint(tmp_path / "two", tmp_path / "target")
    assert (again.files, again.renamed) == (0, result.renamed)


def test_a_copy_that_was_killed_before_it_chose_names_does_not_take_those_of_a_checkpoint(tmp_path: Path) -> None:
    robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "one")
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "two")
    copy_checkpoint(tmp_path / "one", tmp_path / "target")
    with pytest.raises(StorageError):
        copy_checkpoint(tmp_path / "two", tmp_path / "target", disk=_OneMarker(), options=IMPATIENT)
    with pytest.raises(StorageError):
        copy_checkpoint(tmp_path / "two", tmp_path / "target", disk=_NoCommit(), options=IMPATIENT)
    assert loaded(tmp_path / "target") == 1.0


class _OneMarker(PosixDisk):
    n_markers = 0

    def rename(self, source: str, target: str) -> None:
        self.n_markers += ".robust_dcp.copying." in target
        if self.n_markers > 1:
            raise storage_error("rename", target, OSError(errno.EIO, "Input/output error"))
        super().rename(source, target)


class _NoCommit(PosixDisk):
    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) == ".metadata":
            error = OSError(errno.EIO, "Input/output error")
            raise storage_error("rename", target, error) from error
        super().rename(source, target)


def test_a_checkpoint_whose_files_cannot_get_other_names_is_not_replaced(tmp_path: Path) -> None:
    save_shards(str(tmp_path / "one"))
    save_shards(str(tmp_path / "two"))
    copy_checkpoint(tmp_path / "one", tmp_path / "target")
    with pytest.raises(StorageError, match="of another checkpoint, and readers find such a file only by that name"):
        copy_checkpoint(tmp_path / "two", tmp_path / "target")
    assert loaded(tmp_path / "target") == 1.0


def test_another_checkpoint_is_kept_if_it_may_not_be_replaced(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        robust_dcp.save(state_dict(value), checkpoint_id=tmp_path / name)
    copy_checkpoint(tmp_path / "one", tmp_path / "target")
    before = files_of(tmp_path / "target")
    with pytest.raises(StorageError, match=r"another checkpoint at .*overwrite=False"):
        copy_checkpoint(tmp_path / "two", tmp_path / "target", options=CopyOptions(overwrite=False))
    assert copy_checkpoint(tmp_path / "one", tmp_path / "target", options=CopyOptions(overwrite=False)).files == 0
    assert files_of(tmp_path / "target") == before


@pytest.mark.parametrize("when", ["while data is sent", "before the commit"])
def test_a_source_that_is_replaced_meanwhile_is_not_committed(when: str, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))

    def replace() -> None:
        robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "source")

    disk = _ActsOnce("open" if when == "while data is sent" else "rename", "__0_1.distcp", replace)
    with pytest.raises(StorageError, match="was replaced by another save while it was copied"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target", options=ONE_THREAD, disk=disk)
    assert files_of(tmp_path / "target") <= {
        ".robust_dcp.index",
        ".robust_dcp.report.json",
    }  # nobody could go on with it
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert loaded(tmp_path / "target") == 2.0


class _ActsOnce(PosixDisk):
    """Does something before a file is opened, or after it has got its name."""

    def __init__(self, when: str, name: str, act: Callable[[], None]) -> None:
        super().__init__()
        self.when, self.name, self.act = when, name, act
        self.acted = False

    def _at(self, when: str, path: str) -> None:
        if when == self.when and os.path.basename(path) == self.name and not self.acted:
            self.acted = True
            self.act()

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        self._at("open", path)
        return super().open_read(path, direct=direct)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._at("rename", target)


def test_a_damaged_source_is_named_and_not_copied(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    path = tmp_path / "source/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp is damaged, and is not copied: expected bytes"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target/.metadata").exists()


def test_metadata_that_leads_out_of_the_source_is_refused(tmp_path: Path) -> None:
    save_stock(str(tmp_path / "source"))
    secret = tmp_path / "secret"
    secret.write_text("s")
    (tmp_path / "source/__0_0.distcp").unlink()
    (tmp_path / "source/__0_0.distcp").symlink_to(secret)
    with pytest.raises(UnsafeCheckpoint, match="is a symbolic link out of the directory"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target")


@pytest.mark.parametrize("target", ["file://{path}/target", "memory://test_copy/two"])
def test_of_two_copies_to_one_place_at_the_same_time_one_is_found_whole(target: str, tmp_path: Path) -> None:
    url = target.format(path=tmp_path)
    for name, value in (("one", 1.0), ("two", 2.0)):
        robust_dcp.save(state_dict(value), checkpoint_id=tmp_path / name)
    both_have_begun = threading.Barrier(2, timeout=60)
    errors: list[BaseException] = []

    def copy(name: str) -> None:
        try:
            disk = _ActsOnce("open", "__0_0.distcp", lambda: both_have_begun.wait() and None)
            copy_checkpoint(tmp_path / name, url, disk=disk)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=copy, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Which one is found is the last that was committed. If that was in the same instant, the other one says so.
    assert [str(error) for error in errors if "another copy has ended there at the same time" not in str(error)] == []
    assert loaded(url) in (1.0, 2.0)


def test_metadata_that_another_copy_replaces_by_a_shorter_one_while_it_is_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store answers where a file lies and what it holds in two calls, and another copy may commit in between."""
    robust_dcp.save({f"layer.{number}": torch.ones(4) for number in range(60)}, checkpoint_id=tmp_path / "long")
    robust_dcp.save(state_dict(1.0), checkpoint_id=tmp_path / "short")
    copy_checkpoint(tmp_path / "long", "memory://test_copy/replaced")
    shorter = (tmp_path / "short/.metadata").read_bytes()
    info, n_replaced = MemoryFileSystem.info, []

    def replaced_meanwhile(self: MemoryFileSystem, path: str, **options: Any) -> Any:
        answer = info(self, path, **options)
        if path.endswith("replaced/.metadata") and not n_replaced:
            n_replaced.append(path)
            self.pipe_file(path, shorter)
        return answer

    monkeypatch.setattr(MemoryFileSystem, "info", replaced_meanwhile)
    copy_checkpoint(tmp_path / "short", "memory://test_copy/replaced", options=IMPATIENT)
    assert n_replaced and loaded("memory://test_copy/replaced") == 1.0


def test_a_copy_is_whole_without_its_report_if_another_copy_has_sent_its_own_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_ours(str(tmp_path / "source"))
    send = Transfer.send

    def send_all_but_the_report(self: Transfer, name: str, target_name: str, there_nbytes: int | None) -> int:
        if name == REPORT_NAME:
            raise CorruptCheckpoint(f"{name} is not as it was sent")
        return send(self, name, target_name, there_nbytes)

    monkeypatch.setattr(Transfer, "send", send_all_but_the_report)
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert loaded(tmp_path / "target") == 1.0
    assert "the report of the save has not arrived" in caplog.text


def test_progress_ends_at_the_size_of_the_checkpoint(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    told: list[tuple[int, int]] = []
    copy_checkpoint(
        tmp_path / "source", tmp_path / "target", options=ONE_THREAD, progress=lambda *both: told.append(both)
    )
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 400_000


def test_threads_together_stay_below_a_bandwidth_limit() -> None:
    limit = Bandwidth(1000.0)
    starts: list[float] = []
    limit.take(1)
    for _ in range(3):
        starts.append(limit._free_at_seconds)
        limit.take(50)
    assert [round(b - a, 6) for a, b in itertools.pairwise(starts)] == [0.05, 0.05]


def test_a_place_is_not_copied_to_itself(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    with pytest.raises(ValueError, match="cannot be copied to itself"):
        copy_checkpoint(tmp_path / "source", f"file://{tmp_path}/./source/")


def test_without_a_checkpoint_nothing_is_copied(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(StorageError, match="no checkpoint was committed there, so there is nothing to copy"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("option", [{"threads": 0}, {"part_bytes": 1}, {"verify": "no"}, {"limit_bytes_per_second": 0}])
def test_options_without_a_meaning_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        CopyOptions(**option)


def test_a_checkpoint_in_memory_is_verified_when_it_is_loaded(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    copy_checkpoint(tmp_path / "source", "memory://test_copy/verified")
    filesystem = fsspec.filesystem("memory")
    data = bytearray(filesystem.cat_file("/test_copy/verified/__0_0.distcp"))
    data[2000] ^= 1
    filesystem.pipe_file("/test_copy/verified/__0_0.distcp", bytes(data))
    with pytest.raises(CorruptCheckpoint, match="is damaged"):
        robust_dcp.load(state_dict(), storage_reader=RobustReader("memory://test_copy/verified"))


def test_ctrl_c_ends_the_transfers_that_are_under_way() -> None:
    threads = CopyThreads(2)
    stopped: list[bool] = []

    def main_waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return "result_iterator" in {each.f_code.co_name for each, _ in traceback.walk_stack(frame)}

    def send(name: str) -> None:
        wait_until(main_waits)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: threads.has_failed, seconds=10)
        stopped.append(threads.has_failed)

    with pytest.raises(KeyboardInterrupt):
        threads.map(send, ["one file"])
    assert stopped == [True]


def test_a_copy_between_directories_stops_within_a_file(tmp_path: Path) -> None:
    robust_dcp.save({"weight": torch.zeros(6 << 20)}, checkpoint_id=tmp_path / "source")
    told: list[int] = []

    class Stopped(Exception):
        pass

    def stop_once_told() -> None:
        if told:
            raise Stopped

    copy = Copy(
        tmp_path / "source",
        tmp_path / "target",
        CopyOptions(threads=1, part_bytes=5 << 20),
        progress=lambda done_nbytes, total_nbytes: told.append(done_nbytes),
        check_stop=stop_once_told,
    )
    copy.begin()
    with pytest.raises(Stopped):
        copy.send_data(copy.inventory.data)
    assert told == [5 << 20]


def test_files_in_directories_below_are_durable_before_the_commit(tmp_path: Path) -> None:
    save_like_megatron(str(tmp_path / "source"))
    disk = _DurableNames()
    copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert disk.lost_at_commit == set() and disk.not_durable == set()


class _DurableNames(PosixDisk):
    """Knows which files a power cut would take from their directories."""

    def __init__(self) -> None:
        super().__init__()
        self.not_durable: set[str] = set()
        self.lost_at_commit: set[str] = set()

    def rename(self, source: str, target: str) -> None:
        if target.endswith("/target/.metadata"):
            self.lost_at_commit = set(self.not_durable)
        super().rename(source, target)
        self.not_durable.add(target)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.not_durable.discard(path)

    def fsync_directory(self, path: str) -> None:
        super().fsync_directory(path)
        self.not_durable -= {each for each in self.not_durable if os.path.dirname(each) == path}


def test_a_link_that_leads_back_into_the_checkpoint_is_not_followed(tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    (tmp_path / "source" / "__9_0.distcp").symlink_to(tmp_path / "source")
    copied = copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert files_of(tmp_path / "target") == files_of(tmp_path / "source") - {".robust_dcp.lock"}
    assert copied.files == len(files_of(tmp_path / "target"))
    assert loaded(tmp_path / "target") == 1.0
