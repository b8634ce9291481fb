"""Makes checkpoints of virtual ranks to load from. They have ``.metadata`` and the index, but no data.

Owns the contents of such a checkpoint: tensors that FSDP2 has cut along their first dimension over all ranks, and an
object of each rank. Called by ``loading``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index.build import IndexTemplate
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION
from robust_dcp.storage.metadata.pickled import MetadataColumns, MetadataPickle

__all__ = ["Shape", "tensors_of", "write_checkpoint"]

Shape = tuple[int, ...]
"""The shape of the chunk that each rank holds of a tensor."""

_PARTS = (
    "attention.qkv.weight",
    "attention.proj.weight",
    "mlp.fc1.weight",
    "mlp.fc2.weight",
    "input_norm.weight",
    "mlp_norm.weight",
)


def tensors_of(count: int, shapes: Sequence[Shape]) -> dict[str, Shape]:
    """The sorted names of ``count`` tensors in the model, with the shape of each rank's chunk."""
    names = (f"layers.{layer}.{part}" for layer in range(count) for part in _PARTS)
    return dict(sorted(zip(islice(names, count), cycle(shapes), strict=False)))


def write_checkpoint(directory: str, ranks: int, tensors: dict[str, Shape]) -> None:
    """Write the checkpoint of ``ranks`` ranks into ``directory``. Each rank holds equal parts of ``tensors``."""
    columns = _columns(ranks, tensors)
    files = [f"__{rank}_{number}.distcp" for rank in range(ranks) for number in range(2)]
    places = np.column_stack([np.arange(ranks) * 4096, np.full(ranks, 900)])
    meta = StorageMeta(directory, "00000000-0000-0000-0000-000000000001")
    metadata = MetadataPickle(columns).encode(files, places, meta)
    index = IndexTemplate(columns).encode(metadata, files, places, meta, FORMAT_VERSION, {})
    for name, fragments in ((METADATA_NAME, metadata), (INDEX_NAME, index)):
        with open(os.path.join(directory, name), "wb") as file:
            file.writelines(fragments)


def _columns(ranks: int, tensors: dict[str, Shape]) -> MetadataColumns:
    shapes = sorted(dict.fromkeys(tensors.values()), key=len)
    width = max(map(len, shapes))
    # Each shape has the size of the whole tensor, the size of the chunk, and then the offsets of all ranks.
    table = np.zeros((len(shapes), 2 + ranks, width), dtype=np.int64)
    for number, shape in enumerate(shapes):
        table[number, 0, : len(shape)] = (shape[0] * ranks, *shape[1:])
        table[number, 1, : len(shape)] = shape
        table[number, 2:, 0] = np.arange(ranks) * shape[0]
    kind = np.array([shapes.index(shape) for shape in tensors.values()]) * (2 + ranks)
    count, rows = len(tensors), len(tensors) * ranks
    rank = np.tile(np.arange(ranks), count)
    which = np.repeat(np.arange(count), ranks)
    objects = sorted(f"rng_state.{each}" for each in range(ranks))
    none = np.full(ranks, -1)

    def joined(of_tensors: np.ndarray, of_objects: np.ndarray) -> np.ndarray:
        return np.concatenate([of_tensors, of_objects]).astype(np.int32)

    return MetadataColumns(
        names=[*(f"model.{name}" for name in tensors), *objects],
        paths=[*(("model", name) for name in tensors), *((name,) for name in objects)],
        properties=[(torch.float32, torch.strided, False)],
        name_properties=joined(np.zeros(count), none),
        name_size=joined(kind, none),
        sizes=table.reshape(-1, width),
        size_ndims=np.repeat([len(shape) for shape in shapes], 2 + ranks).astype(np.uint8),
        name=joined(which, count + np.arange(ranks)),
        offset=joined(kind[which] + 2 + rank, none),
        size=joined(kind[which] + 1, none),
        file=joined(2 * rank + which % 2, 2 * np.arange(ranks)),
        start=np.concatenate([np.arange(rows) * 65536, none]),
        nbytes=np.concatenate([np.full(rows, 65000), none]),
        n_files=2 * ranks,
    )
