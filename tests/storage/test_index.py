"""An index says what its ``.metadata`` says, costs what is asked of it, and is used with no other ``.metadata``."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import robust_dcp
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.index.form import SLAB_NBYTES
from robust_dcp.storage.index.stored_index import StoredChunks, index_of, open_index
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.reader import RobustReader
from tests.storage.indices import META, indexed_contents, lazy, put, sorted_content
from tests.storage.test_metadata_pickle import Chunk, Content, Entry, in_full, names_of

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
    expected = {name: number for number, name in enumerate(names)}
    assert index.find_all(reversed(names)) == expected
    for step in (2, 7, 100):
        some = names[::step]
        others = [name + "~" for name in some]
        assert index.find_all([*others, *some]) == {name: expected[name] for name in some}
    assert {name: index.find_all([name]).get(name) for name in names} == expected
    assert index.find_all(["\ud800"]).get("\ud800") is None


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
    found = entry.chunks.overlap(box.offsets, box.sizes)
    plain = TensorStorageMetadata(entry.properties, entry.size, list(entry.chunks))
    stock = create_read_items_for_chunk_list("w", plain, [box]) if 0 not in sizes else []
    expected = sorted((item.storage_index.index, *item.storage_offsets, *item.lengths) for item in stock)
    assert [(place, *in_chunk, *lengths) for place, _, in_chunk, _, lengths in found] == expected
    for place, chunk in enumerate(plain.chunks):
        assert entry.chunks.find(chunk.offsets) == place
    assert entry.chunks.find(torch.Size([1, 1])) is None


def test_uneven_chunks_are_found_too(tmp_path: Path) -> None:
    """One long chunk first, and short ones behind and beside it: the first dimension alone does not tell."""
    cuts = [((0, 0), (100, 1)), ((0, 1), (10, 1)), ((10, 1), (5, 1)), ((15, 1), (85, 1))]
    chunks = tuple(Chunk(offset, size, 0, (n, 1)) for n, (offset, size) in enumerate(cuts))
    put(tmp_path, sorted_content(Entry("w", FLOAT32, (100, 2), chunks)))
    metadata = lazy(tmp_path)
    assert metadata is not None
    found = metadata.state_dict_metadata["w"].chunks.overlap(torch.Size([50, 0]), torch.Size([1, 2]))
    assert [part[0] for part in found] == [0, 3]
    found = metadata.state_dict_metadata["w"].chunks.overlap(torch.Size([9, 0]), torch.Size([2, 2]))
    assert [part[0] for part in found] == [0, 1, 2]


def test_it_is_not_used_with_another_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = sorted_content(_grid("w", 2, 2))
    metadata, _ = put(tmp_path, content)
    good = metadata.read_bytes()
    assert lazy(tmp_path) is not None
    stock = pickle.dumps(content.stock(names_of(1), META))
    for other in (good[:-1], good + b"\0", good[:-1] + bytes([good[-1] ^ 1]), stock, b""):
        metadata.write_bytes(other)
        assert lazy(tmp_path) is None
    metadata.unlink()
    assert lazy(tmp_path) is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_what_is_read_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    read: list[int] = []
    for ranks in (64, 1024):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        put(directory, sorted_content(*(_grid(f"layer.{n:04d}.w", ranks, 1) for n in range(64))))
        nbytes = [0]

        class Counting(Disk):
            def pread_into(self, file: Any, buffer: Any, offset: int, nbytes: list[int] = nbytes) -> int:
                nbytes[0] += len(buffer)
                return super().pread_into(file, buffer, offset)

        identity = RobustReader(directory).source.find_index()
        metadata = RobustReader(directory, disk=Counting()).source.indexed_metadata(identity)
        assert metadata is not None
        index = index_of(metadata)
        assert index is not None
        index.find_all(["layer.0007.w"])
        entry: Any = metadata.state_dict_metadata["layer.0007.w"]
        place = entry.chunks.find(torch.Size([6 * 13, 0]))
        assert place == 13
        assert metadata.storage_data[MetadataIndex("layer.0007.w", [6 * 13, 0], place)].offset == 1300
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
    assert [sorted(infos).index(info) for info in infos] == index.order_in_files().tolist()
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
