"""What a checkpoint holds, as plain values: its items, their chunks, and the files that these lie in.

It is read as a load reads it: from ``.metadata``, from the ``__0.metadata``, ``__1.metadata``, … that DCP writes with
``use_collectives=False``, or from the heads of safetensors files where there is neither. :func:`verify` is a load of
all of it without a target.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from robust_dcp.coverage import Box, Coverage
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError, UnsafeCheckpoint
from robust_dcp.names import fits
from robust_dcp.nodes.files import files_elsewhere
from robust_dcp.nodes.parity_file import check_parity, parity_name
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, is_data_file, mark_of, metadata_name
from robust_dcp.storage.index.form import IndexFile, fit_of_file
from robust_dcp.storage.index.stored_index import ChunkKind
from robust_dcp.storage.layouts.places import Places
from robust_dcp.storage.metadata.metadata_file import StorageInfo
from robust_dcp.storage.options import ReadOptions
from robust_dcp.storage.pieces import in_batches, is_plain
from robust_dcp.storage.reading.load import ItemReader
from robust_dcp.storage.reading.metadata_source import MetadataSource
from robust_dcp.storage.reading.reads import PlannedItems

_NUMBER: Final = re.compile(r"([0-9]{1,18})")


class Chunk(NamedTuple):
    """A part of a tensor, or a whole object.

    Attributes:
        offsets: where the chunk begins in its tensor; empty for an object.
        sizes: its shape; empty for an object.
        file: the data file that holds it, relative to the checkpoint; ``None`` if no file is named.
        start: its first byte in the file.
        stored_nbytes: how many bytes it takes in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None = None
    start: int = 0
    stored_nbytes: int = 0


@dataclass(frozen=True)
class Item:
    """A tensor or an object of the state dict.

    Attributes:
        name: its FQN.
        dtype: for example ``"bfloat16"``; ``None`` for an object.
        itemsize: bytes of an element of the tensor.
        shape: of the whole tensor; empty for an object.
        chunks: in the order of the ``.metadata``.
    """

    name: str
    dtype: str | None
    itemsize: int
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor; an object otherwise."""
        return self.dtype is not None

    @property
    def words(self) -> str:
        """What it is, for people: ``"float32 [4, 3]"``, or ``"object"``."""
        return f"{self.dtype} {list(self.shape)}" if self.is_tensor else "object"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, or of the pickled object."""
        if self.is_tensor:
            return math.prod(self.shape) * self.itemsize
        return sum(chunk.stored_nbytes for chunk in self.chunks)


