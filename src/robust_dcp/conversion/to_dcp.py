"""Writes a DCP checkpoint from one process, without ever holding its tensors in memory.

Tensors are cut into chunks. ``RobustWriter`` asks for the data of a chunk when it writes it.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.conversion.plan import ConversionPlan
from robust_dcp.conversion.sources import OUTLINE_ATTRIBUTE
from robust_dcp.storage.committing.commit import MetadataToPublish
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts import FileName, ItemColumns
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, StorageInfo, encode_metadata
from robust_dcp.storage.pieces import Piece, batches_of
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = ["write_dcp"]

_THREADS: Final = 2
_LEAST_BUFFER_NBYTES: Final = 1 << 20


def write_dcp(
    plan: ConversionPlan,
    directory: str,
    disk: Disk,
    *,
    target: str,
    layout: str,
    files: int,
    buffer_nbytes: int,
    progress: Callable[[int], object],
) -> None:
    """Write a checkpoint into ``directory``.

    Args:
        target: the name that the directory gets when it is whole.
        layout: of its data files, as for ``RobustWriter``.
        files: how many data files to write.
        buffer_nbytes: about how much memory the data may take.

    Raises:
        ValueError: there is no such layout.
        StorageError, CorruptCheckpoint: something cannot be read or written.
    """
    writer = RobustWriter(
        directory,
        layout=layout,
        threads=_THREADS,
        files_per_rank=files,
        buffer_bytes=max(buffer_nbytes // 4, _LEAST_BUFFER_NBYTES),
        report=False,
        disk=disk,
    )
    writer.known_as = target

    def show(done_nbytes: int, total_nbytes: int) -> None:
        progress(min(done_nbytes, plan.nbytes))  # it counts the bytes of frames, too

    items = _Items(plan, max(buffer_nbytes // 2, 1))
    try:
        writer.begin(is_coordinator=True, ranks=1)
        placements = writer.layout.place(writer.layout.measure(items.columns()), files=files)
        written = writer.write(0, items, placements, show)
        metadata = _metadata_of(items, plan)
        metadata.storage_data = _places_of(items, placements, written)
        metadata.storage_meta = writer.plain_meta()
        metadata.version = FORMAT_VERSION
        names = map(FileName, written.uncommitted_names, written.names)
        renames = [name for name in names if name.written != name.committed]
        writer.publish(MetadataToPublish((encode_metadata(metadata),), set(written.names), renames), are_checked=False)
    except BaseException as error:
        writer.directory.roll_back(error)
        raise
    writer.clean_up()
    progress(plan.nbytes)


class _Items:
    """The items of the checkpoint, as :class:`~robust_dcp.storage.writing.item_source.ItemSource`: chunks of tensors,
    and then objects.
    """

    is_made_when_asked = True

    def __init__(self, plan: ConversionPlan, chunk_nbytes: int) -> None:
        self.chunks: Sequence[Piece] = [piece for batch in batches_of(plan.tensors, chunk_nbytes) for piece in batch]
        self.objects = plan.objects
        self._plan = plan
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.chunks) + len(self.objects)

    def name(self, place: int) -> str:
        n_chunks = len(self.chunks)
        return self.chunks[place].tensor.name if place < n_chunks else self.objects[place - n_chunks]

    def expected(self, place: int) -> tuple[torch.dtype, torch.Size] | None:
        if place >= len(self.chunks):
            return None
        return self.chunks[place].tensor.dtype, torch.Size(self.chunks[place].lengths)

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        return self.chunks[place].offsets if place < len(self.chunks) else ()

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        # One thread reads at a time, which keeps memory within its bound: the reader has buffers of its own.
        with self._lock:
            if place < len(self.chunks):
                (value,) = self._plan.read([self.chunks[place]])
                return value
            buffer = io.BytesIO()
            torch.save(self._plan.load(self.name(place)), buffer)
            buffer.seek(0)
            return buffer

    def columns(self) -> ItemColumns:
        """What a layout wants to know of the items."""
        names = {name: number for number, name in enumerate([*(t.name for t in self._plan.tensors), *self.objects])}
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        kind_ids = [
            kinds.setdefault((str(chunk.tensor.dtype).removeprefix("torch."), chunk.lengths), len(kinds))
            for chunk in self.chunks
        ]
        offsets = np.zeros((len(self), max((len(chunk.offsets) for chunk in self.chunks), default=0)), dtype=np.int64)
        for place, chunk in enumerate(self.chunks):
            offsets[place, : len(chunk.offsets)] = chunk.offsets
        return ItemColumns(
            names=list(names),
            name_ids=np.array([names[self.name(place)] for place in range(len(self))], dtype=np.int32),
            kinds=list(kinds),
            kind_ids=np.array([*kind_ids, *(-1 for _ in self.objects)], dtype=np.int32),
            ndims=np.array([len(self.chunk_offset(place)) for place in range(len(self))], dtype=np.uint8),
            offsets=offsets,
        )


def _metadata_of(items: _Items, plan: ConversionPlan) -> Metadata:
    entries: dict[str, Any] = {
        tensor.name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), [])
        for tensor in plan.tensors
    }
    for chunk in items.chunks:
        entries[chunk.tensor.name].chunks.append(
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.lengths))
        )
    entries.update({name: BytesStorageMetadata() for name in plan.objects})
    # Items without a path in the source stand under their names.
    metadata = Metadata(entries, planner_data=dict(plan.paths))
    if plan.source.outline is not None:
        outline = io.BytesIO()
        torch.save(plan.outline(), outline)
        setattr(metadata, OUTLINE_ATTRIBUTE, outline.getvalue())
    return metadata


def _places_of(items: _Items, placements: Placements, written: WrittenFiles) -> dict[MetadataIndex, StorageInfo]:
    """Where each item lies."""
    offsets, lengths = placements.offset.copy(), placements.nbytes.copy()
    offsets[placements.variable], lengths[placements.variable] = written.variable_places.T
    found = {}
    for place, (file, offset, nbytes) in enumerate(
        zip(placements.file.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    ):
        is_chunk = place < len(items.chunks)
        index = MetadataIndex(items.name(place), torch.Size(items.chunk_offset(place)) if is_chunk else None)
        found[index] = StorageInfo(written.names[file], offset, nbytes)
    return found
