"""Converts between DCP's ``WriteItem`` and our ``ItemStructure``.

``describe`` calls it for values that only stock's planner can describe. The save planner calls it for stock's hooks,
which pass write items to storage writers.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from robust_dcp.plan.structure import Form, ItemKind, ItemStructure

__all__ = ["structure_of", "write_item_of"]

_KINDS = {
    WriteItemType.TENSOR: ItemKind.TENSOR,
    WriteItemType.SHARD: ItemKind.SHARD,
    WriteItemType.BYTE_IO: ItemKind.BYTES,
}
_TYPES = {kind: item_type for item_type, kind in _KINDS.items()}


def structure_of(item: WriteItem, form: Form) -> ItemStructure:
    """The structure in ``item``, without its name."""
    data = item.tensor_data
    if data is None:
        return ItemStructure(kind=_KINDS[item.type], form=form)
    return ItemStructure(
        kind=_KINDS[item.type],
        form=form,
        dtype=str(data.properties.dtype).removeprefix("torch."),
        layout=str(data.properties.layout).removeprefix("torch."),
        requires_grad=bool(data.properties.requires_grad),
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def write_item_of(index: MetadataIndex, structure: ItemStructure) -> WriteItem:
    """The write item for ``structure``, as stock's planner makes it.

    ``pin_memory`` and ``memory_format`` have their defaults. torch has deprecated both, and no reader looks at them.
    """
    if structure.kind == ItemKind.BYTES:
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    return WriteItem(
        index=index,
        type=_TYPES[structure.kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(structure.offsets), sizes=torch.Size(structure.sizes)),
            properties=TensorProperties(
                dtype=getattr(torch, structure.dtype),
                layout=getattr(torch, structure.layout),
                requires_grad=structure.requires_grad,
            ),
            size=torch.Size(structure.shape),
        ),
    )
