"""Reads a checkpoint in pieces, so that memory stays bounded whatever the sizes of its tensors.

This module cuts tensors into boxes and reads them through ``RobustReader``, which compares them with their checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from robust_dcp.storage.index.stored_index import index_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.threads import submit

T = TypeVar("T")


class NamedTensor(NamedTuple):
    """A tensor of a checkpoint, or one to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """A box of a tensor with elements that follow each other in the tensor's data.

    Attributes:
        number: the number of the tensor among those that were cut.
    """

    number: int
    tensor: NamedTensor
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.lengths) * self.tensor.dtype.itemsize


def in_batches(values: Iterable[T], most_nbytes: int, nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The values in order, as many at a time as fit into ``most_nbytes``, and at least one."""
    batch: list[T] = []
    filled = 0
    for each in values:
        nbytes = nbytes_of(each)
        if batch and filled + nbytes > most_nbytes:
            yield batch
            batch, filled = [], 0
        batch.append(each)
        filled += nbytes
    if batch:
        yield batch


def batches_of(tensors: Iterable[NamedTensor], nbytes: int) -> Iterator[list[Piece]]:
    """All pieces of some tensors, in order, as many at a time as fit into ``nbytes``."""
    pieces = (
        Piece(number, tensor, *box)
        for number, tensor in enumerate(tensors)
        for box in boxes_of(tensor.shape, max(nbytes // tensor.dtype.itemsize, 1))
    )
    return in_batches(pieces, nbytes, lambda piece: piece.nbytes)


def read_ahead(
    batches: Iterable[list[Piece]], read: Callable[[Sequence[Piece]], list[torch.Tensor]]
) -> Iterator[tuple[list[Piece], list[torch.Tensor]]]:
    """Each batch with its data. While the caller uses that, a thread reads the next batch.

    Args:
        read: gives the data of pieces. What it raises is passed on.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="robust_dcp-ahead") as thread:
        reads: Iterator[Any] = ((batch, submit(thread, read, batch)) for batch in batches)
        for (batch, values), _ in pairwise(chain(reads, [None])):
            yield batch, values.result()


def boxes_of(shape: tuple[int, ...], max_numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, lengths) of boxes of at most ``max_numel`` elements.

    One after the other, they hold all elements of the tensor in their order.
    """
    if prod(shape) <= max_numel:
        yield (0,) * len(shape), shape
        return
    row = prod(shape[1:])
    if row > max_numel:
        for place in range(shape[0]):
            for offsets, lengths in boxes_of(shape[1:], max_numel):
                yield (place, *offsets), (1, *lengths)
        return
    step = max_numel // row
    zeros = (0,) * (len(shape) - 1)
    for begin in range(0, shape[0], step):
        yield (begin, *zeros), (min(step, shape[0] - begin), *shape[1:])


def is_plain(tensor: Any) -> bool:
    """Whether a tensor, or one with these properties, can be cut into pieces. Sparse and quantized tensors are read as
    objects are."""
    return tensor.layout is torch.strided and not str(tensor.dtype).startswith(("torch.qint", "torch.quint"))


class PieceReader:
    """Reads pieces of tensors, and objects as bytes. Nothing runs the objects.

    Args:
        path: the checkpoint's directory.
        buffer_nbytes: most bytes that were read and not yet handed over.

    Attributes:
        metadata: DCP's ``Metadata`` of the checkpoint.

    Raises:
        StorageError, CorruptCheckpoint: there is no checkpoint, or it cannot be read. All methods raise them, too.
    """

    def __init__(self, path: str | os.PathLike[str], *, buffer_nbytes: int) -> None:
        self._buffer_nbytes = buffer_nbytes
        self._reader = RobustReader(path, buffer_bytes=buffer_nbytes)
        self.metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, True)

    @cached_property
    def tensors(self) -> dict[str, NamedTensor]:
        """The tensors of the checkpoint that :func:`is_plain`, by name, in the order of the metadata."""
        index = index_of(self.metadata)
        if index is not None:
            index.find_all(self.metadata.state_dict_metadata)  # at once: to find one after the other takes log n each
        return {
            name: NamedTensor(name, entry.properties.dtype, tuple(entry.size))
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and is_plain(entry.properties)
        }

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """New tensors with the data of these pieces."""
        targets = [torch.empty(piece.lengths, dtype=piece.tensor.dtype) for piece in pieces]
        items: list[ReadItem] = []
        for number, piece in enumerate(pieces):
            entry = self.metadata.state_dict_metadata[piece.tensor.name]
            if not piece.nbytes or not isinstance(entry, TensorStorageMetadata):
                continue
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.lengths))
            items += [
                replace(item, dest_index=MetadataIndex(piece.tensor.name, chunk.offsets, number))
                for item in create_read_items_for_chunk_list(piece.tensor.name, entry, [chunk])
            ]
        self._reader.read_data(LoadPlan(items), _Into(targets)).wait()
        return targets

    def objects(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """The names of objects, or of tensors that are one record, with their bytes as ``torch.save`` wrote them."""
        stored, untrusted, nothing = self.metadata.storage_data or {}, self._reader.options, torch.Size((0,))
        at: list[MetadataIndex] = []
        for name in names:
            shape = getattr(self.metadata.state_dict_metadata[name], "size", None)
            at.append(MetadataIndex(name, None if shape is None else torch.Size([0] * len(shape))))
        for batch in in_batches(at, self._buffer_nbytes, lambda each: stored[each].length if each in stored else 0):
            items = [ReadItem(LoadItemType.BYTE_IO, each, nothing, each, nothing, nothing) for each in batch]
            planner = _Into(())
            # Only the bytes are handed over. Whoever loads them decides how.
            self._reader.options = replace(untrusted, trusted=True)
            try:
                self._reader.read_data(LoadPlan(items), planner).wait()
            finally:
                self._reader.options = untrusted
            yield from ((each.fqn, planner.objects[each.fqn]) for each in batch)


class _Into(DefaultLoadPlanner):
    """Takes what was read. The ``index`` of a tensor's destination is the number of the target."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.objects: dict[str, bytes] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.index or 0]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.objects[read_item.storage_index.fqn] = value.read()
