"""A store that is read like a directory takes few calls, and nothing is ever written there."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from robust_dcp import StorageError
from robust_dcp.storage.remote import Calls, RemoteDisk

DATA = random.Random(1).randbytes((3 << 20) + 7)
FILES = {".metadata": DATA, "__0_0.distcp": DATA[:100_003], "below/part": b"x"}
URL = "memory://robust_dcp/step_1"


@pytest.fixture(scope="module", autouse=True)
def _stored() -> Iterator[None]:
    store = fsspec.filesystem("memory")
    for name, data in FILES.items():
        store.pipe_file(f"{URL}/{name}", data)
    yield
    store.rm(URL, recursive=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of bytes that the store is asked for from now on."""
    ranges: list[tuple[int, int]] = []
    cat_file = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, path: str, start: int, end: int) -> Any:
        ranges.append((start, end))
        return cat_file(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return ranges


def test_many_small_reads_of_an_index_are_few_calls(fetched: list[tuple[int, int]]) -> None:
    disk = RemoteDisk(URL)
    file = disk.open_read(f"{URL}/.metadata")
    found = bytearray()
    for offset in range(0, len(DATA), 50_000):
        piece = bytearray(50_000)
        found += piece[: disk.pread_into(file, piece, offset)]
    disk.close(file)
    assert bytes(found) == DATA and len(fetched) == 4


def test_a_directory_is_listed_by_the_names_in_it() -> None:
    assert RemoteDisk(URL).list_directory(URL) == [".metadata", "__0_0.distcp", "below"]


def test_of_a_data_file_only_the_bytes_that_are_wanted_are_fetched(fetched: list[tuple[int, int]]) -> None:
    disk = RemoteDisk(URL)
    file = disk.open_read(f"{URL}/__0_0.distcp", direct=None)
    piece = bytearray(10)
    disk.pread_into(file, piece, 77)
    assert fetched == [(77, 87)] and bytes(piece) == DATA[77:87] and file.why_buffered == "it is in a remote store"


def test_an_answer_that_was_cut_off_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cat_file, answers = MemoryFileSystem.cat_file, []

    def cut_off_once(self: MemoryFileSystem, path: str, start: int, end: int) -> Any:
        answers.append(cat_file(self, path, start, end)[: None if answers else -1])
        return answers[-1]

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cut_off_once)
    disk = RemoteDisk(URL, calls=Calls(retries=1))
    piece = bytearray(10)
    disk.pread_into(disk.open_read(f"{URL}/__0_0.distcp"), piece, 0)
    assert bytes(piece) == DATA[:10] and [len(answer) for answer in answers] == [9, 10]


PATH = f"{URL}/.metadata"
WRITES = ("open_new", "pwrite", "preallocate", "truncate", "fsync", "fsync_directory", "rename")


@pytest.mark.parametrize("write", WRITES)
def test_whatever_would_write_is_refused_and_says_how_to_save_there(write: str) -> None:
    with pytest.raises(StorageError, match=r"only reads here; save to a directory with RobustWriter") as caught:
        getattr(RemoteDisk(URL), write)(PATH)
    assert caught.value.errno == errno.EROFS
    assert fsspec.filesystem("memory").cat_file(PATH) == DATA
