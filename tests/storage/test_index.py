"""An index says what its ``.metadata`` says, and costs what is asked of it.

A damaged or hostile one never gives a wrong tensor: it is not used, or refused by an error of ours.
``tests/promises/test_damage`` puts one beside another ``.metadata``.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import pickle
import struct
import tracemalloc
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import robust_dcp
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index import form
from robust_dcp.storage.index.form import (
    BLOCKS_AT,
    HEAD_NBYTES,
    SECTIONS,
    SLAB_NBYTES,
    Column,
    DamagedIndex,
    IndexFile,
    IndexTemplate,
    encode_block,
    fit_of,
)
from robust_dcp.storage.index.stored_index import ChunkKind, StoredChunks, index_of, open_index
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.checksum import crc32
from tests.harness.damage import flip_bit
from tests.storage.test_metadata_file import Chunk, Content, Entry, contents, emitted, in_full, names_of, rows_by_rank

META = StorageMeta("/a/checkpoint", str(uuid.UUID(int=7)))


def _indexed(content: Content) -> Content:
    entries = sorted(content.entries, key=lambda entry: entry.name)
    return dataclasses.replace(
        content, entries=tuple(dataclasses.replace(entry, path=tuple(entry.name.split("."))) for entry in entries)
    )


indexed_contents: st.SearchStrategy[Content] = contents().map(_indexed)
"""As a plan gives them: sorted, and paths that spell their names."""


def sorted_content(*entries: Entry, n_files: int = 1) -> Content:
    """The content of a checkpoint with these entries."""
    return _indexed(Content(entries, n_files))


def put(directory: Path, content: Content, meta: StorageMeta | None = META, n_ranks: int = 3) -> tuple[Path, Path]:
    """Write ``.metadata`` and the index of ``content`` there."""
    metadata, files, (names, rows) = emitted(content, meta, n_ranks), names_of(content.n_files), content.columns()
    blocks, rank = list[bytes](), np.empty(len(rows.name), dtype=np.int32)
    at = 0
    for number, (of_rank, places) in enumerate(rows_by_rank(content, n_ranks)):
        rank[at : at + len(of_rank.name)] = number
        at += len(of_rank.name)
        jumps = np.flatnonzero(np.diff(of_rank.name, prepend=-2) != 1)
        blocks.append(encode_block(of_rank, np.column_stack([jumps, of_rank.name[jumps]]), places))
    template = IndexTemplate(names, rows, rank, [len(files)] * n_ranks, list(map(len, blocks)))  # all write to all
    (_, head), (_, sections) = template.encode(fit_of(len(metadata), metadata), files * n_ranks, meta, {})
    (directory / METADATA_NAME).write_bytes(metadata)
    (directory / INDEX_NAME).write_bytes(b"".join([head, *blocks, sections]))
    return directory / METADATA_NAME, directory / INDEX_NAME


def lazy(directory: Path, disk: Disk | None = None) -> Metadata | None:
    """What the index there says; ``None`` if it is not used."""
    reader = RobustReader(directory, disk=disk)
    found = reader.source.find()
    metadata = reader.source.open(found) if found.index else None
    if metadata is not None and metadata.storage_meta is not None:
        metadata.storage_meta.load_id = None  # the reader's own
    return metadata


def with_fixed_checksums(data: bytes | bytearray) -> bytes:
    """The same index with the CRC-32s that its bytes have now, as who forges one would write them."""
    data = bytearray(data)
    places = [struct.unpack_from("<QQ", data, 64 + 40 * number + 24) for number in range(len(SECTIONS))]
    sums = b"".join(
        struct.pack("<I", crc32(bytes(data[at : min(at + SLAB_NBYTES, start + nbytes)])))
        for start, nbytes in places[:-1]
        if start + nbytes <= len(data)
        for at in range(start, start + nbytes, SLAB_NBYTES)
    )
    start, nbytes = places[-1]
    if nbytes == len(sums) and start + nbytes <= len(data):
        data[start : start + nbytes] = sums
    struct.pack_into("<I", data, 28, crc32(bytes(data[start : start + nbytes])))
    struct.pack_into("<I", data, HEAD_NBYTES - 4, crc32(bytes(data[: HEAD_NBYTES - 4])))
    return bytes(data)


FLOAT32 = (torch.float32, torch.strided, False)


@settings(max_examples=150, deadline=None)
@given(content=indexed_contents)
def test_it_says_what_metadata_says(tmp_path_factory: pytest.TempPathFactory, content: Content) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    put(directory, content)
    found, expected = lazy(directory), content.stock(names_of(content.n_files), META)
    assert found == expected and expected == found
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    assert set(found.storage_data) == set(expected.storage_data)
    assert len(found.storage_data) == len(expected.storage_data)
    for index, info in expected.storage_data.items():
        assert found.storage_data.get(index) == info
    for name, entry in expected.state_dict_metadata.items():
        assert name in found.state_dict_metadata and found.state_dict_metadata.get(name) == entry
    assert "no such name" not in found.state_dict_metadata
    assert found.storage_data.get(MetadataIndex("no such name")) is None
    for made in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert in_full(made) == in_full(decode_metadata(encode_metadata(expected), ".metadata"))


def _grid(name: str, rows: int, columns: int, extent: int = 6) -> Entry:
    """A tensor that is cut into ``rows * columns`` chunks."""
    size = (rows * extent, columns * extent)
    offsets = itertools.product(range(0, size[0], extent), range(0, size[1], extent))
    chunks = (Chunk(offset, (extent, extent), 0, (100 * n, 100)) for n, offset in enumerate(offsets))
    return Entry(name, FLOAT32, size, tuple(chunks))


def test_names_are_found_wherever_they_stand(tmp_path: Path) -> None:
    names = sorted({f"layer.{n}.{part}" for n in range(40) for part in ("w", "b", "ä", "")} | {"", "\U0001f600", "ÿ"})
    put(tmp_path, sorted_content(*(Entry(name, None, (), (Chunk((), (), 0, (0, 1)),)) for name in names)))
    index = open_index(Disk(), str(tmp_path))
    assert index is not None
    assert index.find_all(names[::-1]).tolist() == [*range(len(names))][::-1]
    for step in (2, 7, 100):
        some = names[::step]
        others = [name + "~" for name in some]
        assert index.find_all([*others, *some]).tolist() == [-1] * len(some) + [*range(0, len(names), step)]
    assert [index.find_all([name]).tolist() for name in names] == [[number] for number in range(len(names))]
    assert index.find_all(["\ud800"]).tolist() == [-1]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_finds_the_chunks_that_stock_finds(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    put(directory, sorted_content(_grid("a", 2, 1), _grid("w", rows, columns), _grid("x", 1, 3)))
    metadata = lazy(directory)
    assert metadata is not None
    entry: Any = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata) and isinstance(entry.chunks, StoredChunks)
    offsets = [data.draw(st.integers(0, extent)) for extent in entry.size]
    sizes = [data.draw(st.integers(0, extent - at)) for extent, at in zip(entry.size, offsets, strict=True)]
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    rows, kinds = entry.chunks.overlap(box.offsets, box.sizes)
    plain = TensorStorageMetadata(entry.properties, entry.size, list(entry.chunks))
    stock = create_read_items_for_chunk_list("w", plain, [box]) if 0 not in sizes else []
    expected = sorted((item.storage_index.index, *item.storage_offsets, *item.lengths) for item in stock)
    found = zip((rows - entry.chunks.first).tolist(), [kind.part for kind in kinds], strict=True)
    assert [(place, *part.in_chunk, *part.lengths) for place, part in found if part] == expected
    index: Any = index_of(metadata)
    for row, (hint, chunk) in enumerate(enumerate(plain.chunks), entry.chunks.first):
        assert {index.row(MetadataIndex("w", chunk.offsets, each)) for each in (hint, None)} == {row}
    assert index.row(MetadataIndex("w", [1, 1])) is None


def test_uneven_chunks_are_found_too(tmp_path: Path) -> None:
    """One long chunk first, and short ones behind and beside it: the first dimension alone does not tell."""
    cuts = [((0, 0), (100, 1)), ((0, 1), (10, 1)), ((10, 1), (5, 1)), ((15, 1), (85, 1))]
    chunks = tuple(Chunk(offset, size, 0, (n, 1)) for n, (offset, size) in enumerate(cuts))
    put(tmp_path, sorted_content(Entry("w", FLOAT32, (100, 2), chunks)))
    metadata = lazy(tmp_path)
    assert metadata is not None
    chunks_of_w: Any = metadata.state_dict_metadata["w"].chunks
    for at, size, expected in (([50, 0], [1, 2], [0, 3]), ([9, 0], [2, 2], [0, 1, 2])):
        assert chunks_of_w.overlap(torch.Size(at), torch.Size(size))[0].tolist() == expected


def test_what_is_read_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    read: list[int] = []
    for ranks in (64, 1024):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        put(directory, sorted_content(*(_grid(f"layer.{n:04d}.w", ranks, 1) for n in range(64))), n_ranks=64)
        nbytes = [0]

        class Counting(Disk):
            def pread_into(self, file: Any, buffer: Any, offset: int, nbytes: list[int] = nbytes) -> int:
                nbytes[0] += len(buffer)
                return super().pread_into(file, buffer, offset)

        found = RobustReader(directory).source.find()
        metadata = RobustReader(directory, disk=Counting()).source.open(found)
        assert metadata is not None
        index: Any = index_of(metadata)
        index.find_all(["layer.0007.w"])
        entry: Any = metadata.state_dict_metadata["layer.0007.w"]
        assert index.row(MetadataIndex("layer.0007.w", [6 * 13, 0])) == entry.chunks.first + 13
        assert metadata.storage_data[MetadataIndex("layer.0007.w", [6 * 13, 0], 13)].offset == 1300
        read.append(nbytes[0])
    assert read[1] < 1 << 20


def test_ranks_count_items_alike(tmp_path: Path) -> None:
    content = sorted_content(_grid("w", 3, 2), Entry("a", None, (), (Chunk((), (), 0, (7, 1), True),)), n_files=1)
    put(tmp_path, content)
    indexed = lazy(tmp_path)
    assert indexed is not None
    stored, index = indexed.storage_data, index_of(indexed)
    assert index is not None
    in_order = sorted(stored, key=lambda index: (index.fqn, tuple(index.offset or ())))
    assert [index.row(item) for item in in_order] == list(range(len(stored)))
    infos = [(stored[item].relative_path, stored[item].offset) for item in in_order]
    assert [infos[row] for row in index.places(np.arange(index.n_rows)).sorted()[0]] == sorted(infos)
    assert index_of(content.stock(names_of(1), META)) is None


def test_a_load_of_many_tensors_needs_nothing_but_the_index(tmp_path: Path) -> None:
    n_items = SLAB_NBYTES // 8 + 2000  # so that the columns of places have more than one slab
    state = {f"layer.{n}": torch.full((), n) for n in range(n_items)}
    robust_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with open(tmp_path / ".metadata", "r+b") as file:  # whoever decodes it fails; an index is fitted by its last 4 KiB
        file.write(bytes(4096))
    loaded = {name: torch.zeros((), dtype=torch.int64) for name in state}
    for _ in range(2):
        report = robust_dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded == state
    assert report.items == n_items


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
                metadata.storage_data.get(MetadataIndex(name, entry.size))
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


def outcome_of(directory: Path) -> Metadata | str | None:
    """What the index there says, or the class of the error that refuses it; ``None`` if it is not used at all."""
    try:
        found = lazy(directory)
        if found is not None:
            check_whole_chunks(found, CONTENT)
        return None if found is None else everything(found)
    except (CorruptCheckpoint, UnsafeCheckpoint) as error:
        return type(error).__name__


def test_no_flipped_byte_goes_unnoticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata, index = put(tmp_path, CONTENT)
    del metadata
    good = index.read_bytes()
    expected = everything(CONTENT.stock(names_of(2), META))
    for at in (at for at, byte in enumerate(good) if byte or at % 67 == 0):  # most of it is gaps
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
    found = RobustReader(tmp_path).source.find()
    metadata = RobustReader(tmp_path).source.open(found)
    assert found.index and metadata is not None
    os.truncate(index, HEAD_NBYTES)
    with pytest.raises(DamagedIndex, match=r"it ends after .* remove this file, and load again"):
        everything(metadata)


def _forge(path: Path, section: str, values: dict[int, int]) -> None:
    """Put other numbers into some rows of a section, or of a column of the first rank's block, with the checksums that
    then are right."""
    data = bytearray(path.read_bytes())
    if section in SECTIONS:
        start, _ = struct.unpack_from("<QQ", data, 64 + 40 * list(SECTIONS).index(section) + 24)
        kind = {"<u8": "<Q", "<i8": "<q", "<i4": "<i", "|u1": "<B"}[SECTIONS[section]]
        for row, value in values.items():
            struct.pack_into(kind, data, start + row * struct.calcsize(kind), value)
        data = bytearray(with_fixed_checksums(data))
    else:
        file = IndexFile(Disk(), str(path))
        end = Column(file, "block_ends")[0]
        block = file.block(BLOCKS_AT, end)
        for row, value in values.items():
            getattr(block, section).setflags(write=True)
            getattr(block, section).flat[row] = value
        data[BLOCKS_AT:end] = file.data[BLOCKS_AT:end].tobytes()
        struct.pack_into("<I", data, BLOCKS_AT, crc32(bytes(data[BLOCKS_AT + 4 : end])))
    path.write_bytes(data)


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
        ("name_writers", {0: 1 << 62}),
        ("writers", {0: 3}),
        ("writers", {0: -1}),
        ("writers", {0: 2}),
        ("rank_files", {0: 1 << 62}),
        ("block_ends", {0: 1 << 62}),
        ("block_ends", {0: 4096, 1: 4096, 2: 4096}),
        ("offset", {0: 99}),
        ("offset", {0: -1}),
        ("size", {1: -7}),
        ("file", {0: 2}),
        ("file", {0: -1}),
        ("nbytes", {0: -1}),
        ("start", {0: -5}),
        ("values", {0: -1}),
        ("ndim", {0: 65}),
        ("ndim", {0: 1 << 30}),
        ("jumps", {0: 1}),
        ("jumps", {1: 99}),
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
    _, index = put(tmp_path, CONTENT, n_ranks=1)
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
    _forge(index, "offset", dict.fromkeys(range(33), 0))
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
