"""Copies to and from a store of fsspec that cuts off, changes what it gets, or loses what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import robust_dcp
from robust_dcp import CopyOptions, CorruptCheckpoint, StorageError, copy_checkpoint
from tests.drain.checkpoints import IMPATIENT, loaded, save_ours, state_dict

URL = "memory://failing/step_1"
PART_NBYTES = 5 << 20


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


class _Store:
    """What the store does with its next calls.

    Attributes:
        n_times: how many calls it does that with; after these it works.
        n_done: how many there were.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.n_times = self.n_done = 0

    def changes_what_it_gets(self, name: str, change: Callable[[bytes], bytes], n_times: int) -> None:
        pipe_file = MemoryFileSystem.pipe_file
        self.n_times = n_times

        def pipe(filesystem: Any, path: str, value: bytes, **options: Any) -> None:
            pipe_file(filesystem, path, change(value) if self._is_next(path, name) else value, **options)

        self.monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)

    def fails(self, call: str, name: str, n_times: int, error: Callable[[], Exception]) -> None:
        works = getattr(MemoryFileSystem, call)
        self.n_times = n_times

        def fail(filesystem: Any, path: str, *arguments: Any, **options: Any) -> Any:
            if self._is_next(path, name):
                raise error()
            return works(filesystem, path, *arguments, **options)

        self.monkeypatch.setattr(MemoryFileSystem, call, fail)

    def cuts_off(self, call: str, name: str, n_times: int) -> None:
        """A file that is written in parts fails at its ``write`` or ``close``."""
        works = getattr(MemoryFile, call)
        self.n_times = n_times

        def cut(file: Any, *arguments: Any) -> Any:
            if self._is_next(str(file.path), name):
                raise ConnectionError("the store has hung up")
            return works(file, *arguments)

        self.monkeypatch.setattr(MemoryFile, call, cut)

    def _is_next(self, path: str, name: str) -> bool:
        if name not in path or self.n_done >= self.n_times:
            return False
        self.n_done += 1
        return True


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    return _Store(monkeypatch)