class StoredFile(NamedTuple):
    """A data file.

    Attributes:
        name: its path relative to the checkpoint.
        nbytes: its size; ``None`` if there is no such file.
        needed_nbytes: how long it must be to hold what ``.metadata`` says it holds.
        chunks: how many chunks that is. What several ranks have saved for themselves is in several files.
    """

    name: str
    nbytes: int | None
    needed_nbytes: int
    chunks: int

    @property
    def problem(self) -> str | None:
        """What is wrong with it, as far as its size says."""
        if self.nbytes is None:
            return "no such file"
        return f"{self.nbytes} bytes instead of {self.needed_nbytes}" if self.nbytes < self.needed_nbytes else None


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        disk: where it is.
        path: its directory, or its URL.
        written_by: ``robust_dcp``, ``torch``, or ``safetensors`` where there is no ``.metadata``.
        saved_seconds: when it was committed, in seconds since 1970.
        save_id: the id of the save; ``None`` if it has none.
        metadata: the ``.metadata``, or one of each rank that saved for itself.
        items: sorted by name, with numbers in names by their value.
        files: the data files that are named, sorted by name.
    """

    disk: Disk
    path: str
    written_by: str
    saved_seconds: float
    save_id: str | None
    metadata: tuple[Metadata, ...]
    items: tuple[Item, ...]
    files: tuple[StoredFile, ...]

    def items_that_fit(self, globs: Sequence[str]) -> list[Item]:
        """The items whose names one of the patterns fits; all if there are none."""
        return [item for item in self.items if not globs or fits(item.name, globs)]

    @property
    def file_nbytes(self) -> int:
        """Bytes of all data files that are there."""
        return sum(file.nbytes or 0 for file in self.files)

    @property
    def mark(self) -> str | None:
        """What our save has marked its files with; ``None`` if they have no marks."""
        return mark_of(self.save_id) if self.written_by == "robust_dcp" and self.save_id is not None else None


def read_contents(disk: Disk, path: str) -> Contents:
    """What the checkpoint in ``path`` holds.

    Raises:
        StorageError: there is no checkpoint, or it cannot be read.
        CorruptCheckpoint: its ``.metadata`` is not what a writer made, or makes no sense.
        UnsafeCheckpoint: it names files outside of the checkpoint, or classes that do not belong into it.
    """
    source = MetadataSource(disk, path)
    names = set(disk.list_directory(path)) if disk.exists(path) else set()
    ranks: list[int | None] = [None]
    if METADATA_NAME not in names:
        numbers = (name.removeprefix("__").removesuffix(METADATA_NAME) for name in names)
        found = sorted(int(each) for each in numbers if each.isdecimal() and metadata_name(int(each)) in names)
        ranks = [*found] or [None]
    of_ranks = [source.decode_metadata(source.metadata_bytes(rank), rank) for rank in ranks]
    items: dict[str, Item] = {}
    ends: dict[str, list[int]] = defaultdict(list)
    for item in (each for metadata in of_ranks for each in _items(metadata)):
        known = items.get(item.name)
        there = () if known is None else {chunk.offsets for chunk in known.chunks}
        more = tuple(chunk for chunk in item.chunks if chunk.offsets not in there)
        items[item.name] = item if known is None else replace(known, chunks=known.chunks + more)
        for chunk in item.chunks:
            if chunk.file is not None:
                ends[chunk.file].append(chunk.start + chunk.stored_nbytes)
    files = []
    for name, of_chunks in sorted(ends.items()):
        file = disk.fingerprint(os.path.join(path, name))
        nbytes = None if file is None else file[1]
        files.append(StoredFile(name, nbytes, max(of_chunks), len(of_chunks)))
    has_metadata = any(metadata_name(rank) in names for rank in ranks)
    dated = [metadata_name(rank) for rank in ranks] if has_metadata else [file.name for file in files]
    save_id = getattr(of_ranks[0].storage_meta, "save_id", None)
    written_by = "robust_dcp" if METADATA_NAME in names and source.files_are_marked() else "torch"
    return Contents(
        disk=disk,
        path=path,
        written_by=written_by if has_metadata else "safetensors",
        saved_seconds=max((disk.modified_seconds(os.path.join(path, each)) for each in dated), default=0.0),
        save_id=save_id if isinstance(save_id, str) else None,
        metadata=tuple(of_ranks),
        items=tuple(sorted(items.values(), key=_natural)),
        files=tuple(files),
    )


def _natural(item: Item) -> list[tuple[int, str]]:
    """So that ``layers.2`` comes before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in _NUMBER.split(item.name)]


def _items(metadata: Metadata) -> Iterator[Item]:
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for index, info in (metadata.storage_data or {}).items()
    }
    for name, entry in metadata.state_dict_metadata.items():
        whole = places.get((name, None), ())
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            chunks = tuple(Chunk(*box, *places.get((name, box[0]), whole)) for box in boxes)
            yield Item(name, str(dtype).removeprefix("torch."), dtype.itemsize, tuple(entry.size), chunks)
        else:
            yield Item(name, None, 1, (), (Chunk((), (), *whole),))


# --- verify

_OF_MEGATRON: Final = "common.pt"
"""Megatron-Core writes it beside ``.metadata`` with ``torch.save``."""

_BATCH_NBYTES: Final = 64 << 20
_MOST_OF_FILE: Final = 20
"""So many problems of one file are named. What is left of it is not read."""


class Problem(NamedTuple):
    """Something that is broken.

    Attributes:
        file: relative to the checkpoint.
        item: the name of the item; ``None`` if the whole file is meant.
        expected: what should be there.
        found: what is there.
    """

    file: str
    item: str | None
    expected: str
    found: str


class Findings(msgspec.Struct):
    """What was found.

    Attributes:
        problems: at most one for each item of a file.
        notes: what a user should know, and is no damage.
        checked_nbytes: bytes of data that were read.
        verified_nbytes: those that have the checksum that was written with them.
        unverified_nbytes: those that were written without one.
    """

    problems: dict[tuple[str, str | None], Problem] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)
    checked_nbytes: int = 0
    verified_nbytes: int = 0
    unverified_nbytes: int = 0

    def broken(self, file: str, item: str | None, expected: str, found: str) -> None:
        """Note a problem. The first one of an item in a file counts, because the others follow from it."""
        self.problems.setdefault((file, item), Problem(file, item, expected, found))

    def add(self, error: RobustCheckpointError, file: str, item: str | None = None) -> None:
        """Note an error of a file, or of the item ``item`` in it."""
        expected, found = getattr(error, "expected", None), getattr(error, "found", None)
        of_item = item if getattr(error, "item", None) else None
        self.broken(file, of_item, expected or "a file that can be read", found or error.message)


