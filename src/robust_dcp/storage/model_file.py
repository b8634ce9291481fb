"""The files of a Hugging Face model: which tensor goes into which, their index, and how one is filled.

It is filled a few pieces at a time, so memory stays bounded whatever the sizes of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from robust_dcp.items import Form, ItemKind, ItemStructure, items_of
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import SAFETENSORS_SUFFIX
from robust_dcp.storage.layouts.footer import sorted_sums
from robust_dcp.storage.layouts.places import kinds_of
from robust_dcp.storage.layouts.safetensors import (
    METADATA_KEY,
    MODEL_DTYPES,
    ShardHead,
    StoredTensor,
    entry_nbytes,
    head_nbytes_for,
)
from robust_dcp.storage.pieces import NamedTensor, Piece, batches_of, in_batches, read_ahead
from robust_dcp.storage.records.checksum import merged, sums_of
from robust_dcp.storage.records.record import bytes_of


def check_dtypes(tensors: Sequence[NamedTensor], what_to_do: str) -> None:
    """Find a tensor that safetensors cannot hold.

    Raises:
        ValueError: there is one. The message ends with ``what_to_do``.
    """
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") not in MODEL_DTYPES:
            raise ValueError(f"safetensors has no type for {tensor.name!r}, a tensor of {tensor.dtype}; {what_to_do}")
        if tensor.name == METADATA_KEY:
            raise ValueError(f"safetensors keeps the name {tensor.name!r} for itself; {what_to_do}")


def in_shards(
    tensors: Sequence[NamedTensor], max_nbytes: int, files: Mapping[str, str]
) -> dict[str, list[NamedTensor]]:
    """Divide the tensors among files: as ``files`` says, if it names all of them, or else in order, by the names that
    Hugging Face gives these.

    Each file has at least one tensor, and there is at least one file.
    """
    if tensors and all(tensor.name in files for tensor in tensors):
        by_file: dict[str, list[NamedTensor]] = {name: [] for name in sorted({files[each.name] for each in tensors})}
        for tensor in tensors:
            by_file[files[tensor.name]].append(tensor)
        return by_file
    shards = [*in_batches(tensors, max_nbytes, lambda tensor: tensor.nbytes)] or [[]]
    return {
        f"model-{number:05d}-of-{len(shards):05d}{SAFETENSORS_SUFFIX}": shard for number, shard in enumerate(shards, 1)
    }


def index_of(shards: Mapping[str, Sequence[NamedTensor]]) -> bytes:
    """The bytes of ``model.safetensors.index.json``."""
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


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
        views = [bytes_of(value) for value in values]
        for piece, view in zip(batch, views, strict=True):
            before = sums[piece.number]
            begin = before[-1][1] if before else 0
            before.append((begin, begin + piece.nbytes, sums_of(view, begin)))
        disk.pwrite(file, views, end)
        end += sum(view.nbytes for view in views)
    nbytes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    blocks = np.array([each for pieces in sums for each in merged(pieces)], dtype=np.uint32)
    columns = sorted_sums([(head_nbytes + np.cumsum(nbytes) - nbytes, nbytes, blocks)])
    disk.pwrite(file, _head(tensors, head_nbytes).encode("", columns), 0)


def _head_nbytes(tensors: Sequence[NamedTensor]) -> int:
    structures = [
        ItemStructure(
            kind=ItemKind.TENSOR,
            form=Form.FIXED,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            offsets=(0,) * len(tensor.shape),
            sizes=tensor.shape,
        )
        for tensor in tensors
    ]
    items = items_of([tensor.name for tensor in tensors], structures)
    rows = np.arange(len(tensors))
    entries = int(entry_nbytes(items, rows, *kinds_of(items, rows)).sum())
    return head_nbytes_for(entries, len(tensors), int(items.nbytes.sum()))


def _head(tensors: Sequence[NamedTensor], nbytes: int) -> ShardHead:
    placed, end = {}, nbytes
    for tensor in tensors:
        placed[tensor.name] = StoredTensor(tensor.dtype, tensor.shape, end, tensor.nbytes, (0,) * len(tensor.shape))
        end += tensor.nbytes
    return ShardHead(placed, nbytes, is_of_checkpoint=False)
