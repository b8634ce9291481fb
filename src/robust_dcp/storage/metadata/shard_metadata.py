"""Makes DCP's ``Metadata`` for a directory of safetensors files without ``.metadata``, from the heads of the files.

So checkpoints by torch's ``HuggingFaceStorageWriter`` and plain Hugging Face models are read like any other. This
module also checks that chunks make up whole tensors. ``reader`` calls it.
"""

from __future__ import annotations

import os
from math import prod

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, locate
from robust_dcp.storage.layouts.read_head import StoredTensor, read_head, unusable_file
from robust_dcp.storage.metadata.metadata_file import StorageInfo

__all__ = ["metadata_of_shards", "shards_in"]


def shards_in(disk: Disk, directory: str) -> list[str]:
    """The sorted names of the safetensors files in a directory; none if the directory does not exist."""
    if not disk.exists(directory):
        return []
    return [name for name in disk.list_directory(directory) if name.endswith(SAFETENSORS_SUFFIX)]


def metadata_of_shards(disk: Disk, directory: str, files: list[str]) -> Metadata:
    """The metadata of the tensors in ``files``.

    Args:
        files: names in ``directory``.

    Raises:
        CorruptCheckpoint: a head is damaged; the files belong to a save that was not committed; two files hold the same
            chunk; or the chunks do not make up a whole tensor.
        StorageError: a file cannot be read.
        UnsafeCheckpoint: a file is a symbolic link that leads out of the directory.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for file in files:
        head = read_head(disk, locate(disk, directory, file, file=directory))
        if head.is_of_checkpoint:
            expected = f"{METADATA_NAME} beside {file}"
            raise unusable_file(directory, expected, "none: the save was not committed, or it is lost")
        for name, stored in head.tensors.items():
            index = _add(tensors, name, stored, os.path.join(directory, file))
            if index in places:
                raise unusable_file(
                    directory, "each chunk once", f"it in {places[index].relative_path} and {file}", name
                )
            places[index] = StorageInfo(file, stored.offset, stored.nbytes)
    for name, tensor in tensors.items():
        found = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if found != prod(tensor.size):
            raise unusable_file(directory, f"{prod(tensor.size)} elements in the chunks", f"{found}", name)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _add(tensors: dict[str, TensorStorageMetadata], name: str, stored: StoredTensor, file: str) -> MetadataIndex:
    offset, shape = torch.Size(stored.chunk_offset), torch.Size(stored.shape)
    end = torch.Size([o + s for o, s in zip(offset, shape, strict=True)])
    tensor = tensors.get(name)
    if tensor is None:
        tensor = tensors[name] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), end, [])
    if tensor.properties.dtype != stored.dtype or len(tensor.size) != len(end):
        expected = f"chunks of {tensor.properties.dtype} with {len(tensor.size)} dimensions"
        raise unusable_file(file, expected, f"one of {stored.dtype} with {len(end)}", name)
    tensor.size = torch.Size(map(max, tensor.size, end))
    tensor.chunks.append(ChunkStorageMetadata(offset, shape))
    return MetadataIndex(name, offset, len(tensor.chunks) - 1)
