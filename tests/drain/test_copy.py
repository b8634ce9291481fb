"""Copies between directories: what arrives, in which order, what is refused, and what is left after a failure."""

from __future__ import annotations

import errno
import filecmp
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import robust_dcp
from robust_dcp import CopyOptions, CorruptCheckpoint, StorageError, UnsafeCheckpoint, copy_checkpoint
from robust_dcp.storage.committing.saving_file import not_being_loaded
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.footer import TAIL_NBYTES
from tests.drain.checkpoints import (
    KINDS,
    ONE_THREAD,
    ActingDisk,
    data_files,
    files_of,
    loaded,
    refuse,
    save,
    state_dict,
)
from tests.harness.ranks import run_ranks


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_any_kind_arrives_with_all_its_files_and_comes_back(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "source")
    there = copy_checkpoint(tmp_path / "source", f"memory://test_copy/{kind}")
    copy_checkpoint(f"memory://test_copy/{kind}", f"file://{tmp_path}/back")
    names = files_of(tmp_path / "source")
    assert names == files_of(tmp_path / "back")
    assert filecmp.cmpfiles(tmp_path / "source", tmp_path / "back", names, shallow=False)[1:] == ([], [])
    assert there.files == len(names)


def test_metadata_comes_last_when_all_other_names_are_durable(tmp_path: Path) -> None:
    class Names(Disk):
        def __init__(self) -> None:
            super().__init__()
            self.renamed: list[str] = []
            self.not_durable: set[str] = set()
            self.lost_at_commit: set[str] = set()

        def rename(self, source: str, target: str) -> None:
            if target == f"{tmp_path}/target/.metadata":
                self.lost_at_commit.update(self.not_durable)
            super().rename(source, target)
            if ".robust_dcp.copying." not in target:
                self.renamed.append(os.path.relpath(target, tmp_path / "target"))
                self.not_durable.add(target)

        def fsync_directory(self, path: str) -> None:
            super().fsync_directory(path)
            self.not_durable -= {each for each in self.not_durable if os.path.dirname(each) == path}

    KINDS["Megatron"](tmp_path / "source")
    disk = Names()
    copy_checkpoint(tmp_path / "source", tmp_path / "target", disk=disk)
    assert disk.renamed[-1] == ".metadata"
    below = [name for name in disk.renamed if name.startswith("modelopt_state/")]
    assert below[-1] == "modelopt_state/.metadata"
    assert disk.lost_at_commit == disk.not_durable == set()


