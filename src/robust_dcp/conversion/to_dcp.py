"""Writes a DCP checkpoint from one process, without ever holding its tensors in memory.

Stock's ``save`` calls a planner that gives ``RobustWriter`` one write item for each piece of a tensor. The data of a
piece is read when the writer asks for it.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from robust_dcp.conversion.plan import ConversionPlan
from robust_dcp.storage.pieces import Piece, batches_of
from robust_dcp.storage.writer import RobustWriter

__all__ = ["write_dcp"]

_THREADS: Final = 2
_LEAST_BUFFER_NBYTES: Final = 1 << 20


def write_dcp(
    plan: ConversionPlan,
    directory: str,
    *,
    files: int,
    buffer_nbytes: int,
    progress: Callable[[int], object],
) -> None:
    """Write a checkpoint with the layout ``torch`` into ``directory``.

    Args:
        files: how many data files to write.
        buffer_nbytes: about how much memory the data may take.

    Raises:
        StorageError, CorruptCheckpoint: something cannot be read or written.
    """
    planner = _Planner(plan, buffer_nbytes // 8, progress)
    writer = RobustWriter(
        directory,
        threads=_THREADS,
        files_per_rank=files,
        buffer_bytes=max(buffer_nbytes // 2, _LEAST_BUFFER_NBYTES),
        report=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock says that one process saves, which is what is meant
        try:
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            cause = error.failures[0][0] if 0 in error.failures else error
            raise cause from error


class _Planner(dcp.DefaultSavePlanner):
    """Plans the pieces of a conversion."""

    def __init__(self, plan: ConversionPlan, piece_nbytes: int, progress: Callable[[int], object]) -> None:
        super().__init__()
        self._conversion = plan
        self._pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
        self._piece_nbytes = piece_nbytes
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def create_local_plan(self) -> SavePlan:
        items = []
        for batch in batches_of(self._conversion.tensors, self._piece_nbytes):
            for piece in batch:
                self._pieces[piece.tensor.name, piece.offsets] = piece
                items.append(_item_of(piece))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._conversion.objects]
        # Items without a path in the source stand under their names.
        self.plan = SavePlan(items, planner_data=dict(self._conversion.paths))
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._conversion.load(name), buffer)
            buffer.seek(0)
            return buffer
        piece = self._pieces[name, tuple(write_item.index.offset or ())]
        # One thread reads at a time, which keeps memory within its bound: the reader has buffers of its own.
        with self._lock:
            (value,) = self._conversion.read([piece])
            self._done += piece.nbytes
            self._progress(self._done)
        return value


def _item_of(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.lengths))
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.tensor.shape))
    is_whole = prod(piece.lengths) == prod(piece.tensor.shape)
    kind: Any = WriteItemType.TENSOR if is_whole else WriteItemType.SHARD
    return WriteItem(MetadataIndex(piece.tensor.name, chunk.offsets), kind, tensor_data=data)
