"""Writes the safetensors files of a Hugging Face model, and their index."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from robust_dcp.conversion.plan import ConversionPlan
from robust_dcp.storage.consolidation import INDEX_NAME, in_shards, index_of
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.model_file import write_model_file
from robust_dcp.storage.pieces import Piece

__all__ = ["write_safetensors"]


def write_safetensors(
    plan: ConversionPlan,
    directory: str,
    disk: Disk,
    *,
    max_shard_nbytes: int,
    buffer_nbytes: int,
    progress: Callable[[int], object],
) -> int:
    """Write the files that are not in ``directory`` yet, and the index. Each gets its name when it is durable.

    Returns:
        How many files were there already.

    Raises:
        StorageError, CorruptCheckpoint: something cannot be read or written.
    """
    shards = in_shards(plan.tensors, max_shard_nbytes)
    done = n_there = 0

    def read(pieces: Sequence[Piece]) -> list[torch.Tensor]:
        nonlocal done
        progress(done)  # what was read before is written by now, or just being written
        done += sum(piece.nbytes for piece in pieces)
        return plan.read(pieces)

    for name, shard in shards.items():
        path = os.path.join(directory, name)
        if disk.exists(path):
            n_there += 1
            done += sum(tensor.nbytes for tensor in shard)
            continue
        _write(disk, path, partial(write_model_file, disk, tensors=shard, read=read, buffer_nbytes=buffer_nbytes))
        progress(done)
    index = index_of(shards)
    _write(disk, os.path.join(directory, INDEX_NAME), lambda file: disk.pwrite(file, index, 0))
    return n_there


def _write(disk: Disk, path: str, write: Callable[..., object]) -> None:
    """Write a file under another name, make it durable, and give it its own."""
    temporary = f"{path}.part"
    if disk.exists(temporary):
        disk.unlink(temporary)
    file = disk.open_new(temporary)
    try:
        write(file)
        disk.fsync(file)
    finally:
        disk.close(file)
    disk.rename(temporary, path)