def test_only_what_is_missing_or_damaged_is_sent_again(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    copy_checkpoint(source, target)
    name = data_files(target)[0]
    flip(target / name, 2000)
    (target / ".robust_dcp.report.json").unlink()
    again = copy_checkpoint(source, target)
    assert (again.files, again.skipped_files) == (2, len(files_of(source)) - 3)  # .metadata is not compared as a file
    assert again.skipped_nbytes > 0 and loaded(target) == 1.0


class TestATargetThatHoldsSomethingElse:
    def test_another_checkpoint_stays_as_it_is(self, tmp_path: Path) -> None:
        one, two = save(tmp_path / "one", 1.0), save(tmp_path / "two", 2.0)
        copy_checkpoint(one, tmp_path / "target")
        before = files_of(tmp_path / "target")
        with pytest.raises(StorageError, match=r"there is another checkpoint at .*target, .*: copy to another place"):
            copy_checkpoint(two, tmp_path / "target")
        assert (files_of(tmp_path / "target"), loaded(tmp_path / "target")) == (before, 1.0)

    def test_other_files_stay_and_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "target/below").mkdir(parents=True)
        (tmp_path / "target/below/notes.txt").write_text("mine")
        with pytest.raises(
            StorageError, match=r"holds what is not of this checkpoint: below/notes\.txt; copy to an em"
        ):
            copy_checkpoint(save(tmp_path / "source"), tmp_path / "target")
        assert files_of(tmp_path / "target") == {"below/notes.txt"}

    def test_half_a_copy_of_another_save_is_not_in_the_way_of_a_save_of_ours(self, tmp_path: Path) -> None:
        """A job whose node was lost saves the step again, on another node."""
        with pytest.raises(StorageError):
            copy_checkpoint(
                save(tmp_path / "lost"), tmp_path / "target", disk=ActingDisk("rename", "target/.metadata", refuse())
            )
        half = files_of(tmp_path / "target")
        (tmp_path / "again").mkdir()
        for value in (2.0, 3.0):  # the second save into a directory gives names that no other has
            save(tmp_path / "again", value)
        copy_checkpoint(tmp_path / "again", tmp_path / "target")
        assert loaded(tmp_path / "target") == 3.0
        assert half - files_of(tmp_path / "target") == set()

    def test_half_a_copy_of_files_with_the_same_names_is_refused_and_the_error_says_what_to_remove(
        self, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            KINDS["Megatron"](tmp_path / name)
        target = tmp_path / "target"
        with pytest.raises(StorageError):
            copy_checkpoint(tmp_path / "one", target, disk=ActingDisk("rename", "target/.metadata", refuse()))
        with pytest.raises(StorageError, match=r"another copy has begun at .* remove (\S+) and what") as raised:
            copy_checkpoint(tmp_path / "two", target)
        assert str(target) in raised.value.message
        copy_checkpoint(tmp_path / "one", target)
        assert loaded(target) == 1.0

    def test_a_place_in_itself_is_refused(self, tmp_path: Path) -> None:
        source = save(tmp_path / "source")
        (tmp_path / "link").symlink_to(source)
        for target in (source, f"file://{source}", tmp_path / "link", source / "below"):
            with pytest.raises(ValueError, match="cannot be copied to itself or to a place in itself"):
                copy_checkpoint(source, target)


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("target", ["{path}/target", "memory://test_copy/at_once_{kind}"])
def test_of_two_copies_to_one_place_at_the_same_time_one_is_found_whole(target: str, kind: str, tmp_path: Path) -> None:
    place = target.format(path=tmp_path, kind=kind)
    for name in ("one", "two"):
        KINDS[kind](tmp_path / name)
    if kind == "ours":
        save(tmp_path / "two", 2.0)  # over the first: so its files have names that no other save gives
    both_begin = threading.Barrier(2, timeout=60)
    outcomes: list[BaseException | None] = []

    def copy(name: str) -> None:
        try:
            copy_checkpoint(
                tmp_path / name, place, disk=ActingDisk("open", f"{name}/.metadata", lambda path: both_begin.wait())
            )
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=copy, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None in outcomes
    assert [
        each for each in outcomes if each is not None and not isinstance(each, (StorageError, CorruptCheckpoint))
    ] == []
    assert loaded(place) in (1.0, 2.0)


def test_copies_of_one_checkpoint_to_one_place_at_the_same_time_all_succeed(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    all_begin = threading.Barrier(4, timeout=60)

    def copy() -> None:
        disk = ActingDisk("open", "source/.metadata", lambda path: all_begin.wait())
        copy_checkpoint(source, target, disk=disk)

    with ThreadPoolExecutor(4) as threads:
        for copying in [threads.submit(copy) for _ in range(4)]:
            copying.result()
    assert (files_of(target), loaded(target)) == (files_of(source), 1.0)


class TestASource:
    @pytest.mark.parametrize("when", ["read", "rename"])
    def test_that_is_replaced_meanwhile_is_not_committed(self, when: str, tmp_path: Path) -> None:
        source, target = save(tmp_path / "source"), tmp_path / "target"
        part = f"{'source' if when == 'read' else 'target'}/{data_files(source)[-1]}"
        disk = ActingDisk(when, part, lambda path: save(source, 2.0))
        with pytest.raises(StorageError, match="was replaced by another save while it was copied"):
            copy_checkpoint(source, target, options=ONE_THREAD, disk=disk)
        assert not (target / ".metadata").exists()
        copy_checkpoint(source, target)
        assert loaded(target) == 2.0

    def test_that_is_removed_meanwhile_is_named(self, tmp_path: Path) -> None:
        source = save(tmp_path / "source")
        disk = ActingDisk("rename", "target/_", lambda path: (source / ".metadata").unlink())
        with pytest.raises(StorageError, match="was removed while it was copied, and nothing is committed"):
            copy_checkpoint(source, tmp_path / "target", disk=disk)

    @pytest.mark.parametrize(("at", "expected"), [(2000, "expected bytes"), (-TAIL_NBYTES - 10, "expected checksums")])
    def test_that_is_damaged_is_named_and_not_copied(self, at: int, expected: str, tmp_path: Path) -> None:
        source = save(tmp_path / "source")
        flip(source / data_files(source)[0], at)
        with pytest.raises(CorruptCheckpoint, match=rf"\.distcp is damaged, and is not copied: {expected}"):
            copy_checkpoint(source, tmp_path / "target")
        assert not (tmp_path / "target/.metadata").exists()

    def test_whose_metadata_is_missing_unreadable_or_of_an_impossible_size_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="no checkpoint was committed there, so there is nothing to copy"):
            copy_checkpoint(tmp_path / "nothing", tmp_path / "target")
        source = save(tmp_path / "source")
        with pytest.raises(StorageError, match=r"source/\.metadata.*Permission denied"):
            copy_checkpoint(source, tmp_path / "target", disk=ActingDisk("read", "source/.metadata", refuse()))
        os.truncate(source / ".metadata", 17 << 30)
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata cannot be used: expected at most \d+ bytes, found"):
            copy_checkpoint(source, tmp_path / "target")

    def test_that_leads_out_of_its_directory_is_refused(self, tmp_path: Path) -> None:
        KINDS["stock"](tmp_path / "source")
        (tmp_path / "secret").write_text("s")
        (tmp_path / "source/__0_0.distcp").unlink()
        (tmp_path / "source/__0_0.distcp").symlink_to(tmp_path / "secret")
        with pytest.raises(UnsafeCheckpoint, match="is a symbolic link out of the directory"):
            copy_checkpoint(tmp_path / "source", tmp_path / "target")

    def test_is_told_from_what_other_programs_keep_beside_it(self, tmp_path: Path) -> None:
        source = save(tmp_path / "source")
        before = files_of(source)
        (tmp_path / "notes.txt").write_text("not of the checkpoint")
        (source / "notes.txt").symlink_to(tmp_path / "notes.txt")
        (source / "__0.metadata").write_bytes((source / ".metadata").read_bytes())  # of a save without collectives
        (source / "half.tmp").write_bytes(b"half")
        (source / "__9_0.distcp").symlink_to(source)  # leads back into the checkpoint
        copy_checkpoint(source, tmp_path / "target")
        assert files_of(tmp_path / "target") == before

    def test_cannot_be_removed_meanwhile(self, tmp_path: Path) -> None:
        source, free = save(tmp_path / "source"), []

        def look(done_nbytes: int, total_nbytes: int) -> None:
            with not_being_loaded(Disk(), str(source)) as is_free:
                free.append(is_free)

        copy_checkpoint(source, tmp_path / "target", progress=look)
        assert free and not any(free)


class TestADisk:
    def test_that_is_full_ends_the_copy_at_once(self, tmp_path: Path) -> None:
        source, target = save(tmp_path / "source"), tmp_path / "target"
        disk = ActingDisk("write", f"target/{data_files(source)[-1]}", refuse(errno.ENOSPC), times=9)
        with pytest.raises(StorageError, match=r"No space left on device.*free space") as raised:
            copy_checkpoint(source, target, options=ONE_THREAD, disk=disk)
        assert (raised.value.errno, disk.times) == (errno.ENOSPC, 8)  # asking again does not help
        assert not [name for name in files_of(target) if name.endswith(".copying")]
        assert copy_checkpoint(source, target).skipped_files == len(data_files(source)) - 1

    @pytest.mark.parametrize("call", ["create", "fsync", "rename"])
    def test_that_fails_once_is_asked_again(self, call: str, tmp_path: Path) -> None:
        source = save(tmp_path / "source")
        disk = ActingDisk(call, f"target/{data_files(source)[0]}", refuse(errno.EIO))
        assert copy_checkpoint(source, tmp_path / "target", disk=disk).retries == 1
        assert loaded(tmp_path / "target") == 1.0

    def test_from_which_another_program_removes_files_is_named_and_nothing_is_committed(self, tmp_path: Path) -> None:
        source, target = save(tmp_path / "source"), tmp_path / "target"
        name = data_files(source)[-1]
        disk = ActingDisk("rename", "target/.robust_dcp.report.json", lambda path: (target / name).unlink())
        with pytest.raises(StorageError, match=rf"target lacks files that this copy has sent: {name}; another program"):
            copy_checkpoint(source, target, disk=disk)
        copy_checkpoint(source, target)
        assert loaded(target) == 1.0


def _copy_until_killed(source: str, target: str, call: str, part: str) -> None:
    disk = ActingDisk(call, part, lambda path: os.kill(os.getpid(), signal.SIGKILL))
    copy_checkpoint(source, target, options=ONE_THREAD, disk=disk)


@pytest.mark.parametrize(
    ("call", "part"),
    [("rename", ".robust_dcp.copying."), ("rename", "target/_"), ("unlink", "target/.robust_dcp.copying.")],
)
def test_a_copy_that_was_killed_goes_on_and_leaves_nothing(call: str, part: str, tmp_path: Path) -> None:
    """Of Megatron, whose files have the same names each time. ``tests/promises/test_kills.py`` kills copies of ours."""
    source, target = tmp_path / "source", tmp_path / "target"
    KINDS["Megatron"](source)
    (killed,) = run_ranks(1, _copy_until_killed, str(source), str(target), call, part, init=False)
    is_committed = (target / ".metadata").exists()
    assert killed.exitcode == -signal.SIGKILL and is_committed == (call == "unlink")
    n_arrived = len(data_files(target))  # before the commit, the others are not there yet
    again = copy_checkpoint(source, target)
    assert again.skipped_files >= n_arrived
    assert (files_of(target), loaded(target)) == (files_of(source), 1.0)


def test_progress_ends_at_the_size_of_the_checkpoint_and_a_limit_takes_its_time(tmp_path: Path) -> None:
    source = save(tmp_path / "source")
    told: list[tuple[int, int]] = []
    options = CopyOptions(threads=1, limit_bytes_per_second=4e6)
    copied = copy_checkpoint(source, tmp_path / "target", options=options, progress=lambda *both: told.append(both))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 400_000
    last = max((source / name).stat().st_size for name in files_of(source))  # what comes last is not waited for
    assert copied.seconds >= (told[-1][0] - last - 10_000) / 4e6


def test_a_copy_that_is_told_to_stop_ends_within_a_part_of_a_file(tmp_path: Path) -> None:
    robust_dcp.save({"weight": state_dict()["weight"].repeat(80)}, checkpoint_id=tmp_path / "source")
    told: list[int] = []

    def interrupt(done_nbytes: int, total_nbytes: int) -> None:
        told.append(done_nbytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(
            tmp_path / "source",
            tmp_path / "target",
            options=CopyOptions(threads=1, part_bytes=5 << 20),
            progress=interrupt,
        )
    assert told == [5 << 20]
