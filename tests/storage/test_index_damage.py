"""A damaged or hostile index never gives a wrong tensor: it is not used, or refused by an error of ours."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.index import form
from robust_dcp.storage.index.form import HEAD_NBYTES, SECTIONS, DamagedIndex
from robust_dcp.storage.index.stored_index import ChunkKind, index_of, open_index
from robust_dcp.storage.reader import RobustReader
from tests.harness.damage import flip_bit
from tests.storage.indices import META, indexed_contents, lazy, put, sorted_content, with_fixed_checksums
from tests.storage.test_index import _grid
from tests.storage.test_metadata_pickle import Chunk, Content, Entry, names_of

OBJECTS = (
    Entry("step", None, (), (Chunk((), (), 1, (5, 6), is_variable=True),)),
    Entry("args.0", None, (), (Chunk((), (), 0, (7, 8)),)),
)
CONTENT = sorted_content(_grid("a.w", 3, 2), _grid("b", 2, 2), *OBJECTS, n_files=2)


def everything(metadata: Metadata) -> Metadata:
    """Ask for all there is, in the ways in which a load does, and return it as plain objects."""
    entries = {}
    for name in metadata.state_dict_metadata:
        entry: Any = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            if hasattr(entry.chunks, "overlap"):
                entry.chunks.overlap(entry.size, entry.size)
                entry.chunks.find(entry.size)
            entry = TensorStorageMetadata(entry.properties, entry.size, list(entry.chunks))
        entries[name] = entry
    paths = None if metadata.planner_data is None else dict(metadata.planner_data)
    places = {index: metadata.storage_data[index] for index in metadata.storage_data}
    found = Metadata(entries, paths, places, metadata.storage_meta)
    found.version = metadata.version  # torch 2.7 has no such argument
    return found


def check_whole_chunks(metadata: Metadata, content: Content) -> None:
    """What is found in columns must be what is found one by one, and never anything else."""
    kinds = {
        ChunkKind(entry.properties[0], torch.Size(entry.size), torch.Size(chunk.offset), torch.Size(chunk.size))
        for entry in content.entries
        for chunk in entry.chunks
        if entry.properties is not None
    }
    names = [entry.name for entry in content.entries]
    for kind in kinds:
        index = index_of(metadata)
        assert index is not None
        found = index.find_whole(names, [kind], [0] * len(names))
        asked, chunk, (files, *places) = found
        columns = (column.tolist() for column in (asked, chunk, *places))
        for asked, chunk, file, start, nbytes in zip(*columns, strict=True):
            place: Any = metadata.storage_data[MetadataIndex(names[asked], kind.offsets, chunk)]
            assert (place.relative_path, place.offset, place.length) == (files[file], start, nbytes)


def outcome_of(directory: Path, content: Content = CONTENT) -> Metadata | str | None:
    """What the index there says, or the class of the error that refuses it; ``None`` if it is not used at all."""
    try:
        found = lazy(directory)
        if found is not None:
            check_whole_chunks(found, content)
        return None if found is None else everything(found)
    except (CorruptCheckpoint, UnsafeCheckpoint) as error:
        return type(error).__name__


def test_no_flipped_byte_goes_unnoticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata, index = put(tmp_path, CONTENT)
    del metadata
    good = index.read_bytes()
    expected = everything(CONTENT.stock(names_of(2), META))
    for at in range(len(good)):
        flip_bit(index, at, at % 8)
        assert outcome_of(tmp_path) is None  # .metadata is read
        flip_bit(index, at, at % 8)
    for bad in (*(good[:length] for length in range(0, len(good), 50)), good + b"\0"):
        index.write_bytes(bad)
        assert outcome_of(tmp_path) is None
    assert "read instead" in caplog.text
    index.write_bytes(good)
    assert outcome_of(tmp_path) == expected


def test_what_another_rank_finds_damaged_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has checked all of it. It is read and not mapped, so no damage ends the process."""
    monkeypatch.setattr(form, "_FIRST_READ_NBYTES", HEAD_NBYTES)  # as if it were a large one
    _, index = put(tmp_path, CONTENT)
    identity = RobustReader(tmp_path).source.find_index()
    metadata = RobustReader(tmp_path).source.indexed_metadata(identity)
    assert identity and metadata is not None
    os.truncate(index, HEAD_NBYTES)
    with pytest.raises(DamagedIndex, match=r"it ends after .* remove this file, and load again"):
        everything(metadata)


