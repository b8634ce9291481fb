"""Copies between directories: what arrives, in which order, what is refused, and what is left after a failure.

``tests/promises`` kills copies, and lets their disk refuse, at each call.
"""

from __future__ import annotations

import errno
import filecmp
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from robust_dcp import CopyOptions, CorruptCheckpoint, StorageError, UnsafeCheckpoint, copy_checkpoint
from robust_dcp.drain.copy import CopyResult
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.footer import TAIL_NBYTES
from robust_dcp.storage.metadata.stored_pickle import not_being_loaded
from tests.drain.checkpoints import KINDS, ONE_THREAD, files_of, loaded, save
from tests.faults.disk import Call, Fault, FaultDisk
from tests.harness.damage import data_files, flip_bit

REFUSED = OSError(errno.EACCES, "")


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
    KINDS["Megatron"](tmp_path / "source")
    with FaultDisk(tmp_path / "target") as disk:
        copy_checkpoint(tmp_path / "source", tmp_path / "target")
    calls = [(call.operation, os.path.relpath(call.path, disk.directory)) for call in disk.calls]
    renamed = [name for operation, name in calls if operation == "rename" and ".copying." not in name]
    assert renamed[-1] == ".metadata"
    assert [name for name in renamed if name.startswith("modelopt_state/")][-1] == "modelopt_state/.metadata"
    commit = calls.index(("rename", ".metadata"))
    for directory in (".", "modelopt_state"):
        in_it = [place for place, call in enumerate(calls[:commit]) if call[0] == "rename" and call[1] in renamed]
        last = max(place for place in in_it if os.path.normpath(os.path.dirname(calls[place][1])) == directory)
        assert ("fsync", directory) in calls[last:commit]
    assert ("fsync", ".") in calls[commit:]