def flipped(data: bytes) -> bytes:
    return data[:2000] + bytes([data[2000] ^ 1]) + data[2001:]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint with a file of several parts."""
    robust_dcp.save({"weight": torch.ones(4_000_000)}, checkpoint_id=tmp_path / "large")
    return tmp_path / "large"


def loaded_large(url: str) -> float:
    found = {"weight": torch.zeros(4_000_000)}
    robust_dcp.load(found, checkpoint_id=url)
    (value,) = found["weight"].unique().tolist()
    return float(value)


@pytest.mark.parametrize(("change", "found"), [(flipped, "with CRC-32"), (half, r"\d+ bytes; it was sent twice")])
def test_a_file_that_arrives_otherwise_than_it_was_sent_is_sent_once_more_and_then_named(
    change: Callable[[bytes], bytes], found: str, store: _Store, tmp_path: Path
) -> None:
    save_ours(str(tmp_path / "source"))
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "other")
    store.changes_what_it_gets("__0_0", change, n_times=1)
    copy_checkpoint(tmp_path / "source", URL)
    assert store.n_done == 1 and loaded(URL) == 1.0

    store.n_done, store.n_times = 0, 2
    changed = (
        rf"failing/step_1/\S*__0_0\S*\.distcp is not as it was sent: expected \d+ bytes with CRC-32 .*, found .*{found}"
    )
    with pytest.raises(CorruptCheckpoint, match=changed):
        copy_checkpoint(tmp_path / "other", URL)
    assert loaded(URL) == 1.0  # of the copy before


def test_metadata_that_arrives_damaged_is_named_as_what_it_is(store: _Store, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    store.changes_what_it_gets("/.metadata", half, n_times=1)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata is not as it was sent: expected \d+ bytes") as raised:
        copy_checkpoint(tmp_path / "source", URL)
    assert "twice" not in raised.value.message
    copy_checkpoint(tmp_path / "source", URL)
    assert loaded(URL) == 1.0


def test_a_copy_whose_metadata_another_copy_replaces_at_once_says_that_both_went_to_one_place(
    store: _Store, tmp_path: Path
) -> None:
    for name, value in (("source", 1.0), ("other", 2.0)):
        robust_dcp.save(state_dict(value), checkpoint_id=tmp_path / name)
    theirs = (tmp_path / "other/.metadata").read_bytes()
    store.changes_what_it_gets("/.metadata", lambda ours: theirs, n_times=1)
    with pytest.raises(StorageError, match="another copy has ended there at the same time, and a load finds that one"):
        copy_checkpoint(tmp_path / "source", URL)


@pytest.mark.parametrize("call", ["write", "close"])
def test_a_file_of_several_parts_is_sent_again_as_a_whole(call: str, store: _Store, large: Path) -> None:
    store.cuts_off(call, ".distcp", n_times=2)
    copied = copy_checkpoint(large, URL, options=CopyOptions(part_bytes=PART_NBYTES))
    assert store.n_done == copied.retries == 2
    assert loaded_large(URL) == 1.0


def test_a_store_that_cuts_off_each_time_ends_the_copy_with_its_own_words(store: _Store, large: Path) -> None:
    store.cuts_off("write", ".distcp", n_times=1000)
    with pytest.raises(StorageError, match=r"send memory://failing/\S+\.distcp: the store has hung up"):
        copy_checkpoint(large, URL, options=CopyOptions(part_bytes=PART_NBYTES, retries=1))
    with pytest.raises(StorageError, match=r"no \.metadata"):
        robust_dcp.load({}, checkpoint_id=URL)


def test_a_small_file_that_is_refused_is_named_with_the_answer_of_the_store(store: _Store, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    store.fails("pipe_file", "__0_0.distcp", 1000, lambda: PermissionError("not yours"))
    with pytest.raises(StorageError, match=r"__0_0\.distcp.*not yours.*check the credentials"):
        copy_checkpoint(tmp_path / "source", URL)
    assert store.n_done == 1  # asking again does not help


def test_a_part_that_comes_back_too_short_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_ours(str(tmp_path / "source"))
    copy_checkpoint(tmp_path / "source", URL)
    cat_file, n_short = MemoryFileSystem.cat_file, 0

    def cat(filesystem: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        nonlocal n_short
        data: bytes = cat_file(filesystem, path, start, end, **options)
        if "__0_0.distcp" in path and n_short < 2:
            n_short += 1
            return half(data)
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    copied = copy_checkpoint(URL, tmp_path / "back")
    assert n_short == copied.retries == 2
    assert loaded(tmp_path / "back") == 1.0


def test_what_the_store_has_lost_already_need_not_be_removed(store: _Store, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "other")
    copy_checkpoint(tmp_path / "other", URL)
    store.fails("rm_file", "__0_0.distcp", 1, FileNotFoundError)
    copied = copy_checkpoint(tmp_path / "source", URL)
    assert "__0_0.distcp" in copied.removed and loaded(URL) == 1.0


def test_what_the_store_does_not_let_be_removed_stays_and_is_told(
    store: _Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_ours(str(tmp_path / "source"))
    robust_dcp.save(state_dict(2.0), checkpoint_id=tmp_path / "other")
    copy_checkpoint(tmp_path / "other", URL)
    store.fails("rm_file", "__0_0.distcp", 1, PermissionError)
    copy_checkpoint(tmp_path / "source", URL)
    assert "is committed, but files of the one before stay" in caplog.text and loaded(URL) == 1.0


def test_a_store_that_knows_no_such_directory_holds_nothing(store: _Store, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    store.fails("find", "failing", 1, FileNotFoundError)
    copy_checkpoint(tmp_path / "source", URL, options=IMPATIENT)
    assert store.n_done == 1 and loaded(URL) == 1.0


def test_metadata_that_is_gone_when_it_is_read_makes_no_checkpoint(store: _Store, tmp_path: Path) -> None:
    save_ours(str(tmp_path / "source"))
    copy_checkpoint(tmp_path / "source", URL)
    store.fails("cat_file", "/.metadata", 1, FileNotFoundError)
    with pytest.raises(StorageError, match="no checkpoint was committed there, so there is nothing to copy"):
        copy_checkpoint(URL, tmp_path / "target")
