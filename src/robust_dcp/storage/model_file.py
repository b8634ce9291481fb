"""Fills one file of a Hugging Face model from a checkpoint, a few pieces at a time.

Memory stays bounded whatever the sizes of tensors. ``consolidate`` and ``conversion`` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts.footer import FileSums, SumColumns
from robust_dcp.storage.layouts.protocol import ItemColumns, PlacedTensor
from robust_dcp.storage.layouts.safetensors_head import ShardHead, entry_nbytes, head_nbytes_for
from robust_dcp.storage.pieces import NamedTensor, Piece, batches_of, read_ahead
from robust_dcp.storage.records.block_sums import merged, sums_of
from robust_dcp.storage.records.torch_zip import payload_view

__all__ = ["write_model_file"]


def write_model_file(
    disk: Disk,
    file: OpenFile,
    tensors: Sequence[NamedTensor],
    read: Callable[[Sequence[Piece]], list[torch.Tensor]],
    *,
    buffer_nbytes: int,
) -> None:
    """Fill a new file with whole tensors of a checkpoint, and write its head with their checksums.

    Args:
        tensors: the tensors. safetensors must know their dtypes.
        read: gives the data of pieces, contiguous.
        buffer_nbytes: most bytes of data to read before they are written. As many are read meanwhile.

    Raises:
        StorageError: a call to the file system failed. What ``read`` raises is passed on.
    """
    # Tensors with the largest elements come first, because readers want data at multiples of an element's size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    head_nbytes = _head_nbytes(tensors)
    sums: list[list[tuple[int, int, list[int]]]] = [[] for _ in tensors]
    end = head_nbytes
    for batch, values in read_ahead(batches_of(tensors, buffer_nbytes), read):
        views = [payload_view(value) for value in values]
        for piece, view in zip(batch, views, strict=True):
            before = sums[piece.number]
            begin = before[-1][1] if before else 0
            before.append((begin, begin + piece.nbytes, sums_of(view, begin)))
        disk.pwrite(file, views, end)
        end += sum(view.nbytes for view in views)
    disk.pwrite(file, _head(tensors, head_nbytes).encode("", _columns(tensors, sums, head_nbytes)), 0)


def _columns(
    tensors: Sequence[NamedTensor], sums: Sequence[list[tuple[int, int, list[int]]]], head_nbytes: int
) -> SumColumns:
    columns = FileSums()
    nbytes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    blocks = [each for pieces in sums for each in merged(pieces)]
    columns.add(head_nbytes + np.cumsum(nbytes) - nbytes, nbytes, np.array(blocks, dtype=np.uint32))
    return columns.columns()


def _head_nbytes(tensors: Sequence[NamedTensor]) -> int:
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


def _head(tensors: Sequence[NamedTensor], nbytes: int) -> ShardHead:
    placed, end = [], nbytes
    for number, tensor in enumerate(tensors):
        whole = (0,) * len(tensor.shape)
        placed.append(PlacedTensor(number, tensor.name, tensor.dtype, tensor.shape, whole, end))
        end += tensor.nbytes
    return ShardHead(placed, nbytes, is_of_checkpoint=False)
