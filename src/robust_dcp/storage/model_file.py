"""Fills one file of a Hugging Face model from a checkpoint, a few pieces at a time.

This module cuts tensors into pieces to read and write, so that memory stays bounded whatever their sizes. It reads
through ``RobustReader``. ``consolidate`` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts.footer import FileSums, SumColumns
from robust_dcp.storage.layouts.protocol import ItemColumns, PlacedTensor
from robust_dcp.storage.layouts.safetensors_head import ShardHead, entry_nbytes, head_nbytes_for
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.block_sums import merged, sums_of

__all__ = ["ModelTensor", "boxes_of", "write_model_file"]


class ModelTensor(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


def write_model_file(
    disk: Disk,
    file: OpenFile,
    tensors: Sequence[ModelTensor],
    reader: RobustReader,
    metadata: Metadata,
    *,
    buffer_nbytes: int,
) -> None:
    """Fill a new file with whole tensors of a checkpoint, and write its head with their checksums.

    Args:
        tensors: the tensors. safetensors must know their dtypes.
        reader: a reader of the checkpoint, set up with ``metadata``.
        buffer_nbytes: most bytes of data to read before they are written.

    Raises:
        CorruptCheckpoint, StorageError: as the reader's ``read_data``; or a call to the file system failed.
    """
    # Tensors with the largest elements come first, because readers want data at multiples of an element's size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    head_nbytes = _head_nbytes(tensors)
    sums: list[list[tuple[int, int, list[int]]]] = [[] for _ in tensors]
    end = head_nbytes
    for batch in _batches(tensors, buffer_nbytes):
        view = memoryview(bytearray(sum(piece.nbytes for piece in batch)))
        _read(batch, view, reader, metadata)
        at = 0
        for piece in batch:
            before = sums[piece.number]
            begin = before[-1][1] if before else 0
            before.append((begin, begin + piece.nbytes, sums_of(view[at : at + piece.nbytes], begin)))
            at += piece.nbytes
        disk.pwrite(file, view, end)
        end += view.nbytes
    disk.pwrite(file, _head(tensors, head_nbytes).encode("", _columns(tensors, sums, head_nbytes)), 0)


def _columns(
    tensors: Sequence[ModelTensor], sums: Sequence[list[tuple[int, int, list[int]]]], head_nbytes: int
) -> SumColumns:
    columns = FileSums()
    nbytes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    blocks = [each for pieces in sums for each in merged(pieces)]
    columns.add(head_nbytes + np.cumsum(nbytes) - nbytes, nbytes, np.array(blocks, dtype=np.uint32))
    return columns.columns()


def _head_nbytes(tensors: Sequence[ModelTensor]) -> int:
    numbers = np.arange(len(tensors), dtype=np.int32)
    width = max((len(tensor.shape) for tensor in tensors), default=0)
    columns = ItemColumns(
        names=[tensor.name for tensor in tensors],
        name_ids=numbers,
        kinds=[(str(tensor.dtype).removeprefix("torch."), tensor.shape) for tensor in tensors],
        kind_ids=numbers,
        ndims=np.array([len(tensor.shape) for tensor in tensors], dtype=np.uint8),
        offsets=np.zeros((len(tensors), width), dtype=np.int64),
    )
    entries = int(entry_nbytes(columns).sum()) if tensors else 0
    return head_nbytes_for(entries, len(tensors), sum(tensor.nbytes for tensor in tensors))


def _head(tensors: Sequence[ModelTensor], nbytes: int) -> ShardHead:
    placed, end = [], nbytes
    for number, tensor in enumerate(tensors):
        whole = (0,) * len(tensor.shape)
        placed.append(PlacedTensor(number, tensor.name, tensor.dtype, tensor.shape, whole, end))
        end += tensor.nbytes
    return ShardHead(placed, nbytes, is_of_checkpoint=False)


class _Piece(NamedTuple):
    """A box of a tensor with elements that follow each other in the tensor's data.

    Attributes:
        number: the number of the tensor in its file.
    """

    number: int
    tensor: ModelTensor
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.lengths) * self.tensor.dtype.itemsize


def _batches(tensors: Sequence[ModelTensor], nbytes: int) -> Iterator[list[_Piece]]:
    """Pieces that follow each other in the file, as many at a time as fit into ``nbytes``."""
    batch: list[_Piece] = []
    filled = 0
    for number, tensor in enumerate(tensors):
        for offsets, lengths in boxes_of(tensor.shape, max(nbytes // tensor.dtype.itemsize, 1)):
            piece = _Piece(number, tensor, offsets, lengths)
            if batch and filled + piece.nbytes > nbytes:
                yield batch
                batch, filled = [], 0
            batch.append(piece)
            filled += piece.nbytes
    if batch:
        yield batch


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


class _IntoPieces(DefaultLoadPlanner):
    """Makes the reader read into the memory of pieces. The ``index`` of an item's destination is the number of the
    piece.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.index or 0]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target


def _read(batch: Sequence[_Piece], view: memoryview, reader: RobustReader, metadata: Metadata) -> None:
    """Read pieces into ``view``, one after the other."""
    items: list[ReadItem] = []
    targets: list[torch.Tensor] = []
    at = 0
    for piece in batch:
        entry = metadata.state_dict_metadata[piece.tensor.name]
        if not piece.nbytes or not isinstance(entry, TensorStorageMetadata):
            continue
        flat = torch.frombuffer(view[at : at + piece.nbytes], dtype=torch.uint8)
        at += piece.nbytes
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.lengths))
        items += [
            replace(item, dest_index=MetadataIndex(piece.tensor.name, chunk.offsets, len(targets)))
            for item in create_read_items_for_chunk_list(piece.tensor.name, entry, [chunk])
        ]
        targets.append(flat.view(piece.tensor.dtype).view(piece.lengths))
    reader.read_data(LoadPlan(items), _IntoPieces(targets)).wait()
