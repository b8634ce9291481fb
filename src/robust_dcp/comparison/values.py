"""Compares the values of two checkpoints, a few pieces of tensors at a time, so that memory stays bounded.

Both checkpoints may be cut into chunks in any way. Objects are compared as bytes first, and then as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from robust_dcp.comparison.tensor_difference import TensorDifference, difference_of
from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.model_file import boxes_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.objects import load_object

__all__ = ["DifferingObject", "compare_objects", "compare_tensors"]


class _Piece(NamedTuple):
    """A box of a tensor."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.lengths).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class DifferingObject:
    """An object that is not the same in both checkpoints. ``first`` and ``second`` describe it in a few words."""

    name: str
    first: str
    second: str


class _Side:
    """One of the two checkpoints."""

    def __init__(self, path: str, buffer_nbytes: int) -> None:
        # Nothing runs the objects: they are captured as bytes, and loaded as data below.
        self.reader = RobustReader(path, buffer_bytes=buffer_nbytes, trusted=True)
        self.metadata: Metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
        self.path = path

    def read(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        targets = [torch.empty(piece.lengths, dtype=piece.dtype) for piece in pieces]
        items: list[ReadItem] = []
        for number, piece in enumerate(pieces):
            entry = self.metadata.state_dict_metadata[piece.name]
            if not piece.nbytes or not isinstance(entry, TensorStorageMetadata):
                continue
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.lengths))
            items += [
                replace(item, dest_index=MetadataIndex(piece.name, chunk.offsets, number))
                for item in create_read_items_for_chunk_list(piece.name, entry, [chunk])
            ]
        self.reader.read_data(LoadPlan(items), _Into(targets)).wait()
        return targets

    def object_bytes(self, name: str) -> bytes:
        index = MetadataIndex(name)
        nothing = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        planner = _Into(())
        self.reader.read_data(LoadPlan([item]), planner).wait()
        return planner.found[name]


class _Into(DefaultLoadPlanner):
    """Takes what was read. The ``index`` of a tensor's destination is the number of the target."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.found: dict[str, bytes] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.index or 0]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.found[read_item.storage_index.fqn] = value.read()


def compare_tensors(
    first: str,
    second: str,
    names: Sequence[str],
    *,
    buffer_nbytes: int,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Iterator[tuple[str, TensorDifference]]:
    """Compare tensors that have one dtype and shape in both checkpoints.

    Args:
        first, second: the checkpoints' directories.
        names: the tensors. They are compared in the order of the first checkpoint's ``.metadata``.
        buffer_nbytes: about how much memory the pieces of both may take.
        progress: called with the number of bytes of the first checkpoint that were compared so far.

    Yields:
        The name and the difference of each tensor.

    Raises:
        CorruptCheckpoint, StorageError: something cannot be read.
    """
    sides = _Side(first, buffer_nbytes // 4), _Side(second, buffer_nbytes // 4)
    wanted = set(names)
    entries = [
        (name, entry)
        for name, entry in sides[0].metadata.state_dict_metadata.items()
        if name in wanted and isinstance(entry, TensorStorageMetadata)
    ]
    done_nbytes = 0
    totals = {name: TensorDifference() for name, _ in entries}
    for batch, is_last in _batches(entries, buffer_nbytes // 8):
        found = zip(batch, *(side.read(batch) for side in sides), strict=True)
        for piece, one, other in found:
            totals[piece.name] += difference_of(one, other)
        done_nbytes += sum(piece.nbytes for piece in batch)
        progress(done_nbytes)
        for name in is_last:
            yield name, totals.pop(name)


def _batches(
    entries: Sequence[tuple[str, TensorStorageMetadata]], nbytes: int
) -> Iterator[tuple[list[_Piece], list[str]]]:
    """Pieces of at most ``nbytes`` together, and the names of tensors whose last piece is among them."""
    batch: list[_Piece] = []
    ended: list[str] = []
    filled = 0
    for name, entry in entries:
        dtype = entry.properties.dtype
        for offsets, lengths in boxes_of(tuple(entry.size), max(nbytes // dtype.itemsize, 1)):
            piece = _Piece(name, dtype, offsets, lengths)
            if batch and filled + piece.nbytes > nbytes:
                yield batch, ended
                batch, ended, filled = [], [], 0
            batch.append(piece)
            filled += piece.nbytes
        ended.append(name)
    if batch:
        yield batch, ended


def compare_objects(first: str, second: str, names: Sequence[str]) -> Iterator[DifferingObject]:
    """Compare objects that both checkpoints have, and yield those that differ.

    An object that needs a class of the user is compared by its bytes alone, because it is never executed.

    Raises:
        CorruptCheckpoint, StorageError: something cannot be read.
    """
    sides = _Side(first, 64 << 20), _Side(second, 64 << 20)
    for name in names:
        one, other = (side.object_bytes(name) for side in sides)
        if one == other:
            continue
        try:
            values = [
                load_object(data, file=side.path, item=name) for data, side in zip((one, other), sides, strict=True)
            ]
        except UnsafeCheckpoint:
            yield DifferingObject(name, f"{len(one)} bytes", f"{len(other)} other bytes")
            continue
        if not _are_equal(values[0], values[1]):
            yield DifferingObject(name, _brief(values[0]), _brief(values[1]))


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values that consist of data are the same. NaN is equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and not difference_of(one, other).differing
    if isinstance(one, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    return repr(one) == repr(other)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
