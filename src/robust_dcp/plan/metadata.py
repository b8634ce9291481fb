"""The ``.metadata`` of a checkpoint, from a global plan: what stock readers read.

Owns the translation of columns into DCP's ``Metadata``; the parts that a plan determines are made once and kept
with it, the names of files and the places of items of variable size are filled in at each commit. Coordinator only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.plan.global_plan import GlobalPlan
from robust_dcp.plan.structure import ItemKind
from robust_dcp.storage.engine import WrittenFiles
from robust_dcp.storage.layout import Placements
from robust_dcp.storage.metadata_file import StorageInfo
from robust_dcp.storage.paths import data_file_name

__all__ = ["MetadataTemplate"]

StateDictMetadata = dict[str, Any]


class MetadataTemplate:
    """The metadata of all checkpoints that are written by one plan.

    Args:
        plan: the global plan.
        placements: for each rank the places of its kept items, or ``None`` where another writer decides them.
    """

    def __init__(self, plan: GlobalPlan, placements: Sequence[Placements] | None) -> None:
        self._plan = plan
        self._placements = placements
        self._state_dict_metadata = _state_dict_metadata(plan)
        self._indices = None if placements is None else [_indices(plan, rank) for rank in range(len(plan.kept))]

    def without_storage(self) -> Metadata:
        """Metadata whose ``storage_data`` the writer has yet to fill in."""
        return Metadata(
            state_dict_metadata=dict(self._state_dict_metadata),
            planner_data=None if self._plan.paths is None else dict(self._plan.paths),
        )

    def with_storage(self, written: Sequence[WrittenFiles], storage_meta: StorageMeta) -> Metadata:
        """The complete metadata of a checkpoint.

        Args:
            written: for each rank the generation of its file names and the places of its items of variable size.
            storage_meta: goes into the file as it is.

        Raises:
            ValueError: if this plan's items were placed by another writer, or places are not one for each item.
        """
        if self._placements is None or self._indices is None:
            raise ValueError("this plan has no places: it was made for another writer than RobustWriter")
        storage_data: dict[MetadataIndex, Any] = {}
        for rank, (placements, indices, files) in enumerate(zip(self._placements, self._indices, written, strict=True)):
            if len(files.variable_places) != len(placements.variable):
                raise ValueError(
                    f"rank {rank} gave {len(files.variable_places)} places for {len(placements.variable)} items of "
                    "variable size"
                )
            offset, nbytes = placements.offset.copy(), placements.nbytes.copy()
            offset[placements.variable] = files.variable_places[:, 0]
            nbytes[placements.variable] = files.variable_places[:, 1]
            names = [data_file_name(rank, number, files.generation) for number in range(placements.n_files)]
            storage_data.update(
                (index, StorageInfo(names[file], start, length))
                for index, file, start, length in zip(
                    indices, placements.file.tolist(), offset.tolist(), nbytes.tolist(), strict=True
                )
            )
        metadata = self.without_storage()
        metadata.storage_data = storage_data
        metadata.storage_meta = storage_meta
        return metadata


def _state_dict_metadata(plan: GlobalPlan) -> StateDictMetadata:
    columns, written = plan.columns, plan.written
    found: StateDictMetadata = {}
    # Plain lists: a NumPy scalar for each field of each item would cost several times as much.
    for row, place, is_bytes, ndim, offset, size in zip(
        written.tolist(),
        columns.name[written].tolist(),
        (columns.kind[written] == ItemKind.BYTES).tolist(),
        columns.ndim[written].tolist(),
        columns.offset[written].tolist(),
        columns.size[written].tolist(),
        strict=True,
    ):
        name = columns.names[place]
        if is_bytes:
            found[name] = BytesStorageMetadata()
            continue
        tensor = found.get(name)
        if tensor is None:
            tensor = found[name] = TensorStorageMetadata(
                properties=TensorProperties(
                    dtype=getattr(torch, columns.dtypes[columns.dtype[row]]),
                    layout=getattr(torch, columns.layouts[columns.layout[row]]),
                    requires_grad=bool(columns.requires_grad[row]),
                ),
                size=torch.Size(columns.shape[row, :ndim].tolist()),
                chunks=[],
            )
        tensor.chunks.append(
            ChunkStorageMetadata(
                offsets=torch.Size(offset[:ndim]),
                sizes=torch.Size(size[:ndim]),
            )
        )
    return found


def _indices(plan: GlobalPlan, rank: int) -> list[MetadataIndex]:
    """The storage keys of the items that ``rank`` writes, in the order of its plan."""
    table, kept = plan.columns.tables[rank], plan.kept[rank]
    offsets = table.offsets.tolist()
    return [
        MetadataIndex(table.names[place], None if is_bytes else torch.Size(offsets[start:end]))
        for place, is_bytes, start, end in zip(
            table.name_ids[kept].tolist(),
            (table.kinds[kept] == ItemKind.BYTES).tolist(),
            table.starts[kept].tolist(),
            table.starts[kept + 1].tolist(),
            strict=True,
        )
    ]
