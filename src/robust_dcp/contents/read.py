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
from functools import cached_property
from typing import Any, Final, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, metadata_name
from robust_dcp.storage.reading.metadata_source import MetadataSource

__all__ = ["Chunk", "Contents", "Item", "StoredFile", "fits", "natural", "read_contents"]

_NUMBER: Final = re.compile(r"([0-9]{1,18})")


def fits(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the patterns fits the name, with upper and lower case told apart."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, so that ``layers.2`` comes before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in _NUMBER.split(name)]


class Chunk(NamedTuple):
    """A part of a tensor, or a whole object.

    Attributes:
        offsets: where the chunk begins in its tensor; empty for an object.
        sizes: its shape; empty for an object.
        file: the data file that holds it, relative to the checkpoint; ``None`` if no file is named.
        start: its first byte in the file.
        stored_nbytes: how many bytes it takes in the file.
        transforms: what was done to its bytes, such as compression, in the order of the writer.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None = None
    start: int = 0
    stored_nbytes: int = 0
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A tensor or an object of the state dict.

    Attributes:
        name: its FQN.
        path: its keys in the nested state dict, where the checkpoint says them.
        dtype: for example ``"bfloat16"``; ``None`` for an object.
        itemsize: bytes of an element of the tensor.
        shape: of the whole tensor; empty for an object.
        chunks: in the order of the ``.metadata``.
    """

    name: str
    path: tuple[str | int, ...] | None
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
    """A file of a checkpoint.

    Attributes:
        name: its path relative to the checkpoint.
        nbytes: its size; ``None`` if there is no such file.
        needed_nbytes: how long it must be to hold what ``.metadata`` says it holds.
        n_chunks: how many chunks and objects it holds.
    """

    name: str
    nbytes: int | None
    needed_nbytes: int
    n_chunks: int

    @property
    def problem(self) -> str | None:
        """What is wrong with it, as far as its size says."""
        if self.nbytes is None:
            return "is missing"
        if self.nbytes < self.needed_nbytes:
            return f"has {self.nbytes} bytes and needs {self.needed_nbytes}"
        return None


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        path: the checkpoint's directory, or its URL.
        written_by: ``robust_dcp``, ``torch``, or ``safetensors`` where there is no ``.metadata``.
        saved_seconds: when it was committed, in seconds since 1970.
        save_id: the id of the save; ``None`` if it has none.
        items: sorted by name, with numbers in names by their value.
        held: the items of each file with their chunks. What several ranks have written for themselves is in several.
        files: the files of ``held``, sorted by name.
    """

    path: str
    written_by: str
    saved_seconds: float
    save_id: str | None
    items: tuple[Item, ...]
    held: dict[str, list[tuple[Item, Chunk]]]
    files: tuple[StoredFile, ...]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    @cached_property
    def by_name(self) -> dict[str, Item]:
        """The items by their names."""
        return {item.name: item for item in self.items}

    @property
    def layout(self) -> str:
        """``torch`` or ``safetensors``."""
        return "safetensors" if any(file.name.endswith(SAFETENSORS_SUFFIX) for file in self.files) else "torch"

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)

    @property
    def file_nbytes(self) -> int:
        """Bytes of all data files that are there."""
        return sum(file.nbytes or 0 for file in self.files)


def read_contents(disk: Disk, path: str) -> Contents:
    """What the checkpoint in ``path`` holds.

    Raises:
        StorageError: there is no checkpoint, or it cannot be read.
        CorruptCheckpoint: its ``.metadata`` is not what a writer made, or makes no sense.
        UnsafeCheckpoint: it names files outside of the checkpoint, or classes that do not belong into it.
    """
    source = MetadataSource(disk, path, load_id="")
    has_metadata = disk.exists(source.path_of_metadata())
    names = [] if has_metadata or not disk.exists(path) else disk.list_directory(path)
    numbers = [name.removeprefix("__").removesuffix(METADATA_NAME) for name in names]
    ranks = sorted(int(each) for each in numbers if each.isdecimal() and metadata_name(int(each)) in names)
    sources: list[int | None] = [*ranks] or [None]
    whole = [source.decode_metadata(source.metadata_bytes(rank), rank) for rank in sources]
    items: dict[str, Item] = {}
    held: dict[str, list[tuple[Item, Chunk]]] = defaultdict(list)
    for metadata in whole:
        for item in _items(metadata):
            known = items.setdefault(item.name, item)
            if known is not item:
                there = {chunk.offsets for chunk in known.chunks}
                more = tuple(chunk for chunk in item.chunks if chunk.offsets not in there)
                items[item.name] = replace(known, chunks=known.chunks + more)
            for chunk in item.chunks:
                if chunk.file is not None:
                    held[chunk.file].append((item, chunk))
    files = tuple(_stored_file(disk, path, name, held[name]) for name in sorted(held))
    dated = [source.path_of_metadata(rank) for rank in sources]
    if not has_metadata and not ranks:
        dated = [os.path.join(path, file.name) for file in files]
    save_id = getattr(whole[0].storage_meta, "save_id", None)
    written_by = "robust_dcp" if has_metadata and source.files_are_marked() else "torch"
    return Contents(
        path=path,
        written_by=written_by if has_metadata or ranks else "safetensors",
        saved_seconds=max((disk.modified_seconds(each) for each in dated), default=0.0),
        save_id=save_id if isinstance(save_id, str) else None,
        items=tuple(sorted(items.values(), key=lambda item: natural(item.name))),
        held=dict(held),
        files=files,
    )


def _items(metadata: Metadata) -> Iterator[Item]:
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
            tuple(each[:60] for each in getattr(info, "transform_descriptors", None) or ()),
        )
        for index, info in (metadata.storage_data or {}).items()
    }
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    nowhere: tuple[Any, ...] = ()
    for name, entry in metadata.state_dict_metadata.items():
        keys = paths.get(name)
        is_path = isinstance(keys, tuple) and keys and all(isinstance(key, (str, int)) for key in keys)
        path = keys if is_path else None
        whole = places.get((name, None), nowhere)
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            chunks = tuple(
                Chunk(tuple(c.offsets), tuple(c.sizes), *places.get((name, tuple(c.offsets)), whole))
                for c in entry.chunks
            )
            text = str(dtype).removeprefix("torch.")
            yield Item(name, path, text, dtype.itemsize, tuple(entry.size), chunks)
        else:
            yield Item(name, path, None, 1, (), (Chunk((), (), *whole),))


def _stored_file(disk: Disk, path: str, name: str, held: list[tuple[Item, Chunk]]) -> StoredFile:
    """A file with the size that it has.

    Raises:
        StorageError: it cannot be looked at.
    """
    file = os.path.join(path, name)
    needed = max(chunk.start + chunk.stored_nbytes for _, chunk in held)
    return StoredFile(name, disk.fingerprint(file)[1] if disk.exists(file) else None, needed, len(held))