def verify(
    contents: Contents,
    findings: Findings,
    *,
    threads: int | None,
    with_data: bool,
    progress: Callable[[int, int], None],
) -> None:
    """Add what is wrong with a checkpoint.

    Args:
        threads: how many threads read, as for ``ReadOptions``.
        with_data: whether data is read and compared with checksums; otherwise only structure, sizes and the index are.
        progress: called with the bytes that were read, and those of all files.
    """
    elsewhere = set[str]()
    if contents.written_by == "robust_dcp" and contents.save_id is not None:
        missing = [file.name for file in contents.files if file.nbytes is None]
        elsewhere = _check_node(contents, contents.save_id, findings, with_data=with_data) if missing else elsewhere
    _check_structure(contents, findings, elsewhere)
    disk, names = contents.disk, {file.name for file in contents.files}
    for name in sorted(disk.list_directory(contents.path)):
        if is_data_file(name) and name not in names:
            findings.notes.append(f"{name} does not belong to this checkpoint: a crashed save may have left it")
    index = os.path.join(contents.path, INDEX_NAME)
    if contents.written_by == "robust_dcp" and disk.exists(index):
        try:
            file = IndexFile(disk, index)
            if file.fit == fit_of_file(disk, os.path.join(contents.path, METADATA_NAME)):
                file.check_all()
            else:
                expected = f"the index of this {METADATA_NAME}"
                findings.broken(INDEX_NAME, None, expected, f"one of another {METADATA_NAME}")
        except RobustCheckpointError as error:
            findings.add(error, INDEX_NAME)
    if not with_data:
        return
    load = _Load(contents, findings, threads, progress)
    for metadata in contents.metadata:
        load.read_all(metadata)
    common = disk.fingerprint(os.path.join(contents.path, _OF_MEGATRON))
    if contents.written_by != "safetensors" and common is not None:
        try:
            MetadataSource(disk, contents.path).read_beside(_OF_MEGATRON, sys.maxsize)
        except CorruptCheckpoint as error:
            findings.add(error, _OF_MEGATRON)
        at, nbytes = MetadataIndex(_OF_MEGATRON), common[1]
        info = StorageInfo(_OF_MEGATRON, 0, nbytes)
        metadata = Metadata({_OF_MEGATRON: BytesStorageMetadata()}, storage_data={at: info})
        load.read([_Wanted(_OF_MEGATRON, 0, nbytes, at, None, nbytes)], metadata, mark=None)


def _check_node(contents: Contents, save_id: str, findings: Findings, *, with_data: bool) -> set[str]:
    """Where nodes do not share the directory: the parity on this one. Returns the data files that are on others."""
    disk, name = contents.disk, parity_name(mark_of(save_id))
    if disk.exists(os.path.join(contents.path, name)):
        try:
            note = check_parity(disk, os.path.join(contents.path, name), with_data=with_data)
            findings.notes.append(f"protected: {note} ({note.group})")
        except RobustCheckpointError as error:
            findings.add(error, name)
    elsewhere = files_elsewhere(disk, contents.path, save_id, [file.name for file in contents.files])
    if elsewhere:
        findings.notes.append(f"{len(elsewhere)} data files are on other nodes: verify them there")
    return elsewhere


def _check_structure(contents: Contents, findings: Findings, elsewhere: Collection[str]) -> None:
    """``.metadata`` with itself, and with the sizes of files, but for those that are ``elsewhere``."""
    home = METADATA_NAME if contents.written_by != "safetensors" else ""
    for item in contents.items:
        for chunk in item.chunks:
            if chunk.file is None:
                where = f"its chunk at {list(chunk.offsets)}" if item.is_tensor else "it"
                findings.broken(home, item.name, f"a file for {where}", "none")
        if item.is_tensor:
            _check_cover(item, home, findings)
    for file in contents.files:
        if file.problem is not None and file.name not in elsewhere:
            findings.broken(file.name, None, f"a file of at least {file.needed_nbytes} bytes", file.problem)


def _check_cover(item: Item, home: str, findings: Findings) -> None:
    """The chunks fill the tensor, each element once."""
    boxes, shape = [Box(chunk.offsets, chunk.sizes) for chunk in item.chunks], item.shape
    for box in boxes:
        if len(box.offsets) != len(shape):
            findings.broken(home, item.name, f"chunks within {list(shape)}", f"a chunk {box}")
            return
    offset, size = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, len(shape)).swapaxes(0, 1)
    coverage = Coverage(np.zeros(len(boxes), dtype=np.intp), offset, size, np.array([shape], dtype=np.int64))
    problem = coverage.problem(0)
    if problem is not None:
        findings.broken(home, item.name, *problem)


class _Wanted(NamedTuple):
    """A stored chunk that is read.

    Attributes:
        file, start, stored_nbytes: where it lies.
        kind: of a plain tensor; ``None`` for objects and other tensors, which are read as bytes.
        nbytes: the length of its data.
    """

    file: str
    start: int
    stored_nbytes: int
    at: MetadataIndex
    kind: Any
    nbytes: int


def _as_bytes(wanted: _Wanted) -> ReadItem:
    nothing = torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, wanted.at, nothing, wanted.at, nothing, nothing)