def test_only_what_is_missing_or_damaged_is_sent_again(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    copy_checkpoint(source, target)
    flip_bit(data_files(target)[0], 2000)
    (target / ".robust_dcp.report.json").unlink()
    again = copy_checkpoint(source, target)
    assert (again.files, again.skipped_files) == (2, len(files_of(source)) - 3)  # .metadata is not compared as a file
    assert again.skipped_nbytes > 0 and loaded(target) == 1.0


def copy_half(source: Path, target: Path) -> set[str]:
    with FaultDisk(target, on={"rename:.metadata": REFUSED}), pytest.raises(StorageError):
        copy_checkpoint(source, target)
    return files_of(target)


class TestATargetThatHoldsSomethingElse:
    def test_stays_as_it_is(self, tmp_path: Path) -> None:
        source, target = save(tmp_path / "source", 2.0), save(tmp_path / "target", 1.0)
        before = files_of(target)
        with pytest.raises(StorageError, match=r"there is another checkpoint at .*target, .*: copy to another place"):
            copy_checkpoint(source, target)
        assert (files_of(target), loaded(target)) == (before, 1.0)
        notes = tmp_path / "other/below/notes.txt"
        notes.parent.mkdir(parents=True)
        notes.write_text("mine")
        with pytest.raises(StorageError, match=r"what is not of this checkpoint: below/notes\.txt; copy to an empty"):
            copy_checkpoint(source, tmp_path / "other")
        assert files_of(tmp_path / "other") == {"below/notes.txt"}

    def test_half_a_copy_of_another_save_is_not_in_the_way_of_a_save_of_ours(self, tmp_path: Path) -> None:
        """A job whose node was lost saves the step again, on another node."""
        half = copy_half(save(tmp_path / "lost"), tmp_path / "target")
        for value in (2.0, 3.0):  # the second save into a directory gives names that no other has
            save(tmp_path / "again", value)
        copy_checkpoint(tmp_path / "again", tmp_path / "target")
        assert loaded(tmp_path / "target") == 3.0 and half - files_of(tmp_path / "target") == set()

    def test_half_a_copy_of_files_with_the_same_names_is_refused_and_named(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            KINDS["Megatron"](tmp_path / name)
        copy_half(tmp_path / "one", tmp_path / "target")
        with pytest.raises(StorageError, match=rf"another copy has begun at .* remove {tmp_path}/target\S* and what"):
            copy_checkpoint(tmp_path / "two", tmp_path / "target")
        assert copy_checkpoint(tmp_path / "one", tmp_path / "target").skipped_files > 0
        assert loaded(tmp_path / "target") == 1.0

    def test_a_place_in_itself_is_refused(self, tmp_path: Path) -> None:
        source = save(tmp_path / "source")
        (tmp_path / "link").symlink_to(source)
        for target in (source, f"file://{source}", tmp_path / "link", source / "below"):
            with pytest.raises(ValueError, match="cannot be copied to itself or to a place in itself"):
                copy_checkpoint(source, target)


@pytest.mark.parametrize("kind", ["ours", "stock", "the same"])
@pytest.mark.parametrize("target", ["{path}/target", "memory://test_copy/at_once_{kind}"])
def test_of_copies_to_one_place_at_the_same_time_one_is_found_whole(target: str, kind: str, tmp_path: Path) -> None:
    names = ["one"] * 4 if kind == "the same" else ["one", "two"]
    for name in set(names):
        KINDS["ours" if kind == "the same" else kind](tmp_path / name)
    if kind == "ours":
        save(tmp_path / "two", 2.0)  # over the first: so its files have names that no other save gives
    place, all_begin = target.format(path=tmp_path, kind=kind.replace(" ", "_")), threading.Barrier(len(names))

    def copy(name: str) -> BaseException | None:
        all_begin.wait(300)
        try:
            copy_checkpoint(tmp_path / name, place)
        except (StorageError, CorruptCheckpoint) as error:
            return error
        return None

    with ThreadPoolExecutor(len(names)) as threads:
        outcomes = list(threads.map(copy, names))
    assert None in outcomes and loaded(place) in (1.0, 2.0)


def test_a_copy_does_not_remove_the_files_of_another_one_that_commits_at_the_same_moment(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one", 1.0), save(tmp_path / "two", 2.0)
    target, second = tmp_path / "target", threading.Semaphore(0)

    def begin(call: Call) -> None:
        began.append(threads.submit(copy_checkpoint, two, target))
        assert ready.acquire(timeout=300)  # it has found no checkpoint there

    def wait(call: Call) -> None:
        ready.release()
        assert second.acquire(timeout=300)

    def end(call: Call) -> None:
        second.release()
        began[0].result()

    ready, began = threading.Semaphore(0), list[Future[CopyResult]]()
    on: dict[str, Fault] = {"rename:.metadata#1": begin, "rename:.metadata#2": wait, "read:.metadata#1": end}
    refused = pytest.raises(StorageError, match="there is another checkpoint at")
    with ThreadPoolExecutor(1) as threads, FaultDisk(target, on=on), refused:
        copy_checkpoint(one, target)
    assert loaded(target) == 2.0


class TestASource:
    @pytest.mark.parametrize("when", ["read:source/{name}#1", "rename:target/{name}"])
    def test_that_is_replaced_meanwhile_is_not_committed(self, when: str, tmp_path: Path) -> None:
        source, target = save(tmp_path / "source"), tmp_path / "target"
        replaced = {when.format(name=data_files(source)[-1].name): lambda call: save(source, 2.0)}
        refused = pytest.raises(StorageError, match="was replaced by another save while it was copied")
        with FaultDisk(tmp_path, on=replaced), refused:
            copy_checkpoint(source, target, options=ONE_THREAD)
        assert not (target / ".metadata").exists()
        copy_checkpoint(source, target)
        assert loaded(target) == 2.0

    @pytest.mark.parametrize(
        ("kind", "damage", "expected"),
        [
            ("ours", lambda file: flip_bit(file, 2000), "expected bytes"),
            ("ours", lambda file: flip_bit(file, -TAIL_NBYTES - 10), "expected checksums"),
            ("ours", lambda file: flip_bit(file, -1), "expected the footer"),
            ("safetensors", lambda file: flip_bit(file, -1), "expected bytes"),
            ("stock", lambda file: os.truncate(file, 9), r"expected \d+ bytes or more, found 9"),
        ],
    )
    def test_that_is_damaged_is_named_and_not_copied(
        self, kind: str, damage: Callable[[Path], None], expected: str, tmp_path: Path
    ) -> None:
        KINDS[kind](tmp_path / "source")
        damage(data_files(tmp_path / "source")[0])
        with pytest.raises(CorruptCheckpoint, match=f"cannot be used: {expected}"):
            copy_checkpoint(tmp_path / "source", tmp_path / "target")
        assert not (tmp_path / "target/.metadata").exists()

    def test_whose_metadata_is_missing_or_of_an_impossible_size_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="no checkpoint was committed there; there is no such directory"):
            copy_checkpoint(tmp_path / "nothing", tmp_path / "target")
        source = save(tmp_path / "source")
        os.truncate(source / ".metadata", 17 << 30)
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata cannot be used: expected at most \d+ bytes, found"):
            copy_checkpoint(source, tmp_path / "target")

    def test_that_leads_out_of_its_directory_is_refused(self, tmp_path: Path) -> None:
        KINDS["stock"](tmp_path / "source")
        metadata = tmp_path / "source/.metadata"
        (tmp_path / "secrets").mkdir()
        (tmp_path / "source/__0_0.distcp").rename(tmp_path / "secrets/0_0.distcp")
        (tmp_path / "source/_").symlink_to(tmp_path / "secrets")
        metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"_/0_0.distcp"))
        with pytest.raises(UnsafeCheckpoint, match="lies behind a symbolic link to a directory"):
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


