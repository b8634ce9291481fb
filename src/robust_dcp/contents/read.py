"""What a checkpoint holds, as plain values: its items, their chunks, and the files that these lie in.

It is read as a load reads it: from ``.metadata``, from the ``__0.metadata``, ``__1.metadata``, … that DCP writes with
``use_collectives=False``, or from the heads of safetensors files where there is neither.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, mark_of, metadata_name
from robust_dcp.storage.reading.metadata_source import MetadataSource

__all__ = ["Chunk", "Contents", "Item", "StoredFile", "read_contents"]

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
        path: its keys in the nested state dict; empty where the checkpoint does not say them.
        dtype: for example ``"bfloat16"``; ``None`` for an object.
        itemsize: bytes of an element of the tensor.
        shape: of the whole tensor; empty for an object.
        chunks: in the order of the ``.metadata``.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str | None
    itemsize: int
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def fits(self, globs: Iterable[str]) -> bool:
        """Whether one of the patterns fits the name, or there are none."""
        globs = list(globs)
        return not globs or any(fnmatch.fnmatchcase(self.name, glob) for glob in globs)

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
        held: what it holds, in the order of the file. What several ranks have saved for themselves is in several.
    """

    name: str
    nbytes: int | None
    held: list[tuple[Item, Chunk]]

    @property
    def needed_nbytes(self) -> int:
        """How long it must be to hold what ``.metadata`` says it holds."""
        return max(chunk.start + chunk.stored_nbytes for _, chunk in self.held)

    @property
    def problem(self) -> str | None:
        """What is wrong with it, as far as its size says."""
        if self.nbytes is None:
            return "is missing"
        needed = self.needed_nbytes
        return f"has {self.nbytes} bytes and needs {needed}" if self.nbytes < needed else None


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        disk: where it is.
        path: its directory, or its URL.
        written_by: ``robust_dcp``, ``torch``, or ``safetensors`` where there is no ``.metadata``.
        saved_seconds: when it was committed, in seconds since 1970.
        save_id: the id of the save; ``None`` if it has none.
        items: sorted by name, with numbers in names by their value.
        files: the data files that are named, sorted by name.
    """

    disk: Disk
    path: str
    written_by: str
    saved_seconds: float
    save_id: str | None
    items: tuple[Item, ...]
    files: tuple[StoredFile, ...]

    @property
    def layout(self) -> str:
        """``torch`` or ``safetensors``."""
        return "safetensors" if any(file.name.endswith(SAFETENSORS_SUFFIX) for file in self.files) else "torch"

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
    source = MetadataSource(disk, path, load_id="")
    names = set(disk.list_directory(path)) if disk.exists(path) else set()
    ranks: list[int | None] = [None]
    if METADATA_NAME not in names:
        numbers = (name.removeprefix("__").removesuffix(METADATA_NAME) for name in names)
        found = sorted(int(each) for each in numbers if each.isdecimal() and metadata_name(int(each)) in names)
        ranks = [*found] or [None]
    of_ranks = [source.decode_metadata(source.metadata_bytes(rank), rank) for rank in ranks]
    items: dict[str, Item] = {}
    held: dict[str, list[tuple[Item, Chunk]]] = defaultdict(list)
    for item in (each for metadata in of_ranks for each in _items(metadata)):
        known = items.get(item.name)
        there = () if known is None else {chunk.offsets for chunk in known.chunks}
        more = tuple(chunk for chunk in item.chunks if chunk.offsets not in there)
        items[item.name] = item if known is None else replace(known, chunks=known.chunks + more)
        for chunk in item.chunks:
            if chunk.file is not None:
                held[chunk.file].append((item, chunk))
    files = []
    for name in sorted(held):
        file = os.path.join(path, name)
        in_order = sorted(held[name], key=lambda each: (each[1].start, each[1].stored_nbytes))
        files.append(StoredFile(name, disk.fingerprint(file)[1] if disk.exists(file) else None, in_order))
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
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, entry in metadata.state_dict_metadata.items():
        keys = paths.get(name)
        path = keys if isinstance(keys, tuple) and all(isinstance(key, (str, int)) for key in keys) else ()
        whole = places.get((name, None), ())
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            chunks = tuple(Chunk(*box, *places.get((name, box[0]), whole)) for box in boxes)
            yield Item(name, path, str(dtype).removeprefix("torch."), dtype.itemsize, tuple(entry.size), chunks)
        else:
            yield Item(name, path, None, 1, (), (Chunk((), (), *whole),))