def _in_columns(wanted: Sequence[_Wanted], planner: _Nowhere) -> PlannedItems:
    """Plain tensors. Those of one kind have one target."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(each.kind for each in wanted))}
    targets = [torch.empty(kind.lengths, dtype=kind.dtype) for kind in kinds]
    rows = [(kinds[each.kind], each.at.index, each.start, each.stored_nbytes) for each in wanted]
    kind_of, chunks, *where = np.array(rows, dtype=np.int64).T
    places = Places([each.file for each in wanted], np.arange(len(wanted)), *where)
    names, of_each = [each.at.fqn for each in wanted], [targets[number] for number in kind_of.tolist()]
    return PlannedItems(names, of_each, [*kinds], kind_of, chunks, places, planner=planner)


class _Nowhere(DefaultLoadPlanner):
    """The target of a load that has none."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._entries: dict[str, Any] = metadata.state_dict_metadata

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self._entries[read_item.dest_index.fqn].properties.dtype)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        pass


class _Load(msgspec.Struct):
    """Loads chunks, a batch at a time, and notes those that cannot be loaded."""

    contents: Contents
    findings: Findings
    threads: int | None
    progress: Callable[[int, int], None]
    n_problems: Counter[str] = msgspec.field(default_factory=Counter)

    def read_all(self, metadata: Metadata) -> None:
        """Read all that a ``.metadata`` names. Files that are missing or too short were noted before."""
        ends = {file.name: file.nbytes or 0 for file in self.contents.files}
        wanted: list[_Wanted] = []
        for item in _items(metadata):
            entry = metadata.state_dict_metadata[item.name]
            for number, (offsets, sizes, file, start, stored_nbytes) in enumerate(item.chunks):
                if file is None or start + stored_nbytes > ends[file]:
                    continue
                kind, nbytes, at = None, stored_nbytes, None
                if isinstance(entry, TensorStorageMetadata):
                    at, dtype = torch.Size(offsets), entry.properties.dtype
                    nbytes = math.prod(sizes) * dtype.itemsize
                    if is_plain(entry.properties):
                        kind = ChunkKind(dtype, entry.size, at, torch.Size(sizes))
                index = MetadataIndex(item.name, at, number)
                wanted.append(_Wanted(file, start, stored_nbytes, index, kind, nbytes))
        wanted.sort(key=lambda each: (each.kind is None, each.file, each.start))
        for _, alike in groupby(wanted, lambda each: each.kind is None):
            for batch in in_batches(alike, _BATCH_NBYTES, lambda each: each.nbytes):
                self.read(batch, metadata, self.contents.mark)

    def read(self, batch: Sequence[_Wanted], metadata: Metadata, mark: str | None) -> None:
        """Read some chunks, all in columns or all as bytes. If that fails, each half by itself."""
        batch = [each for each in batch if self.n_problems[each.file] < _MOST_OF_FILE]
        if not batch:
            return
        contents, findings, planner = self.contents, self.findings, _Nowhere(metadata)
        before_nbytes, nbytes = findings.checked_nbytes, sum(each.nbytes for each in batch)
        are_plain = batch[0].kind is not None
        items: Any = _in_columns(batch, planner) if are_plain else list(map(_as_bytes, batch))
        # Bytes are not loaded, so nothing in them runs.
        options = ReadOptions(threads=self.threads, trusted=not are_plain, buffer_bytes=2 * _BATCH_NBYTES)
        try:
            reads = ItemReader(
                items,
                planner,
                metadata,
                contents.path,
                contents.disk,
                options,
                lambda done_nbytes, _: self.progress(before_nbytes + done_nbytes, contents.file_nbytes),
                mark,
            )
            reads.run()
            findings.checked_nbytes += nbytes
            unverified_nbytes = reads.verification.unverified_nbytes
            findings.unverified_nbytes += unverified_nbytes
            findings.verified_nbytes += nbytes - unverified_nbytes
        except Exception as error:
            (first, *others), middle = batch, len(batch) // 2
            if others:
                self.read(batch[:middle], metadata, mark)
                self.read(batch[middle:], metadata, mark)
            elif are_plain and not isinstance(error, (CorruptCheckpoint, StorageError)):
                # Perhaps a tensor of a class of the user, whose copy may raise anything. Its bytes tell whether it is
                # whole.
                self.read([first._replace(kind=None)], metadata, mark)
                if isinstance(error, UnsafeCheckpoint):
                    findings.notes.append(f"a load has to trust {first.at.fqn}: {error.message}")
            elif not isinstance(error, RobustCheckpointError):
                raise
            else:
                findings.add(error, first.file, first.at.fqn)
                self.n_problems[first.file] += 1 if getattr(error, "item", None) else _MOST_OF_FILE