def test_a_full_disk_ends_the_copy_at_once_and_one_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    full = FaultDisk(target, on={f"write:{data_files(source)[-1].name}*": OSError(errno.ENOSPC, "")})
    with full, pytest.raises(StorageError, match=r"No space left on device.*free space") as raised:
        copy_checkpoint(source, target, options=ONE_THREAD)
    assert raised.value.errno == errno.ENOSPC
    assert sum(data_files(source)[-1].name in name for name in full.names("write")) == 1  # asking again does not help
    assert not [name for name in files_of(target) if name.endswith(".copying")]
    for number, call in enumerate(("create", "fsync", "rename")):
        with FaultDisk(tmp_path, on={f"{call}:{number}/{data_files(source)[0].name}*#1": OSError(errno.EIO, "")}):
            assert copy_checkpoint(source, tmp_path / str(number)).retries == 1
        assert loaded(tmp_path / str(number)) == 1.0


def test_files_that_another_program_removes_from_the_target_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    name = data_files(source)[-1].name
    removed: dict[str, Fault] = {"rename:.robust_dcp.report.json": lambda call: (target / name).unlink()}
    refused = pytest.raises(StorageError, match=rf"target lacks files that this copy has sent: {name}; another program")
    with FaultDisk(target, on=removed), refused:
        copy_checkpoint(source, target)
    copy_checkpoint(source, target)
    assert loaded(target) == 1.0


def test_progress_ends_at_the_size_of_the_checkpoint_and_a_limit_takes_its_time(tmp_path: Path) -> None:
    source = save(tmp_path / "source")
    told: list[tuple[int, int]] = []
    options = CopyOptions(threads=1, limit_bytes_per_second=4e6)
    copied = copy_checkpoint(source, tmp_path / "target", options=options, progress=lambda *both: told.append(both))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 400_000
    last = max((source / name).stat().st_size for name in files_of(source))  # what comes last is not waited for
    assert copied.seconds >= (told[-1][0] - last - 10_000) / 4e6
