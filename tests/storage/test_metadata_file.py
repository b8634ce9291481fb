"""``.metadata``: written for every stock reader, read from every stock writer, and neither trusted nor believed."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.metadata import pickled as pickled_file
from robust_dcp.storage.metadata.metadata_file import StorageInfo, decode_metadata, encode_metadata, referenced_files
from robust_dcp.storage.metadata.pickled import (
    PAGE_NBYTES,
    SLAB_ROWS,
    MetadataHead,
    Names,
    StoredRows,
    encode_piece,
    piece_nbytes,
)
from robust_dcp.storage.metadata.stored_pickle import TRAILER_NBYTES
from robust_dcp.storage.metadata.unpickling import interpreted, natively
from robust_dcp.storage.records.checksum import crc32
from tests.storage.forged import Call


def metadata_of(relative_path: Any = "__0_0.distcp", offset: Any = 0, length: Any = 1577) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    properties = TensorProperties(torch.bfloat16, memory_format=torch.channels_last)
    metadata = Metadata(
        state_dict_metadata={
            "weight": TensorStorageMetadata(properties, torch.Size([2, 3]), [chunk]),
            "step": BytesStorageMetadata(),
        },
        planner_data={"weight": ("weight",), "step": ("step",)},
        storage_data={
            MetadataIndex("weight", [0, 0], 0): StorageInfo(relative_path, offset, length),
            MetadataIndex("step"): StorageInfo("__1_0.distcp", 0, 10, ["stream.zstd/1"]),
        },
        storage_meta=StorageMeta(checkpoint_id=PurePath("/checkpoints/1"), save_id="save"),
    )
    if hasattr(metadata, "version"):  # torch 2.9 and newer
        metadata.version = "1.0.0"
    return metadata


def test_we_read_what_we_and_what_stock_write() -> None:
    for encoded in (encode_metadata(metadata_of()), *(pickle.dumps(metadata_of(), p) for p in (2, 4, 5))):
        decoded = decode_metadata(encoded, ".metadata")
        assert decoded == metadata_of()
        weight = decoded.state_dict_metadata["weight"]
        assert isinstance(weight, TensorStorageMetadata)
        assert type(weight.properties) is TensorProperties
    assert referenced_files(metadata_of()) == {"__0_0.distcp", "__1_0.distcp"}


def test_the_empty_file_of_a_power_cut_is_explained() -> None:
    with pytest.raises(CorruptCheckpoint, match="empty file"):
        decode_metadata(b"", "/checkpoint/.metadata")


def test_properties_are_written_with_the_values_that_every_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_metadata(metadata_of())
    state: Any = TensorProperties.__getstate__  # this torch then pickles one value more, as a later one may
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], (3, 1)))
    assert encode_metadata(metadata_of()) == encoded


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict[str, Any] = field(default_factory=dict)
    all_local_plans: Any = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: Any = None


def test_an_old_megatron_checkpoint_is_read_without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.dist_checkpointing.strategies.torch"
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(parts[count - 1]))
    for cls in (MCoreMetadata, MCoreSavePlan):
        monkeypatch.setattr(cls, "__module__", name)
        setattr(sys.modules[name], cls.__name__, cls)
    plan = MCoreSavePlan([], mcore_data={"weight": {"nd_reformulated_orig_global_shape": (2, 3)}})
    metadata = MCoreMetadata(**vars(metadata_of()), mcore_data={"weight": {}}, all_local_plans=[plan])
    encoded = pickle.dumps(metadata)
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), None)

    decoded: Any = decode_metadata(encoded, ".metadata")
    assert type(decoded) is Metadata
    assert decoded == metadata_of()
    assert vars(decoded)["mcore_data"] == {"weight": {}}
    assert type(vars(decoded)["all_local_plans"][0]) is SavePlan
    assert decode_metadata(encode_metadata(decoded), ".metadata") == metadata_of()


def test_code_is_refused_and_not_run(tmp_path: Path) -> None:
    metadata = metadata_of()
    metadata.planner_data["evil"] = Call(os.mkdir, str(tmp_path / "ran"))
    for encoded in (pickle.dumps(metadata), encode_metadata(metadata)):
        with pytest.raises(UnsafeCheckpoint, match=r"posix\.mkdir.*add_safe_globals") as caught:
            decode_metadata(encoded, "/checkpoint/.metadata")
        assert (caught.value.file, caught.value.what) == ("/checkpoint/.metadata", "posix.mkdir")
    assert not (tmp_path / "ran").exists()


@dataclass
class PlannerExtra:
    value: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_a_class_of_the_users_planner_can_be_registered() -> None:
    metadata = metadata_of()
    metadata.planner_data["extra"] = PlannerExtra(3)
    with pytest.raises(UnsafeCheckpoint, match="PlannerExtra"):
        decode_metadata(encode_metadata(metadata), ".metadata")
    with torch.serialization.safe_globals([PlannerExtra]):
        assert decode_metadata(encode_metadata(metadata), ".metadata") == metadata


def test_what_is_not_regular_is_read_as_objects_are() -> None:
    metadata = metadata_of()
    extra = {"set": {1, 2}, "order": OrderedDict(a=1), (1, ("b",)): Chunk((0,), (1,), 0, (2, 3)), "array": np.arange(3)}
    metadata.planner_data["extra"] = extra
    for protocol in (2, 4, 5):
        decoded = decode_metadata(pickle.dumps(metadata, protocol), ".metadata")
        found = decoded.planner_data.pop("extra")
        assert found.pop("array").tolist() == [0, 1, 2]
        assert found == {key: value for key, value in extra.items() if key != "array"}
        assert decoded == metadata_of()


NAMED = ["MetadataIndex", "Metadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta"]


@pytest.mark.parametrize("attribute", ["__init__", "fqn", "__name__", "__qualname__", "__annotations__", "__bases__"])
def test_a_pickle_cannot_change_the_classes_that_it_names(attribute: str) -> None:
    """BUILD with a pair of states calls ``setattr``: here on the class itself."""
    for name in NAMED:
        kind = getattr(torch.distributed.checkpoint.metadata, name)
        before = dict(vars(kind)), kind.__name__, kind.__qualname__, kind.__bases__
        value = b"c_codecs\nencode\n\x85" if attribute == "__bases__" else b"X\x02\0\0\0.."
        state = pickle.NONE + b"}X" + len(attribute).to_bytes(4, "little") + attribute.encode() + value + b"s\x86b"
        attack = pickle.PROTO + b"\x04ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n" + state + b"."
        with pytest.raises(UnsafeCheckpoint, match=rf"{name}\.{attribute}"):
            decode_metadata(attack, ".metadata")
        assert (dict(vars(kind)), kind.__name__, kind.__qualname__, kind.__bases__) == before


def broken(change: str) -> Metadata:
    metadata = metadata_of()
    tensor = metadata.state_dict_metadata["weight"]
    exec(change, {**globals(), "metadata": metadata, "tensor": tensor})
    return metadata


@pytest.mark.parametrize(
    "change",
    [
        "metadata.state_dict_metadata = [1]",
        "metadata.state_dict_metadata[3] = tensor",
        "metadata.state_dict_metadata['weight'] = {}",
        "metadata.storage_data = ['x']",
        "metadata.storage_data['weight'] = 3",
        "tensor.properties = None",
        "tensor.properties.dtype = 'float32'",
        "tensor.size = (2, -3)",
        "tensor.chunks = None",
        "tensor.chunks[0].offsets = (0,)",
        "tensor.chunks[0].sizes = (2, 1.5)",
        "del tensor.chunks[0].sizes",
        "metadata.storage_data[MetadataIndex('weight')] = StorageInfo('__0_0.distcp', 1 << 63, 1)",
        "metadata.storage_data[MetadataIndex('weight')] = StorageInfo('__0_0.distcp', 1 << 62, 1 << 62)",
        "metadata.storage_data[MetadataIndex('weight')] = StorageInfo('__0_0.distcp', 0, 1 << 70)",
    ],
)
def test_values_that_no_reader_can_use_are_refused(change: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_metadata(encode_metadata(broken(change)), ".metadata")


Properties = tuple[torch.dtype, torch.layout, bool]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """One written item; those of variable size are told their place at each emission."""

    offset: Dims
    size: Dims
    file: int
    place: tuple[int, int]
    is_variable: bool = False


@dataclass(frozen=True)
class Entry:
    """One name; an object has no properties, and one chunk."""

    name: str
    properties: Properties | None
    size: Dims
    chunks: tuple[Chunk, ...]
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds, to be made into columns and into stock's objects."""

    entries: tuple[Entry, ...]
    n_files: int
    has_paths: bool = True

    def columns(self) -> tuple[Names, StoredRows]:
        tensors = [entry for entry in self.entries if entry.properties is not None]
        properties = list(dict.fromkeys(entry.properties for entry in tensors if entry.properties is not None))
        all_sizes = [e.size for e in tensors] + [d for e in tensors for c in e.chunks for d in (c.offset, c.size)]
        sizes = sorted(dict.fromkeys(all_sizes), key=len)
        place_of = {size: place for place, size in enumerate(sizes)}
        rows = [(number, entry, chunk) for number, entry in enumerate(self.entries) for chunk in entry.chunks]

        def int32(values: list[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        names = Names(
            names=[entry.name for entry in self.entries],
            paths=[entry.path for entry in self.entries] if self.has_paths else None,
            properties=properties,
            name_properties=int32(
                [-1 if e.properties is None else properties.index(e.properties) for e in self.entries]
            ),
            name_size=int32([-1 if e.properties is None else place_of[e.size] for e in self.entries]),
            sizes=sizes,
        )
        return names, StoredRows(
            sizes=sizes,
            name=int32([number for number, _, _ in rows]),
            offset=int32([-1 if e.properties is None else place_of[c.offset] for _, e, c in rows]),
            size=int32([-1 if e.properties is None else place_of[c.size] for _, e, c in rows]),
            file=int32([chunk.file for _, _, chunk in rows]),
            start=np.array([-1 if c.is_variable else c.place[0] for _, _, c in rows], dtype=np.int64),
            nbytes=np.array([-1 if c.is_variable else c.place[1] for _, _, c in rows], dtype=np.int64),
        )

    def variable_places(self, shift: int = 0) -> np.ndarray:
        chunks = [chunk for entry in self.entries for chunk in entry.chunks if chunk.is_variable]
        return np.array([c.place for c in chunks], dtype=np.int64).reshape(-1, 2) + shift

    def stock(self, file_names: list[str], storage_meta: StorageMeta | None, shift: int = 0) -> Metadata:
        """The metadata as stock's planner and writer make it; places of variable items are moved by ``shift``."""
        metadata = Metadata({}, None, {}, storage_meta)
        metadata.version = "1.0.0"
        if self.has_paths:
            metadata.planner_data = {entry.name: entry.path for entry in self.entries}
        for entry in self.entries:
            if entry.properties is None:
                metadata.state_dict_metadata[entry.name] = BytesStorageMetadata()
            else:
                metadata.state_dict_metadata[entry.name] = TensorStorageMetadata(
                    TensorProperties(*entry.properties),
                    torch.Size(entry.size),
                    [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in entry.chunks],
                )
            for chunk in entry.chunks:
                index = MetadataIndex(entry.name, None if entry.properties is None else chunk.offset)
                start, nbytes = (number + shift * chunk.is_variable for number in chunk.place)
                metadata.storage_data[index] = StorageInfo(file_names[chunk.file], start, nbytes)
        return metadata


def names_of(n_files: int, generation: int = 0) -> list[str]:
    return [f"__{file}_ä.{generation}.distcp" for file in range(n_files)]


def rows_by_rank(content: Content, n_ranks: int) -> list[tuple[StoredRows, np.ndarray]]:
    """What each rank writes, and its variable places. Each has a row of items that follow each other."""
    (_, rows), places = content.columns(), content.variable_places()
    n_rows, n_variable = len(rows.name), np.append(0, np.cumsum(rows.start < 0))
    of_ranks = []
    for rank in range(n_ranks):
        begin, end = rank * n_rows // n_ranks, (rank + 1) * n_rows // n_ranks
        columns = {name: getattr(rows, name)[begin:end] for name in StoredRows.__struct_fields__ if name != "sizes"}
        of_ranks.append((StoredRows(sizes=rows.sizes, **columns), places[n_variable[begin] : n_variable[end]]))
    return of_ranks


def emitted(content: Content, meta: StorageMeta | None, n_ranks: int = 3) -> bytes:
    """The ``.metadata`` of ``content``."""
    names, file_names = content.columns()[0], names_of(content.n_files)
    head, pieces = MetadataHead(names), list[bytes]()
    for rows, places in rows_by_rank(content, n_ranks):
        pieces.append(encode_piece(rows, len(names.names), file_names, places))
        assert len(pieces[-1]) == piece_nbytes(rows, file_names, {})
    assert {len(part) % PAGE_NBYTES for part in (head.data, *pieces)} == {0}  # no page has two writers
    tail = head.tail([(len(piece), crc32(piece)) for piece in pieces], meta)
    return b"".join([head.data, *pieces, tail])


def in_full(value: Any) -> Any:
    """``value`` with the type and all attributes of each object in it, which ``==`` does not compare."""
    if isinstance(value, dict):
        return dict, sorted(((in_full(k), in_full(v)) for k, v in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return type(value), [in_full(member) for member in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value), sorted((name, in_full(member)) for name, member in vars(value).items())
    return type(value), value


def by_stock_reader(data: bytes) -> Metadata:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / ".metadata").write_bytes(data)
        metadata = FileSystemReader(directory).read_metadata()
    assert metadata.storage_meta is not None
    metadata.storage_meta.load_id = None  # the reader's own
    return metadata


READERS: dict[str, Callable[[bytes], Metadata]] = {
    "pickle.load": lambda data: pickle.load(io.BytesIO(data)),
    "pickle in Python": lambda data: pickle._Unpickler(io.BytesIO(data)).load(),
    "decode_metadata": lambda data: decode_metadata(data, ".metadata"),
    "FileSystemReader": by_stock_reader,
}

numbers = st.one_of(st.integers(0, 300), st.integers(0, (1 << 63) - 1))
texts = st.text(st.characters(), max_size=6)
paths = st.lists(st.one_of(texts, st.integers(-(1 << 70), 1 << 70), st.integers(0, 9)), max_size=5).map(tuple)
properties_of_tensors = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([torch.strided, torch.sparse_coo, torch.sparse_csr]),
    st.booleans(),
)


@st.composite
def contents(draw: st.DrawFn) -> Content:
    n_files = draw(st.integers(1, 5))
    places = st.tuples(numbers, numbers).map(lambda place: (place[0] // 2, place[1] // 2))  # a file has an end
    files = st.integers(0, n_files - 1)
    entries = []
    for name in draw(st.lists(texts, unique=True, max_size=5)):
        path = draw(st.one_of(st.just((name,)), paths))
        if draw(st.booleans()):
            chunk = Chunk((), (), draw(files), draw(places), draw(st.booleans()))
            entries.append(Entry(name, None, (), (chunk,), path))
            continue
        ndim = draw(st.integers(0, 5))
        dims = st.tuples(*[numbers] * ndim)
        offsets = draw(st.lists(dims, unique=True, min_size=1, max_size=4))
        chunks = [Chunk(o, draw(dims), draw(files), draw(places), draw(st.booleans())) for o in sorted(offsets)]
        entries.append(Entry(name, draw(properties_of_tensors), draw(dims), tuple(chunks), path))
    return Content(tuple(entries), n_files, draw(st.booleans()))


metas = st.builds(StorageMeta, checkpoint_id=st.one_of(texts, st.just(PurePosixPath("/a/b"))), modules=st.lists(texts))


def example(n_tensors: int = 3) -> Content:
    """Two chunks of each tensor, an object of variable size and one whose place is known."""
    bfloat16 = (torch.bfloat16, torch.strided, False)
    chunks = (Chunk((0, 0), (2, 4), 0, (0, 900)), Chunk((2, 0), (2, 4), 1, (1 << 40, 900)))
    tensors = [Entry(f"layers.{n}.w", bfloat16, (4, 4), chunks, ("layers", n, "w")) for n in range(n_tensors)]
    variable = Entry("step", None, (), (Chunk((), (), 1, (5, 6), is_variable=True),), ("step",))
    known = Entry("args", None, (), (Chunk((), (), 1, (7, 8)),), ("args",))
    return Content((*tensors, variable, known), n_files=2)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=60, deadline=None)
@given(content=contents(), meta=metas)
def test_every_reader_finds_what_stock_would_have_written(reader: str, content: Content, meta: StorageMeta) -> None:
    file_names = names_of(content.n_files)
    found = READERS[reader](emitted(content, meta))
    expected = content.stock(file_names, meta)
    assert found == expected
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    assert in_full(found) == in_full(decode_metadata(encode_metadata(expected), ".metadata"))


@settings(max_examples=40, deadline=None)
@given(content=contents(), meta=metas)
def test_pythons_own_unpickler_reads_what_writers_write_and_as_the_interpreter_does(
    content: Content, meta: StorageMeta
) -> None:
    file_names = names_of(content.n_files)
    ours = emitted(content, meta)
    stock = content.stock(file_names, meta)
    pickles = [ours[:-TRAILER_NBYTES], *(pickle.dumps(stock, protocol) for protocol in (2, 3, 4, 5))]
    for pickled in pickles:
        natively_read = natively(pickled)
        assert natively_read is not None  # else each load of a large checkpoint takes five times longer
        assert in_full(natively_read) == in_full(interpreted(pickled, ".metadata"))


def test_a_tensor_may_have_more_chunks_than_a_slab_has_rows() -> None:
    chunks = tuple(Chunk((n,), (1,), 0, (n << 20, 1 << 20)) for n in range(2 * SLAB_ROWS + 1))
    float32 = (torch.float32, torch.strided, False)
    small = [Entry(name, float32, (1,), (Chunk((0,), (1,), 0, (0, 4)),), (name,)) for name in ("a", "c")]
    huge = Entry("b", float32, (len(chunks),), chunks, ("b",))
    content = Content((small[0], huge, small[1]), n_files=1)
    assert pickle.loads(emitted(content, None)) == content.stock(names_of(1), None)


def test_attributes_that_another_torch_adds_are_written_as_it_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem._StorageInfo, "__getstate__", lambda self: {**vars(self), "added": (1, "x")})
    pickled_file._form.cache_clear()
    try:
        content = example()
        found = pickle.loads(emitted(content, None))
    finally:
        pickled_file._form.cache_clear()
    assert found == content.stock(names_of(2), None)
    assert {info.added for info in found.storage_data.values()} == {(1, "x")}