@settings(max_examples=300, deadline=None)
@given(content=indexed_contents, seed=st.integers(0, 1 << 32))
def test_a_forged_index_is_refused_or_is_data(
    tmp_path_factory: pytest.TempPathFactory, content: Content, seed: int
) -> None:
    """Right checksums over numbers that no save of ours writes: what comes back may be anything, but as objects of DCP
    whose files lie in the directory."""
    directory = tmp_path_factory.mktemp("checkpoint")
    _, index = put(directory, content)
    data = bytearray(index.read_bytes())
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(64, len(data))
        width = min(chance.choice([1, 1, 2, 4, 8]), len(data) - at)
        value = chance.choice([0, 1, 255, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, chance.getrandbits(64)])
        data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    index.write_bytes(with_fixed_checksums(data))
    found = outcome_of(directory, content)
    if isinstance(found, Metadata):
        assert all(".." not in info.relative_path for info in found.storage_data.values())
        assert all(info.offset >= 0 and info.length >= 0 for info in found.storage_data.values())


def _forge(path: Path, section: str, values: dict[int, int]) -> None:
    """Put other numbers into some rows of a section, with the checksums that then are right."""
    data = bytearray(path.read_bytes())
    start, _ = struct.unpack_from("<QQ", data, 64 + 40 * list(SECTIONS).index(section) + 24)
    kind = {"<u8": "<Q", "<i8": "<q", "<i4": "<i", "|u1": "<B"}[SECTIONS[section]]
    for row, value in values.items():
        struct.pack_into(kind, data, start + row * struct.calcsize(kind), value)
    path.write_bytes(with_fixed_checksums(data))


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("name_ends", {0: 1 << 62}),
        ("name_ends", {0: 5, 1: 0}),
        ("name_chunks", {0: 1 << 62}),
        ("name_chunks", {0: 11, 1: 0, 2: 11}),
        ("name_properties", {0: 99}),
        ("name_properties", {0: -2}),
        ("name_size", {0: 99}),
        ("name_size", {0: -1}),
        ("size_counts", {2: 1 << 62}),
        ("sizes", {0: -1}),
        ("chunk_offset", {0: 99}),
        ("chunk_size", {1: -7}),
        ("chunk_file", {0: 2}),
        ("chunk_file", {0: -1}),
        ("chunk_nbytes", {0: -1}),
        ("chunk_start", {0: -5}),
        ("variable_rows", {0: 3}),
        ("file_ends", {0: 1 << 62}),
        ("path_ends", {0: 1 << 62}),
        ("path_parts", {0: 1 << 30}),
        ("properties", {0: 0}),
        ("meta", {0: 0}),
    ],
)
def test_what_refers_to_nothing_is_refused(tmp_path: Path, section: str, values: dict[int, int]) -> None:
    _, index = put(tmp_path, CONTENT)
    _forge(index, section, values)
    found = outcome_of(tmp_path)
    assert found in (None, "DamagedIndex") or found == everything(CONTENT.stock(names_of(2), META))


def test_a_file_name_cannot_leave_the_directory(tmp_path: Path) -> None:
    _, index = put(tmp_path, CONTENT)
    _forge(index, "files", dict(enumerate(b"../etc")))
    metadata = lazy(tmp_path)
    assert metadata is not None
    with pytest.raises(UnsafeCheckpoint, match="leaves the directory"):
        _ = metadata.storage_data[MetadataIndex("args.0")]


def test_chunks_that_lie_on_each_other_are_not_all_read(tmp_path: Path) -> None:
    """Otherwise a small file could have each tensor read as often as it has chunks."""
    _, index = put(tmp_path, sorted_content(_grid("w", 100, 1)))
    metadata = lazy(tmp_path)
    assert metadata is not None
    _forge(index, "chunk_offset", dict.fromkeys(range(100), 1))
    found = open_index(Disk(), str(tmp_path))
    assert found is not None
    with pytest.raises(DamagedIndex, match="overlap"):
        found.stored(0).overlap(torch.Size([0, 0]), torch.Size([6, 6]))


def test_an_index_takes_no_memory_for_what_it_only_claims(tmp_path: Path) -> None:
    _, index = put(tmp_path, CONTENT)
    good = index.read_bytes()
    for number, name in enumerate(SECTIONS):
        data = bytearray(good)
        struct.pack_into("<Q", data, 64 + 40 * number + 32, 1 << 40)
        index.write_bytes(with_fixed_checksums(data))
        tracemalloc.start()
        assert lazy(tmp_path) is None, name
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
