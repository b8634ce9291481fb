"""The items of a checkpoint as plain values: names, dtypes, shapes, chunks, and where their bytes lie."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

__all__ = ["Chunk", "Contents", "Item", "StoredFile", "fits", "itemsize", "natural"]

_BITS: Final = re.compile(r"(\d+)(?:x(\d+))?")
_NUMBER: Final = re.compile(r"([0-9]{1,18})")
_SIZES: Final = {"bool": 1, "half": 2, "double": 8, "float": 4, "long": 8, "int": 4, "short": 2}


def itemsize(dtype: str) -> int | None:
    """Bytes of one element, by the name of its dtype: ``float8_e4m3fn`` has 1; ``None`` for names that say no size."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    bits = _BITS.search(dtype)
    if bits is None:
        return None
    per_element = int(bits[1]) * (int(bits[2] or 1) if dtype.startswith(("bits", "quint")) else 1)
    return max(1, per_element // 8)


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
        start: its first byte in the file; ``None`` if only the file's own header says it.
        stored_nbytes: how many bytes it takes in the file; ``None`` likewise.
        transforms: what was done to its bytes, such as compression, in the order of the writer.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    start: int | None
    stored_nbytes: int | None
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A tensor or an object of the state dict.

    Attributes:
        name: its FQN.
        path: its keys in the nested state dict, where the checkpoint says them.
        dtype: for example ``"bfloat16"``; ``None`` for an object.
        shape: of the whole tensor; empty for an object.
        chunks: in the order of the ``.metadata``.
    """

    name: str
    path: tuple[str | int, ...] | None
    dtype: str | None
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
        size = itemsize(self.dtype) if self.dtype is not None else None
        if size is None:
            return sum(chunk.stored_nbytes or 0 for chunk in self.chunks)
        return math.prod(self.shape) * size


@dataclass(frozen=True)
class StoredFile:
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
        path: the checkpoint's directory.
        layout: ``torch`` or ``safetensors``.
        written_by: ``robust_dcp``, ``torch``, or ``safetensors`` where there is no ``.metadata``.
        saved_seconds: when it was committed, in seconds since 1970.
        save_id: the id of the save; ``None`` if it has none.
        items: sorted by name, with numbers in names by their value.
        files: the data files that hold the items, sorted by name.
        unknown_classes: classes that the ``.metadata`` names and that do not belong into one. A load refuses them
            unless the user registers them.
    """

    path: str
    layout: str
    written_by: str
    saved_seconds: float
    save_id: str | None
    items: tuple[Item, ...]
    files: tuple[StoredFile, ...] = field(default=())
    unknown_classes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    @cached_property
    def by_name(self) -> dict[str, Item]:
        """The items by their names."""
        return {item.name: item for item in self.items}

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)

    @property
    def file_nbytes(self) -> int:
        """Bytes of all data files that are there."""
        return sum(file.nbytes or 0 for file in self.files)
